"""Every key of a dpkit TOML file, with its unit in its type and the reason for its default.

A class is a table; `why` is what docs/config.md and the JSON Schema say of a key. Knows nothing of
TOML text or positions (`dpkit.config.load`) and starts nothing. Configs are values: frozen,
compared by content, safe to share between tasks; one built in Python passes the same checks as a
file and raises the same `ConfigError`.
"""

# No `from __future__ import annotations`: cattrs reads these annotations at run time.
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import attrs
from attrs import Attribute, field, frozen
from attrs.validators import optional

from dpkit.config.checks import Between, MadeOf, at_least_one_table, model_name, policy_name
from dpkit.config.rules import Conflict, conflicts
from dpkit.config.units import Bytes, Seconds, show_duration, show_size
from dpkit.names import Dtype, EngineKind, PolicyName, Quant

EXTENDS = "extends"  # a word of files, read before there is a config: the file that lies below


def why(reason: str) -> Mapping[str, str]:
    """A key's reason, kept with the key."""
    return {"why": reason}


class LogLevel(enum.StrEnum):
    """How much dpkit says on stderr while it runs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@frozen(kw_only=True)
class ClusterConfig:
    """What holds for the whole tree."""

    name: str = field(
        default="dpkit",
        validator=MadeOf(r"[\w.-]+", "letters, digits, '_', '-' and '.'"),
        metadata=why("Shows in logs and in request ids; tells two clusters apart."),
    )
    seed: int | None = field(
        default=None,
        validator=optional(Between(0, 2**63 - 1)),
        metadata=why(
            "Fresh randomness. With a number, requests that bring no seed draw the same ones in "
            "every run."
        ),
    )
    grace: Seconds = field(
        default=10.0,
        validator=Between(0, 3600.0, show=show_duration),
        metadata=why(
            "The deadline of a shutdown: a third of the 30 s that Kubernetes allows a pod."
        ),
    )


@frozen(kw_only=True)
class SchedulerConfig:
    """The budget of one step. Left out, it is the model's own.

    A small CPU model and an H200 differ by a factor of ten here, so the model knows best.
    """

    max_num_seqs: int | None = field(
        default=None,
        validator=optional(Between(1, 65_536)),
        metadata=why(
            "The model's own. Requests that run at once: more share each read of the weights, "
            "fewer answer faster."
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        validator=optional(Between(1, 1_048_576)),
        metadata=why(
            "The model's own. Tokens in one step: more prefill faster, fewer let running requests "
            "wait less."
        ),
    )


@frozen(kw_only=True)
class KvConfig:
    """The paged KV cache of one engine.

    With neither `num_blocks` nor `memory` the pool has the size that the model suggests.
    """

    block_size: int = field(
        default=16,
        validator=Between(1, 1024),
        metadata=why("vLLM's: the waste is half a block a sequence, and block tables stay short."),
    )
    num_blocks: int | None = field(
        default=None,
        validator=optional(Between(1, 2**31 - 1)),  # block ids are 32-bit in attention kernels
        metadata=why("The model's own."),
    )
    memory: Bytes | None = field(
        default=None,
        validator=optional(Between(1, 2**50, show=show_size)),  # more is a slip of the unit
        metadata=why("The model's own."),
    )
    prefix_cache: bool = field(
        default=True, metadata=why("A hit saves its prefill; a miss costs one hash a block.")
    )


@frozen(kw_only=True)
class EngineGroupConfig:
    """A group of `count` equal engines, called NAME-0, NAME-1 and so on."""

    name: str = field(
        default="engine",
        validator=MadeOf("[a-z0-9_-]+", "'a' to 'z', digits, '_' and '-'"),
        metadata=why("One group needs no name."),
    )
    count: int = field(
        default=1,
        validator=Between(1, 1024),
        metadata=why("One always fits; more is a decision on memory."),
    )
    kind: EngineKind = field(
        default=EngineKind.LOCAL, metadata=why("A task in this process: nothing to set up.")
    )
    model: str = field(
        validator=model_name, metadata=why("There is no model that everybody means.")
    )
    dtype: Dtype = field(
        default=Dtype.AUTO,
        metadata=why(
            "bfloat16 where the CPU is fast at it, else float32, which is exact everywhere. For "
            "models with weights only."
        ),
    )
    quant: Quant = field(
        default=Quant.NONE,
        metadata=why(
            "Weights as they are. Decoding waits for weights to be read: four bits are faster and "
            "a little less exact. For models with weights only."
        ),
    )
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    kv: KvConfig = field(factory=KvConfig)


@frozen(kw_only=True)
class CoordinatorConfig:
    """How the engines' queue counts reach the balancer."""

    interval: Seconds = field(
        default=0.1,
        validator=Between(0.001, 60.0, show=show_duration),
        metadata=why("vLLM's: a few steps of a busy engine, and ten small messages a second."),
    )
    publish: bool = field(
        default=True, metadata=why("Without it, policies see their own in-flight counts only.")
    )
    wave_coordination: bool = field(
        default=False,
        metadata=why(
            "Right for dense models. Ranks of a mixture-of-experts model step together: true."
        ),
    )
    kv_publish_delta: float = field(
        default=0.02,
        validator=Between(0.0, 1.0),
        metadata=why(
            "Long decodes fill the cache while the queue counts stand still; a fiftieth is worth "
            "a message."
        ),
    )


@frozen(kw_only=True)
class BalancerConfig:
    """Who picks the engine of a request."""

    policy: str = field(
        default=PolicyName.KV_PRESSURE.value,
        validator=policy_name,
        metadata=why(
            "Sees exact in-flight counts, all clients' queues, and the KV pressure behind a queue."
        ),
    )


@frozen(kw_only=True)
class LogConfig:
    """How much is said while all runs."""

    level: LogLevel = field(default=LogLevel.WARNING, metadata=why("Quiet while all is well."))


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
