"""`inflight`: the larger of what this client has in flight and what the engine says it has.

The score of vLLM 0.33.0's Rust client: no weight on a queue, no KV term, on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.balancer.policies.lowest import LowestScore

if TYPE_CHECKING:
    from dpkit.abc import EngineLoad


@define(eq=False)
class Inflight(LowestScore):
    """Lowest `max(in-flight, running + waiting)`; ties go to the lowest index."""

    _start: int | None = field(default=0, init=False)

    def rate(self, load: EngineLoad, clients: int) -> float:  # noqa: ARG002 - each for itself
        """The score of one engine."""
        return max(load.inflight, load.running + load.waiting)
