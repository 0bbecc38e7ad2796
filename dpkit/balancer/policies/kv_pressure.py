"""`kv_pressure`: own in-flight as a floor, and a queue weighs more the fuller the KV cache is.

The score of vLLM 0.33.0's Python client (its pull request 49204), choice for choice. It counts
requests, not tokens: a prompt of 10,000 tokens weighs as much as one of ten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import Policy

if TYPE_CHECKING:
    from dpkit.abc import LoadView
    from dpkit.messages import GenerateRequest


@define(kw_only=True, eq=False)
class KvPressure(Policy):
    """Lowest `max(clients * in-flight, waiting + running) + waiting * penalty(KV)`; ties rotate."""

    kv_weight: float = 6.0
    """Penalty per waiting request and unit of KV use above the threshold. vLLM: 6.0, so that a
    full cache adds three times its queue."""

    kv_threshold: float = 0.5
    """Share of KV blocks below which a queue is only a queue. vLLM: 0.5."""

    _start: int | None = field(default=None, init=False)

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - counts decide
        """Lowest score; of equals the first from the rotating start."""
        scores = [
            self._score(view.client_count * inflight, waiting, running, kv_cache_usage)
            for inflight, waiting, running, kv_cache_usage in zip(
                view.inflight, view.waiting, view.running, view.kv_cache_usage, strict=True
            )
        ]
        start = self._scan_start(view)
        lowest = min(scores)
        try:
            return scores.index(lowest, start)
        except ValueError:  # none from the start on: the scan goes round
            return scores.index(lowest)

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float:  # noqa: ARG002
        """The number that `pick` compares."""
        inflight, waiting, running, kv_cache_usage = view.load(index)
        return self._score(view.client_count * inflight, waiting, running, kv_cache_usage)

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Move the start by one and count the request as waiting; a pinned one does neither."""
        if request.engine is None:
            # The old start plus one, not the pick plus one: ties alone rotate.
            self._start = (self._scan_start(view) + 1) % len(view.engines)
            # All clients see the same snapshot: assume that each of them picks as this one does.
            view.bump_waiting(index, view.client_count)

    def _score(self, floor: int, waiting: int, running: int, kv_cache_usage: float) -> float:
        """A snapshot can raise a score above the in-flight floor, never lower it below."""
        base = max(floor, waiting + running)
        return base + waiting * self.kv_weight * max(0.0, kv_cache_usage - self.kv_threshold)

    def _scan_start(self, view: LoadView) -> int:
        """Clients begin spread over the engines, so that their first picks differ."""
        if self._start is None:
            return len(view.engines) * view.client_index // view.client_count
        return self._start
