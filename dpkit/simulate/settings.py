"""A config as it is simulated: which of its engines, in this process, with nothing turned away.

Takes a config that may be meant for production and changes only what a virtual clock needs, and
what the caller asks for. Starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from dpkit.config.schema import ClusterConfig, LogConfig
from dpkit.costmodel import PRESETS
from dpkit.engine.models import load_face
from dpkit.engine.models.cost import CostModel
from dpkit.errors import ConfigError
from dpkit.names import EngineKind
from dpkit.nursery.limits import limits_of
from dpkit.simulate.workloads import WORKLOADS

if TYPE_CHECKING:
    from dpkit.config.groups import EngineGroupConfig
    from dpkit.config.layers import Layers
    from dpkit.config.schema import Config
    from dpkit.costmodel import StepCost
    from dpkit.engine.limits import EngineLimits

_FOR_EVER_S = 86_400.0
"""The longest that a config lets a request wait in the queue."""

_EVERYONE = 1_048_576
"""The longest queue that a config can ask for."""


def text_for(workload: str) -> str:
    """The config file that a synthetic workload was made for."""
    made_for = WORKLOADS[workload]
    lines = ["[[engines]]", f'model = "cost:{made_for.preset}"', f"count = {made_for.engines}"]
    if made_for.max_num_seqs is not None:
        lines += ["[engines.scheduler]", f"max_num_seqs = {made_for.max_num_seqs}"]
    return "\n".join(lines) + "\n"


def simulated(
    config: Config,
    *,
    engines: int | None = None,
    seed: int = 0,
    layers: Layers | None = None,
) -> Config:
    """Make of a config what is simulated.

    Every engine is a task of this process. No request is turned away or times out, whatever
    ``[admission]`` says: policies are compared by what they make of the same requests.

    Args:
        config: Any whose models are ``cost:…``.
        engines: In the place of the count of its one group.
        seed: Of all that is drawn.
        layers: What the config was put together from: says where a wrong model stands.

    Raises:
        ConfigError: a model's steps have no known cost, or `engines` is given for several groups.
    """
    problems = [
        f"{_place(layers, index)}engines.{index}.model: what a step of {group.model!r} costs is "
        'not known; simulate with "cost:PRESET", of '
        f"{', '.join(PRESETS)}, or a file made by `dpkit fit`"
        for index, group in enumerate(config.engines)
        if not group.model.startswith("cost:")
    ]
    if engines is not None and len(config.engines) > 1:
        problems.append(
            f"--engines {engines}: the config has {len(config.engines)} groups of engines, and it "
            "does not say which; change their counts with --set"
        )
    if problems:
        raise ConfigError(problems)
    groups = tuple(
        evolve(group, kind=EngineKind.LOCAL, count=engines or group.count)
        for group in config.engines
    )
    return evolve(
        config,
        engines=groups,
        cluster=ClusterConfig(name=config.cluster.name, seed=seed),
        admission=evolve(
            config.admission, max_queued=_EVERYONE, queue_timeout=_FOR_EVER_S, retry_budget=1.0
        ),
        log=LogConfig(),
        server=None,
    )


def _place(layers: Layers | None, index: int) -> str:
    if layers is None:
        return ""
    path = ("engines", index, "model")
    return f"{layers.source(path).at(path)}: "


def costs_of(group: EngineGroupConfig) -> tuple[StepCost, EngineLimits]:
    """What the steps of a group's engines cost, and what each of them holds.

    Raises:
        ModelNotFound: there is no such preset.
    """
    model = load_face(group.model)
    assert isinstance(model, CostModel)  # noqa: S101 - `simulated` takes no other
    return model.cost, limits_of(group, model.spec)


def smallest_kv(config: Config) -> int:
    """Tokens that the smallest engine holds: what every request must fit into."""
    return min(costs_of(group)[1].kv_tokens for group in config.engines)
