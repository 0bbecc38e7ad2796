"""The lowest of many scores, when few of them change between one look and the next.

Knows nothing of engines, loads or policies. A heap or a tournament tree would look at fewer
scores, but breaks ties by its own history; here the answer is always the one that a plain scan
from the start would give.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FLAT = 64
"""Up to this many scores one pass over all of them costs less than any bookkeeping."""


class ScoreBoard(list[float]):
    """Scores by index, and the lowest of them; `make_board` chooses the kind."""

    def lowest(self, start: int) -> int:
        """Index of the lowest score; of equals the first of start, start + 1, … going round."""
        lowest = min(self)
        first = self.index(lowest)
        if first < start:
            rest = self[start:]
            if lowest in rest:  # asked, as the ValueError of `index` costs more than a scan
                return start + rest.index(lowest)
        return first


class BlockBoard(ScoreBoard):
    """A board in blocks of about the square root of its size, each with its minimum kept.

    A change touches its block at most, and a look touches the minima and one block: of 512
    scores, 23 and 45.
    """

    def __init__(self, scores: Iterable[float]) -> None:
        super().__init__(scores)
        self._size = isqrt(len(self))
        self._minima = [min(self._block(first)) for first in range(0, len(self), self._size)]

    def __setitem__(self, index: int, score: float) -> None:  # type: ignore[override]
        block = index // self._size
        before, lowest = self[index], self._minima[block]
        list.__setitem__(self, index, score)
        if score < lowest:
            self._minima[block] = score
        elif before == lowest:
            self._minima[block] = min(self._block(block * self._size))

    def lowest(self, start: int) -> int:
        """Index of the lowest score; of equals the first of start, start + 1, … going round."""
        minima = self._minima
        lowest = min(minima)
        home = start // self._size
        if minima[home] == lowest:
            rest = self[start : (home + 1) * self._size]
            if lowest in rest:
                return start + rest.index(lowest)
        later = minima[home + 1 :]
        block = home + 1 + later.index(lowest) if lowest in later else minima.index(lowest)
        return self.index(lowest, block * self._size)

    def _block(self, first: int) -> list[float]:
        return self[first : first + self._size]


def make_board(scores: list[float]) -> ScoreBoard:
    """The kind of board that is fastest for so many scores."""
    return ScoreBoard(scores) if len(scores) <= FLAT else BlockBoard(scores)
