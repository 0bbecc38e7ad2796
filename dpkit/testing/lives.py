"""What lives of engines produced, and whether a text can come from them.

Part of `dpkit.testing.history`, whose promise P2 it is. Pure functions of what was recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence


@define(eq=False)
class Run:
    """What one life of an engine produced for one request, from output token `start` on."""

    life: int
    start: int
    begun: int  # number of requests asked by then: tells apart those that share an id
    tokens: list[int] = field(factory=list)


def explains(tokens: Sequence[int], place: int, runs: Sequence[Run], *, resumes: bool) -> bool:
    """Whether one run produced these tokens from `place` on, or several that follow each other."""
    if place == len(tokens):
        return True
    for index, run in enumerate(runs):
        if run.start != place:
            continue
        common = _common(tokens[place:], run.tokens)
        if place + common == len(tokens):
            return True
        ends = range(place + common, place, -1) if resumes else ()
        if any(explains(tokens, end, runs[index + 1 :], resumes=True) for end in ends):
            return True
    return False


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of what both begin with."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
