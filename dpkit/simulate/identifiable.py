"""Which constants of the cost model a set of measurements can tell.

A constant is told if what it is multiplied by changes by itself, rather than never, or only with
what the others are multiplied by. Pure functions of numbers: knows nothing of files or of how
constants are fitted.
"""

from __future__ import annotations

import math
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOTHING = 1e-6
"""Share of a column that has to be its own; less is rounding."""


def untold(columns: dict[str, Sequence[float]]) -> tuple[str, ...]:
    """The constants whose column is a sum of multiples of the others, zero included.

    Args:
        columns: By the constant's name, what it is multiplied by in each measurement.
    """
    return tuple(
        name
        for name, column in columns.items()
        if not _adds(column, [other for key, other in columns.items() if key != name])
    )


def _adds(column: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Whether a column reaches out of what the others span, by Gram and Schmidt's method."""
    basis: list[Sequence[float]] = []
    for other in others:
        own, share = _beyond(other, basis)
        if share > _NOTHING:
            basis.append(own)
    return _beyond(column, basis)[1] > _NOTHING


def _beyond(
    column: Sequence[float], basis: Sequence[Sequence[float]]
) -> tuple[Sequence[float], float]:
    """What of a column no vector of an orthonormal basis has, made of length 1; and its share."""
    if not (length := math.hypot(*column)):
        return column, 0.0
    rest = [value / length for value in column]
    for unit in (*basis, *basis):  # twice, since the first leaves rounding errors of its own
        along = sum(map(mul, unit, rest))
        rest = [value - along * part for value, part in zip(rest, unit, strict=True)]
    share = math.hypot(*rest)
    return [value / share for value in rest] if share else rest, share
