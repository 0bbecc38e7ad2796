"""`queue_weighted`: the snapshot alone, a waiting request weighing as much as four running ones.

What vLLM's Python client did before its pull request 49204; kept as a baseline. Blind to its own
in-flight requests once a snapshot comes, and round robin where none ever does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from dpkit.balancer.policies.lowest import LowestScore

if TYPE_CHECKING:
    from dpkit.abc import EngineLoad, LoadView
    from dpkit.messages import GenerateRequest


@define(kw_only=True, eq=False)
class QueueWeighted(LowestScore):
    """Lowest `4 * waiting + running`; ties go to the first from this client's fixed start."""

    waiting_weight: int = 4
    """Running requests that one waiting request weighs. vLLM: 4."""

    def rate(self, load: EngineLoad, clients: int) -> float:  # noqa: ARG002 - see `on_charge`
        """The score of one engine."""
        return load.waiting * self.waiting_weight + load.running

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Count the request as waiting, once for each client; a pinned one is not counted."""
        if request.engine is None:
            view.bump_waiting(index, view.client_count)

    def on_engines(self, view: LoadView) -> None:
        """As ever; and the fixed start is reckoned anew, so that the clients' stay spread."""
        super().on_engines(view)
        self._start = None
