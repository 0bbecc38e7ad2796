"""`least_tokens`: the engine with the fewest tokens in flight, so that long prompts weigh more.

A request weighs its prompt and half of its `max_tokens`: what it holds on average over its life,
if it may end anywhere before `max_tokens`. What an engine has cached of a prompt is not known here
and not deducted. Own requests count from the pick on, so a burst spreads before anybody reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.balancer.policies.lowest import LowestScore

if TYPE_CHECKING:
    from dpkit.abc import EngineLoad, LoadView
    from dpkit.messages import GenerateRequest


@define(eq=False)
class LeastTokens(LowestScore):
    """Lowest `tokens + others * mean`; ties rotate.

    A snapshot counts the requests of other clients, not their tokens: each is taken for as large
    as this client's own were on average when the snapshot came. It can raise a score above the own
    tokens, never lower it below.
    """

    _mean: float | None = field(default=None, init=False)

    def rate(self, load: EngineLoad, clients: int) -> float:  # noqa: ARG002 - others are counted
        """Tokens of all clients, as far as they are known."""
        return load.tokens + load.others * (self._mean or 1.0)

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:  # noqa: ARG002
        """Move the start by one; a pinned request does not."""
        if self._mean is None:
            self._learn(view)
            view.changes.update(range(len(view.loads)))  # all are rated by another mean now
        if request.engine is None:
            self._rotate(view)

    def on_snapshot(self, view: LoadView) -> None:
        """Learn how large requests are; all engines are rated anew in any case."""
        self._learn(view)

    def _learn(self, view: LoadView) -> None:
        if (inflight := sum(load.inflight for load in view.loads)) > 0:
            self._mean = sum(load.tokens for load in view.loads) / inflight
