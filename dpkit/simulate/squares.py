"""Least squares of relative errors over factors of which none is negative.

Pure functions of numbers: knows nothing of what the columns stand for.
"""

from __future__ import annotations

from itertools import chain, combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Row = tuple[Sequence[float], float]


def non_negative(
    rows: Sequence[Row], width: int, known: Sequence[float] | None = None
) -> list[float]:
    """Least squares of relative errors over factors of which none is negative.

    Every subset of the columns is solved by itself: the best solution without a negative factor is
    the exact one, and eight columns have 255 subsets.

    Args:
        rows: The columns of each equation, and what they should add up to.
        width: How many columns there are.
        known: What of each sum is there without them; None: nothing.
    """
    parts = [0.0] * len(rows) if known is None else known
    wanted = [1.0 - part / value for part, (_, value) in zip(parts, rows, strict=True)]
    scales = [max((abs(terms[i]) for terms, _ in rows), default=0.0) or 1.0 for i in range(width)]
    scaled = [[terms[i] / scales[i] / value for i in range(width)] for terms, value in rows]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(width)] for i in range(width)]
    target = [
        sum(row[i] * of for row, of in zip(scaled, wanted, strict=True)) for i in range(width)
    ]
    best, least = [0.0] * width, 0.0
    for columns in _subsets(width):
        found = _solve(
            [[gram[i][j] for j in columns] for i in columns], [target[i] for i in columns]
        )
        if found is None or min(found) < 0:
            continue
        # What the squares sum to, less the part that is the same for all.
        loss = -sum(factor * target[i] for factor, i in zip(found, columns, strict=True))
        if loss < least:
            least, best = loss, [0.0] * width
            for factor, column in zip(found, columns, strict=True):
                best[column] = factor
    return [factor / scale for factor, scale in zip(best, scales, strict=True)]


def _subsets(width: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(width), size) for size in range(1, width + 1))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve linear equations by elimination with pivots; None: they have no single solution."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        sizes = [abs(row[column]) for row in rows]
        pivot = sizes.index(max(sizes[column:]), column)
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(size):
            if i != column and (factor := rows[i][column] / rows[column][column]):
                rows[i] = [x - factor * y for x, y in zip(rows[i], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
