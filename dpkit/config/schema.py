"""Every key of a dpkit TOML file, with its unit in its type and the reason beside its default.

A class is a table. Knows nothing of TOML text or positions (`dpkit.config.load`) and starts
nothing. Configs are values: frozen, compared by content, safe to share between tasks; one built in
Python passes the same checks as a file and raises the same `ConfigError`.
"""

# No `from __future__ import annotations`: cattrs reads these annotations at run time.
import enum
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import attrs
from attrs import Attribute, field, frozen
from attrs.validators import optional

from dpkit.config.checks import at_least_one_table, between, made_of, model_name, policy_name
from dpkit.config.rules import Conflict, conflicts
from dpkit.config.units import Bytes, Seconds, show_duration, show_size
from dpkit.names import Dtype, EngineKind, PolicyName, Quant


class LogLevel(enum.StrEnum):
    """How much dpkit says on stderr while it runs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@frozen(kw_only=True)
class ClusterConfig:
    """``[cluster]``: what holds for the whole tree."""

    name: str = field(
        default="dpkit",  # shows in logs and metrics only
        validator=made_of(r"[\w.-]+", "letters, digits, '_', '-' and '.'"),
    )
    seed: int | None = field(
        default=None,  # fresh randomness; a number repeats a run's draws
        validator=optional(between(0, 2**63 - 1)),
    )
    grace: Seconds = field(
        default=10.0,  # deadline of a shutdown: a third of the 30 s Kubernetes allows a pod
        validator=between(0, 3600.0, show=show_duration),
    )


@frozen(kw_only=True)
class SchedulerConfig:
    """``[engines.scheduler]``: the budget of one step. None is the model's own default.

    A small CPU model and an H200 differ by a factor of ten here, so the model knows best.
    """

    max_num_seqs: int | None = field(default=None, validator=optional(between(1, 65_536)))
    max_num_batched_tokens: int | None = field(
        default=None, validator=optional(between(1, 1_048_576))
    )


@frozen(kw_only=True)
class KvConfig:
    """``[engines.kv]``: the paged KV cache of one engine.

    With neither `num_blocks` nor `memory` the pool has the size that the model suggests.
    """

    block_size: int = field(
        default=16,  # tokens; vLLM's: waste is half a block a sequence, tables stay short
        validator=between(1, 1024),
    )
    num_blocks: int | None = field(
        default=None,  # the model's suggestion
        validator=optional(between(1, 2**31 - 1)),  # block ids are 32-bit in attention kernels
    )
    memory: Bytes | None = field(
        default=None,  # the model's suggestion
        validator=optional(between(1, 2**50, show=show_size)),  # more is a slip of the unit
    )
    prefix_cache: bool = True  # a hit saves its prefill, a miss costs one hash a block


@frozen(kw_only=True)
class EngineGroupConfig:
    """``[[engines]]``: `count` equal engines, called ``NAME-0``, ``NAME-1`` and so on."""

    name: str = field(
        default="engine",
        validator=made_of("[a-z0-9_-]+", "'a' to 'z', digits, '_' and '-'"),
    )
    count: int = field(
        default=1,  # one always fits; more is a decision on memory
        validator=between(1, 1024),
    )
    kind: EngineKind = EngineKind.LOCAL  # nothing to set up: a task in this process
    model: str = field(validator=model_name)
    dtype: Dtype = Dtype.AUTO  # the fastest that this machine computes without loss of sense
    quant: Quant = Quant.NONE  # exact; int4 trades some quality for a quarter of the memory reads
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    kv: KvConfig = field(factory=KvConfig)


@frozen(kw_only=True)
class CoordinatorConfig:
    """``[coordinator]``: how engines' queue counts reach the balancer."""

    interval: Seconds = field(
        default=0.1,  # vLLM's: a few steps of a busy engine, and ten small messages a second
        validator=between(0.001, 60.0, show=show_duration),
    )
    publish: bool = True  # without it a policy sees in-flight counts only
    wave_coordination: bool = False  # right for dense models; mixture-of-experts ranks run in step
    kv_publish_delta: float = field(
        default=0.02,  # a share: long decodes fill the cache while the queue counts stand still
        validator=between(0.0, 1.0),
    )


@frozen(kw_only=True)
class BalancerConfig:
    """``[balancer]``: who picks the engine of a request."""

    policy: str = field(
        default=PolicyName.KV_PRESSURE.value,  # sees queues and the KV pressure behind them
        validator=policy_name,
    )


@frozen(kw_only=True)
class LogConfig:
    """``[log]``."""

    level: LogLevel = LogLevel.WARNING  # quiet while all is well


def _tuple(groups: Iterable[EngineGroupConfig]) -> tuple[EngineGroupConfig, ...]:
    """Typed, so that a checker lets a list stand for the tuple."""
    return tuple(groups)


@frozen(kw_only=True)
class Config:
    """The whole file."""

    cluster: ClusterConfig = field(factory=ClusterConfig)
    engines: tuple[EngineGroupConfig, ...] = field(converter=_tuple, validator=at_least_one_table)
    coordinator: CoordinatorConfig = field(factory=CoordinatorConfig)
    balancer: BalancerConfig = field(factory=BalancerConfig)
    log: LogConfig = field(factory=LogConfig)

    def __attrs_post_init__(self) -> None:
        """Check the rules between keys; those of one key are its validator."""
        found = list(conflicts(attrs.asdict(self)))
        if found:
            raise Conflict(found)


def table_of(attribute: "Attribute[Any]") -> type | None:
    """The class of the table (or of each table of the array) that a key holds; None for a value."""
    candidates = (attribute.type, *get_args(attribute.type))
    return next((kind for kind in candidates if attrs.has(kind)), None)


def walk(table: type = Config, prefix: str = "") -> Iterator[tuple[str, "Attribute[Any]"]]:
    """Every key as ``("engines.kv.block_size", attribute)``, tables included, in file order."""
    for attribute in attrs.fields(table):
        key = prefix + attribute.name
        yield key, attribute
        nested = table_of(attribute)
        if nested is not None:
            yield from walk(nested, f"{key}.")
