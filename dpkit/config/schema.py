"""Every key of a dpkit TOML file, with its unit in its type and the reason for its default.

A class is a table; `why` is what docs/config.md and the JSON Schema say of a key. Knows nothing of
TOML text or positions (`dpkit.config.load`) and starts nothing. Configs are values: frozen,
compared by content, safe to share between tasks; one built in Python passes the same checks as a
file and raises the same `ConfigError`.
"""

# No `from __future__ import annotations`: cattrs reads these annotations at run time.
import enum
from collections.abc import Iterable, Iterator
from typing import Any, Self, get_args

import attrs
from attrs import Attribute, field, frozen
from attrs.validators import optional

from dpkit.config.checks import Between, MadeOf, at_least_one_table, policy_name, writable_path
from dpkit.config.groups import EngineGroupConfig as EngineGroupConfig  # noqa: PLC0414 - to be had from here
from dpkit.config.groups import KvConfig as KvConfig  # noqa: PLC0414 - likewise
from dpkit.config.groups import ProcessConfig as ProcessConfig  # noqa: PLC0414 - likewise
from dpkit.config.groups import SchedulerConfig as SchedulerConfig  # noqa: PLC0414 - likewise
from dpkit.config.groups import SupervisionConfig as SupervisionConfig  # noqa: PLC0414 - likewise
from dpkit.config.groups import VllmConfig as VllmConfig  # noqa: PLC0414 - likewise
from dpkit.config.reasons import why
from dpkit.config.rules import Conflict, conflicts
from dpkit.config.server import ServerConfig as ServerConfig  # noqa: PLC0414 - likewise
from dpkit.config.units import Seconds, show_duration
from dpkit.names import HOLDING_POLICIES, Binding, EngineKind, PolicyName

EXTENDS = "extends"  # a word of files, read before there is a config: the file that lies below


class LogLevel(enum.StrEnum):
    """How much dpkit says on stderr while it runs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """How log records are written."""

    TEXT = "text"
    JSON = "json"


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
    kill_after: Seconds | None = field(
        default=None,
        validator=optional(Between(0, 3600.0, show=show_duration)),
        metadata=why(
            "A fifth of grace. Its last part: what still runs is ended by force, and engines have "
            "time to end in order."
        ),
    )
    pre_stop: Seconds = field(
        default=0.0,
        validator=Between(0, 3600.0, show=show_duration),
        metadata=why(
            "Nothing to wait for. Behind a load balancer: how long it may still send requests "
            "after it was told not to. Counts as part of grace, as in Kubernetes."
        ),
    )
    min_ready: int = field(
        default=1,
        validator=Between(1, 65_536),
        metadata=why(
            "Whatever still answers is better than nothing. With fewer engines than this that are "
            "not given up, the cluster ends."
        ),
    )

    @property
    def finish_within(self) -> float:
        """Seconds of a shutdown in which requests may still finish by themselves."""
        kill_after = self.grace / 5 if self.kill_after is None else self.kill_after
        return self.grace - kill_after


@frozen(kw_only=True)
class AdmissionConfig:
    """How many requests are let in, how long they wait, and what becomes of those that are lost.

    Each client counts its own.
    """

    max_inflight: int | None = field(
        default=None,
        validator=optional(Between(1, 1_048_576)),
        metadata=why(
            "No bound: engines queue by themselves. With one, the client queues, where priorities "
            "and tenants count."
        ),
    )
    max_queued: int = field(
        default=1024,
        validator=Between(0, 1_048_576),
        metadata=why(
            "More would wait for minutes: better refused at once, and told when to retry."
        ),
    )
    queue_timeout: Seconds = field(
        default=60.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why("By then a person has left. Longer for batch work."),
    )
    retries: int = field(
        default=1,
        validator=Between(0, 100),
        metadata=why(
            "Placements after a loss, as long as nothing was delivered. One survives a lost "
            "engine; more let a request that kills engines kill more of them."
        ),
    )
    retry_budget: float = field(
        default=0.2,
        validator=Between(0.0, 1.0),
        metadata=why(
            "Of all requests of ten seconds, at most this share are such placements, or ten: "
            "Finagle's and Envoy's figure. A loss that finds it kept is made good in full; in a "
            "storm, the rest ends."
        ),
    )
    resume: bool = field(
        default=False,
        metadata=why(
            "What was begun ends with EngineLost, the output so far readable. With true it goes on "
            "elsewhere from prompt and output."
        ),
    )


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
    sync_interval: int = field(
        default=16,
        validator=Between(1, 4096),
        metadata=why(
            "Engines that step together vote whether anybody has work left, at their first step "
            "and after each so many: vLLM's number. Fewer: a wave ends sooner; more: fewer votes."
        ),
    )
    vote_timeout: Seconds = field(
        default=120.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why(
            "Of engines that step together: as long as their longest step may take "
            "(engines.supervision.step_timeout). Who waits longer takes the group for lost."
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
    binding: Binding | None = field(
        default=None,
        metadata=why(
            "Left out: late if the policy can hold requests, as expected_ttft can, or one of your "
            "own that is a dpkit.abc.HoldingPolicy; else early."
        ),
    )
    eject_after: int = field(
        default=3,
        validator=Between(1, 1000),
        metadata=why(
            "Losses in a row, without a first token between. Envoy takes 5 errors; a lost engine "
            "costs more than an error."
        ),
    )
    eject_for: Seconds = field(
        default=1.0,
        validator=Between(0.001, 3600.0, show=show_duration),
        metadata=why(
            "The n-th time n times as long, as in Envoy. Its 30 s are for hosts whose health "
            "nobody probes; here one request does."
        ),
    )
    eject_max: Seconds = field(
        default=60.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why("Envoy's is 300 s. As much time without an ejection forgives one."),
    )
    eject_max_share: float = field(
        default=0.5,
        validator=Between(0.0, 1.0),
        metadata=why(
            "At most this share of the engines at once. Envoy's is 0.1, for fleets; of two "
            "engines, one must go. 0: none ever."
        ),
    )

    @property
    def bound(self) -> Binding | None:
        """When requests get their engines; None: the policy is one's own, and its class decides."""
        if self.binding is not None or ":" in self.policy:
            return self.binding
        return Binding.LATE if self.policy in HOLDING_POLICIES else Binding.EARLY

    def binds_like(self, other: Self) -> bool:
        """Whether the same policy decides, and when the other's does."""
        return self.policy == other.policy and self.bound is other.bound


