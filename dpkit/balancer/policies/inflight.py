"""`inflight`: the larger of what this client has in flight and what the engine says it has.

The score of vLLM 0.33.0's Rust client: no weight on a queue, no KV term, on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.abc import Policy

if TYPE_CHECKING:
    from dpkit.abc import LoadView
    from dpkit.messages import GenerateRequest


class Inflight(Policy):
    """Lowest `max(in-flight, running + waiting)`; ties go to the lowest index."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - counts decide
        """Lowest score; of equals the lowest index."""
        scores = [
            max(inflight, running + waiting)
            for inflight, waiting, running in zip(
                view.inflight, view.waiting, view.running, strict=True
            )
        ]
        return scores.index(min(scores))

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float:  # noqa: ARG002
        """The number that `pick` compares."""
        load = view.load(index)
        return max(load.inflight, load.running + load.waiting)
