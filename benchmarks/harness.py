"""How every benchmark here measures: contenders take turns, and only ratios are claimed.

A machine's speed drifts by more than what is to be shown. So all contenders run in each round, the
order turns from round to round, and a ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@frozen
class Rounds:
    """What each contender took in each round."""

    costs: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """The middle cost of a contender, in the unit that it returns."""
        return statistics.median(self.costs[name])

    def times_faster(self, name: str, than: str) -> float:
        """How many times the cost of `name` the cost of `than` is: above 1, `name` is faster."""
        rounds = zip(self.costs[than], self.costs[name], strict=True)
        return statistics.median(slow / fast for slow, fast in rounds)


def compete(contenders: Mapping[str, Callable[[], float]], *, rounds: int = 9) -> Rounds:
    """Run all contenders in turn, `rounds` times; each returns what one item cost it.

    A round before the first warms up and is not counted. The collector is off while a contender
    runs, so that none pays for another's garbage.
    """
    names = list(contenders)
    costs: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-1, rounds):
        turn = max(0, round_number) % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            gc.disable()
            try:
                cost = contenders[name]()
            finally:
                gc.enable()
            if round_number >= 0:
                costs[name].append(cost)
    return Rounds(costs)


def seconds_each(work: Callable[[], object], items: int) -> float:
    """Run `work`, which handles so many items, and return seconds per item."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / items


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header, first column to the left, numbers to the right."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n")
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *numbers)))
