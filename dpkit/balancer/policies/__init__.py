"""Balancing policies by name: the built-in ones, and yours as ``"pkg.mod:Class"``.

Knows nothing of engines or configs. A policy belongs to one client's dispatch and keeps its state.
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING

from dpkit.abc import Policy
from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.balancer.policies.inflight import Inflight
from dpkit.balancer.policies.kv_pressure import KvPressure
from dpkit.balancer.policies.least_tokens import LeastTokens
from dpkit.balancer.policies.power_of_two import PowerOfTwo
from dpkit.balancer.policies.queue_weighted import QueueWeighted
from dpkit.balancer.policies.round_robin import RoundRobin
from dpkit.balancer.policies.uniform import Random
from dpkit.errors import ConfigError
from dpkit.imports import NotThere, find_named
from dpkit.names import PolicyName

if TYPE_CHECKING:
    import random

BUILTIN: dict[PolicyName, type[Policy]] = {
    PolicyName.KV_PRESSURE: KvPressure,
    PolicyName.INFLIGHT: Inflight,
    PolicyName.QUEUE_WEIGHTED: QueueWeighted,
    PolicyName.LEAST_TOKENS: LeastTokens,
    PolicyName.POWER_OF_TWO: PowerOfTwo,
    PolicyName.ROUND_ROBIN: RoundRobin,
    PolicyName.RANDOM: Random,
    PolicyName.EXPECTED_TTFT: ExpectedTtft,
}


def load_policy(name: str, *, rng: random.Random | None = None) -> Policy:
    """Make a fresh policy: a `PolicyName`, or ``"pkg.mod:Class"`` for a subclass of `Policy`.

    Args:
        name: Which one.
        rng: Where the policy's random draws come from, so that a run can be repeated. It goes to
            a policy whose constructor takes `rng`; such a policy has one of its own if left out.

    Error handling:
        ConfigError: no such policy; its module cannot be imported; or it is not a `Policy` that
        can be made without further arguments. `__cause__` is the underlying error where there is
        one.
    """
    policy_class = find_policy(name)
    options = {}
    try:
        if rng is not None and "rng" in inspect.signature(policy_class).parameters:
            options["rng"] = rng
        return policy_class(**options)
    except Exception as error:
        raise ConfigError([f"policy {name!r} cannot be made without arguments: {error}"]) from error


def find_policy(name: str) -> type[Policy]:
    """The class of a policy, by what `load_policy` makes it of.

    Raises:
        ConfigError: there is none of this name, as for `load_policy`.
    """
    return _import(name) if ":" in name else _builtin(name)


def policy_name(policy: Policy) -> str:
    """The name by which `load_policy` makes such a policy."""
    policy_class = type(policy)
    for name, builtin in BUILTIN.items():
        if policy_class is builtin:
            return name.value
    return f"{policy_class.__module__}:{policy_class.__qualname__}"


def _builtin(name: str) -> type[Policy]:
    try:
        return BUILTIN[PolicyName(name)]
    except ValueError:
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        hint = f"; did you mean {str(near[0])!r}?" if near else ""
        problem = (
            f"there is no policy {name!r}: the built-in ones are {', '.join(BUILTIN)}; "
            f"one of your own is named 'pkg.mod:Class'{hint}"
        )
        raise ConfigError([problem]) from None


def _import(name: str) -> type[Policy]:
    module_name, _, attribute = name.partition(":")
    try:
        found = find_named(module_name, attribute)
    except NotThere as error:
        raise ConfigError([f"policy {name!r}: {error}"]) from error
    except Exception as error:
        raise ConfigError(
            [f"policy {name!r}: module {module_name!r} cannot be imported: {error}"]
        ) from error
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        problem = (
            f"policy {name!r}: {attribute!r} in module {module_name!r} is {found!r}; "
            "it must be a subclass of dpkit.abc.Policy"
        )
        raise ConfigError([problem])
    return found
