"""How engines and their cluster are, and what they have done: data, for whoever looks.

Knows nothing of lives or of how they follow one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import field, frozen

from dpkit.nursery.meter import Measured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.balancer.coordinator import CoordinatorStatistics
    from dpkit.balancer.health import HealthStatistics
    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.messages import EngineId, StepReport
    from dpkit.names import EngineState
    from dpkit.nursery.client import ClientStatistics
    from dpkit.nursery.fanin import FanInStatistics


class EngineStanding(NamedTuple):
    """Who an engine is, and how."""

    rank: int
    name: str
    state: EngineState


@frozen(kw_only=True)
class EngineTotals:
    """What an engine has done in all its lives. No count ever goes down."""

    requests: int = 0
    """Finished or aborted; one that went on elsewhere counts on each engine, but for those that it
    had not begun and was asked to give back."""
    prompt_tokens: int = 0
    """Of requests that gave a first token."""
    output_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    """Looked for in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Found there."""
    peak_kv_usage: float = 0.0
    restarts: int = 0
    measured: Measured = field(factory=Measured)

    @classmethod
    def of_life(cls, core: EngineCoreStatistics, measured: Measured, restarts: int) -> EngineTotals:
        """What one life has done so far, and how many came before it."""
        return cls(
            requests=core.requests_finished + core.requests_aborted,
            prompt_tokens=core.prompt_tokens,
            output_tokens=core.output_tokens,
            preemptions=core.preemptions,
            prefix_query_tokens=core.prefix_query_tokens,
            prefix_hit_tokens=core.prefix_hit_tokens,
            peak_kv_usage=core.peak_kv_usage,
            restarts=restarts,
            measured=measured,
        )

    def plus(self, other: EngineTotals) -> EngineTotals:
        """Those of two together."""
        return EngineTotals(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            preemptions=self.preemptions + other.preemptions,
            prefix_query_tokens=self.prefix_query_tokens + other.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens + other.prefix_hit_tokens,
            peak_kv_usage=max(self.peak_kv_usage, other.peak_kv_usage),
            restarts=self.restarts + other.restarts,
            measured=self.measured.plus(other.measured),
        )


@frozen(kw_only=True)
class EngineStatistics:
    """One engine at one moment. `core` counts since the birth of its present life."""

    engine: EngineId
    rank: int
    model: str
    state: EngineState
    since: float
    """When it came into this state, on Trio's clock."""
    restarts: int
    last_error: str | None
    """Of the life before, or of the last one of an engine that is down."""
    block_size: int
    """Tokens of one block of its KV pool."""
    report: StepReport
    core: EngineCoreStatistics
    totals: EngineTotals


@frozen(kw_only=True)
class ClusterStatistics:
    """The whole cluster at one moment; all counts are since its start unless named otherwise."""

    engines: tuple[EngineStatistics, ...]
    leaving: tuple[EngineStatistics, ...]
    """Engines that are about to leave or to come: nobody new is placed there."""
    departed: Mapping[int, EngineTotals]
    """What engines did that are gone, by the rank that they had."""
    clients: tuple[ClientStatistics, ...]
    coordinator: CoordinatorStatistics
    """Since its last restart."""
    coordinator_restarts: int
    arbiter_up: bool | None
    """Whether several clients that bind late have their arbiter; None: they need none."""
    fanin: FanInStatistics
    health: HealthStatistics
    events_lost: int
    """Events that the log file missed: the writer was too slow, or the disk would not have them."""
    steps_lost: int
    """Likewise, steps that the step log missed."""
