"""What an engine's steps cost, learned from the steps themselves.

A step is reckoned as the plain sum ``a + b*prefill + c*decodes + d*decode context + q*prefill
context``; `dpkit.costmodel` has the form that was measured. Knows nothing of engines: who asks
keeps a `Pace` for each, since equal models run on unequal cards.

Least squares on relative errors over the last few thousand steps, each constant kept within a
factor of `BOUND` of its prior, so that steps that are all alike cannot teach nonsense. What is
wrong by more than that is wrong for all five and is the pace's to learn: a policy compares
engines, and needs the constants' ratios far more than their size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import define

if TYPE_CHECKING:
    from dpkit.messages import StepWork

BOUND = 2.0
"""A constant may be so many times its prior, or that part of it."""

EVERY = 64
"""Steps between two fits."""

KEEP = 0.97
"""What is left of the weight of older steps at each fit: two thousand steps count."""

FAITH = 4.0
"""Steps that the prior weighs."""

SWEEPS = 8
"""Rounds over the five constants in a fit; each begins where the last fit ended."""


class Costs(NamedTuple):
    """Seconds."""

    step: float  # a: of any step
    prefill: float  # b: of one prompt token
    decode: float  # c: of one decode
    context: float  # d: of one token of a decode's context
    attention: float  # q: of one prompt token to one token before it


PRIOR = Costs(step=6.6e-3, prefill=18.6e-6, decode=2.8e-6, context=47e-9, attention=1.25e-9)
"""An 8B model on an H100, as in ``cost:h100-8b``."""


def seconds(work: StepWork, costs: Costs) -> float:
    """What a step costs, at the pace of the prior's card."""
    return (
        costs.step
        + costs.prefill * work.prefill_tokens
        + costs.decode * work.decodes
        + costs.context * work.decode_context
        + costs.attention * work.prefill_context
    )


@define(eq=False)
class Pace:
    """How many times as long as reckoned an engine's steps last: of its card, and of its load."""

    _lasted: float = 0.0
    _reckoned: float = 0.0

    MEMORY = 0.99
    """What is left of older steps at each new one."""

    @property
    def slowness(self) -> float:
        """2.0: half the speed of the prior's card; 1.0 before the first step."""
        return self._lasted / self._reckoned if self._reckoned else 1.0

    def add(self, lasted: float, reckoned: float) -> None:
        """A step lasted so many seconds, and was reckoned to."""
        self._lasted = self._lasted * self.MEMORY + lasted
        self._reckoned = self._reckoned * self.MEMORY + reckoned


class StepCosts:
    """The five constants, as learned so far."""

    def __init__(self, prior: Costs = PRIOR) -> None:
        self.costs = prior
        self._prior = prior
        size = len(prior)
        self._factors = [1.0] * size  # of the prior's constants
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._steps = 0

    def __repr__(self) -> str:
        factors = ", ".join(
            f"{name} {factor:.2f}x"
            for name, factor in zip(Costs._fields, self._factors, strict=True)
        )
        return f"<StepCosts after {self._steps} steps: {factors}>"

    def learn(self, work: StepWork, lasted: float, pace: Pace) -> None:
        """Take a step of an engine, and how many seconds it took; the engine's pace learns too."""
        if lasted <= 0.0:
            return
        pace.add(lasted, seconds(work, self.costs))
        slowness = pace.slowness
        prior = self._prior
        parts = (
            prior.step,
            prior.prefill * work.prefill_tokens,
            prior.decode * work.decodes,
            prior.context * work.decode_context,
            prior.attention * work.prefill_context,
        )
        weight = (slowness / lasted) ** 2
        for row, part, sums in zip(range(len(parts)), parts, self._squares, strict=True):
            if part:
                weighted = weight * part
                for column, other in enumerate(parts):
                    sums[column] += weighted * other
                self._products[row] += weighted * lasted / slowness
        self._steps += 1
        if not self._steps % EVERY:
            self._fit()

    def _fit(self) -> None:
        """Coordinate descent within the bounds: what a bounded least squares of five needs."""
        factors = self._factors
        for _ in range(SWEEPS):
            for index, sums in enumerate(self._squares):
                others = sum(map(float.__mul__, sums, factors)) - sums[index] * factors[index]
                best = (self._products[index] - others + FAITH) / (sums[index] + FAITH)
                factors[index] = min(BOUND, max(1 / BOUND, best))
        self.costs = Costs(*map(float.__mul__, factors, self._prior))
        self._squares = [[KEEP * value for value in sums] for sums in self._squares]
        self._products = [KEEP * value for value in self._products]
