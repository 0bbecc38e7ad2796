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
        rest = self[start:]
        # Asked first, as a ValueError costs more than a second scan.
        return start + rest.index(lowest) if lowest in rest else self.index(lowest)


class BlockBoard(ScoreBoard):
    """A board in blocks of about the square root of its size, each with its minimum kept.

    A look renews the minima of the blocks that changed, finds the lowest block, and in it the
    lowest score: about 70 numbers of 512.
    """

    def __init__(self, scores: Iterable[float]) -> None:
        super().__init__(scores)
        self._size = isqrt(len(self))
        self._minima = [0.0] * -(-len(self) // self._size)
        self._stale = set(range(len(self._minima)))

    def __setitem__(self, index: int, score: float) -> None:  # type: ignore[override]
        super().__setitem__(index, score)
        self._stale.add(index // self._size)

    def lowest(self, start: int) -> int:
        """Index of the lowest score; of equals the first of start, start + 1, … going round."""
        minima, size = self._minima, self._size
        for block in self._stale:
            minima[block] = min(self[block * size : (block + 1) * size])
        self._stale.clear()
        lowest = min(minima)
        home = start // size
        if minima[home] == lowest:
            rest = self[start : (home + 1) * size]
            if lowest in rest:
                return start + rest.index(lowest)
        later = minima[home + 1 :]
        block = home + 1 + later.index(lowest) if lowest in later else minima.index(lowest)
        return self.index(lowest, block * size)


def make_board(scores: list[float]) -> ScoreBoard:
    """The kind of board that is fastest for so many scores."""
    return ScoreBoard(scores) if len(scores) <= FLAT else BlockBoard(scores)