@frozen(kw_only=True)
class LogConfig:
    """What is said while all runs, and where."""

    level: LogLevel = field(default=LogLevel.WARNING, metadata=why("Quiet while all is well."))
    format: LogFormat = field(
        default=LogFormat.TEXT,
        metadata=why("For people. 'json' is one object a line, for what gathers logs."),
    )
    prompts: bool = field(
        default=False,
        metadata=why(
            "What clients ask is nobody's business. True: the body of each HTTP request for text "
            "is logged, at level info."
        ),
    )
    events: str | None = field(
        default=None,
        validator=optional(writable_path),
        metadata=why("Not written. A file that grows by one JSON object for each event."),
    )
    steps: str | None = field(
        default=None,
        validator=optional(writable_path),
        metadata=why(
            "Not written. A table that grows by a row for each step: what dpkit fit reads."
        ),
    )


def _tuple(groups: Iterable[EngineGroupConfig]) -> tuple[EngineGroupConfig, ...]:
    """Typed, so that a checker lets a list stand for the tuple."""
    return tuple(groups)


@frozen(kw_only=True)
class Config:
    """The whole file."""

    cluster: ClusterConfig = field(factory=ClusterConfig)
    engines: tuple[EngineGroupConfig, ...] = field(converter=_tuple, validator=at_least_one_table)
    admission: AdmissionConfig = field(factory=AdmissionConfig)
    coordinator: CoordinatorConfig = field(factory=CoordinatorConfig)
    balancer: BalancerConfig = field(factory=BalancerConfig)
    log: LogConfig = field(factory=LogConfig)
    server: ServerConfig | None = None

    def __attrs_post_init__(self) -> None:
        """Check the rules between keys; those of one key are its validator."""
        found = list(conflicts(attrs.asdict(self)))
        if found:
            raise Conflict(found)

    @property
    def is_uniform(self) -> bool:
        """Whether all engines compute alike: each says what any other would have said."""
        vllm = EngineKind.VLLM
        return len({(e.kind is vllm, e.dtype, e.quant, e.device) for e in self.engines}) == 1

    def steps_together(self, group: EngineGroupConfig) -> bool:
        """Whether the engines of one of its groups step together, in waves: tasks here do not."""
        return (
            self.coordinator.wave_coordination
            and group.kind is not EngineKind.LOCAL
            and group.count > 1
        )


def table_of(attribute: "Attribute[Any]") -> type | None:
    """The class of the table (or of each table of the array) that a key holds; None for a value."""
    candidates = (attribute.type, *get_args(attribute.type))
    return next((kind for kind in candidates if attrs.has(kind)), None)


def may_be_absent(attribute: "Attribute[Any]") -> bool:
    """Whether a table that is not in the file is not there at all, rather than at its defaults."""
    return attribute.default is None and table_of(attribute) is not None


def walk(table: type = Config, prefix: str = "") -> Iterator[tuple[str, "Attribute[Any]"]]:
    """Every key as ``("engines.kv.block_size", attribute)``, tables included, in file order."""
    for attribute in attrs.fields(table):
        key = prefix + attribute.name
        yield key, attribute
        nested = table_of(attribute)
        if nested is not None:
            yield from walk(nested, f"{key}.")
