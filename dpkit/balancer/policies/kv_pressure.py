"""`kv_pressure`: own in-flight as a floor, and a queue weighs more the fuller the KV cache is.

The score of vLLM 0.33.0's Python client (its pull request 49204), choice for choice. It counts
requests, not tokens: a prompt of 10,000 tokens weighs as much as one of ten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from dpkit.balancer.policies.lowest import LowestScore

if TYPE_CHECKING:
    from dpkit.abc import EngineLoad, LoadView
    from dpkit.messages import GenerateRequest


@define(kw_only=True, eq=False)
class KvPressure(LowestScore):
    """Lowest `max(clients * in-flight, waiting + running) + waiting * penalty(KV)`; ties rotate."""

    kv_weight: float = 6.0
    """Penalty per waiting request and unit of KV use above the threshold. vLLM: 6.0, so that a
    full cache adds three times its queue."""

    kv_threshold: float = 0.5
    """Share of KV blocks below which a queue is only a queue. vLLM: 0.5."""

    def rate(self, load: EngineLoad, clients: int) -> float:
        """A snapshot can raise a score above the in-flight floor, never lower it below."""
        waiting = load.waiting
        score = 0.0 + waiting + load.running  # all floats: a min of them takes half the time
        if score < (floor := clients * load.inflight):
            score = 0.0 + floor
        if waiting and (pressure := load.kv_cache_usage - self.kv_threshold) > 0.0:
            score += waiting * self.kv_weight * pressure
        return score

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Move the start by one and count the request as waiting; a pinned one does neither."""
        if request.engine is None:
            self._rotate(view)
            # All clients see the same snapshot: assume that each of them picks as this one does.
            view.bump_waiting(index, view.client_count)
