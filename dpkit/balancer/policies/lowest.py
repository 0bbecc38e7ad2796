"""What the policies that take the lowest score share: a score is renewed only where a load changed.

Knows no formula. The picks are those of a plain loop over all engines, at a cost that hardly grows
with their number.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import Policy
from dpkit.balancer.scoreboard import ScoreBoard, make_board

if TYPE_CHECKING:
    from dpkit.abc import EngineLoad, LoadView
    from dpkit.messages import GenerateRequest


@define(eq=False)
class LowestScore(Policy):
    """Picks the engine with the lowest `rate`; of equals the first from the start of the scan."""

    _board: ScoreBoard = field(factory=ScoreBoard, init=False, repr=False)
    _start: int | None = field(default=None, init=False)

    @abc.abstractmethod
    def rate(self, load: EngineLoad, clients: int) -> float:
        """The score of an engine with this load; it may depend on nothing else."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - loads decide
        """Lowest score; of equals the first from the start on."""
        if view.changes:
            self._renew(view)
        if (start := self._start) is None:
            start = self._start = scan_start(view)
        return self._board.lowest(start)

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float:  # noqa: ARG002
        """The number that `pick` compares."""
        if view.changes:
            self._renew(view)
        return self._board[index]

    def on_engines(self, view: LoadView) -> None:
        """All scores are made anew; the scan goes on where it was, within those there are now."""
        self._board = ScoreBoard()
        if self._start is not None and view.loads:
            self._start %= len(view.loads)

    def _rotate(self, view: LoadView) -> None:
        """Move the start to the old one plus one, not the pick plus one: ties alone rotate."""
        start = scan_start(view) if self._start is None else self._start
        self._start = (start + 1) % len(view.loads)

    def _renew(self, view: LoadView) -> None:
        """A pick or a release changes one engine, a snapshot all of them."""
        board, changes, loads, clients = self._board, view.changes, view.loads, view.client_count
        if len(changes) < len(board):
            for index in changes:
                board[index] = self.rate(loads[index], clients)
        else:
            self._board = make_board([self.rate(load, clients) for load in loads])
        changes.clear()


def scan_start(view: LoadView) -> int:
    """Where this client's scan begins: the clients' are spread over the engines."""
    return len(view.engines) * view.client_index // view.client_count
