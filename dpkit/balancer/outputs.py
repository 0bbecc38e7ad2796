"""How long answers are: a moving mean of those that have ended.

Knows lengths only. A poor predictor of each answer is worse than the mean of all: with exact
lengths the policy that asks gains nothing, with log-normal errors of 0.7 it loses.
"""

from __future__ import annotations

from attrs import define, field

WEIGHT = 0.02
"""Of the newest answer, once there are fifty: the mean follows the last hundred or so."""

UNKNOWN = 200.0
"""Tokens of an answer, as long as none has ended."""


@define(eq=False)
class OutputLengths:
    """The mean length of answers, newer ones weighing more."""

    mean: float = UNKNOWN
    """Tokens."""
    count: int = field(default=0, init=False)
    """Answers that it is made of."""

    def add(self, tokens: int) -> None:
        """An answer of so many tokens has ended by itself. The first ones weigh the same."""
        self.count += 1
        self.mean += max(WEIGHT, 1 / self.count) * (tokens - self.mean)
