"""What an engine's steps cost, learned from the steps themselves.

A step is reckoned as the plain sum ``a + b*prefill + c*decodes + d*decode context + q*prefill
context``; `dpkit.costmodel` has the form that was measured. Knows nothing of engines: who asks
keeps a `Pace` for each, since equal models run on unequal cards.

Least squares on relative errors over the last few thousand steps of all engines. The prior is one
card's and one model's: all five constants are first scaled alike, so that they explain the time
spent so far, and each is then kept within a factor of `BOUND` of that, so that steps that are all
alike cannot teach nonsense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpkit.messages import StepWork

BOUND = 4.0
"""A constant may be so many times its scaled prior, or that part of it: a mixture of experts has a
base of twice a dense model's and half its cost of a token."""

EVERY = 64
"""Steps between two fits; the first ones come at the first, second, fourth step and so on."""

KEEP = 0.97
"""What is left of the weight of older steps at each fit: two thousand steps count."""

FAITH = 1.0
"""Steps that the scaled prior weighs."""

MEMORY = 0.99
"""What is left of older steps in a pace at each new one."""

TRUSTED = 32
"""So many steps make a pace: an engine that is taken for slow gets little to prove otherwise."""

ALIKE = 1.5
"""Engines whose pace differs from the middle one's by less count as equal."""

SWEEPS = 8
"""Rounds over the five constants in a fit; each begins where the last fit ended."""

FAR = 1e6
"""No step lasts so many times as long as the prior has it, or is so much shorter: a toy's long
prompts take a fifty thousandth of it, a model that is read from a disk takes ten thousand times."""


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
    """What a step costs."""
    return (
        costs.step
        + costs.prefill * work.prefill_tokens
        + costs.decode * work.decodes
        + costs.context * work.decode_context
        + costs.attention * work.prefill_context
    )


def is_believable(work: StepWork, lasted: float) -> bool:
    """Whether there may be a step that is so much and lasts so many seconds; above 0 it must be.

    What is learned is learned of all engines: one that says an infinity, or a number that only
    overflows later, would spoil the constants for good.
    """
    return 1.0 / FAR < lasted / seconds(work, PRIOR) < FAR


@define(eq=False)
class Pace:
    """How many times as long as reckoned steps of one kind last on one engine."""

    lasted: float = 0.0
    reckoned: float = 0.0
    steps: int = 0

    @property
    def slowness(self) -> float | None:
        """2.0: half the speed that was reckoned with; None: too few steps were seen."""
        return self.lasted / self.reckoned if self.steps >= TRUSTED else None

    def add(self, lasted: float, reckoned: float) -> None:
        """A step lasted so many seconds, and was reckoned to."""
        self.steps += 1
        self.lasted = self.lasted * MEMORY + lasted
        self.reckoned = self.reckoned * MEMORY + reckoned


def make_paces() -> tuple[Pace, Pace]:
    """Of an engine's steps without prompts, and of those with."""
    return Pace(), Pace()


def usual_paces(engines: Iterable[Sequence[Pace]]) -> list[float | None]:
    """Of each kind of steps the pace of the middle engine."""
    usual: list[float | None] = []
    for paces in zip(make_paces(), *engines, strict=True):
        seen = sorted(filter(None, (pace.slowness for pace in paces)))
        usual.append(seen[len(seen) // 2] if seen else None)
    return usual


def relative_slowness(paces: Iterable[Pace], usual: Iterable[float | None]) -> float:
    """How many times as long an engine's steps last as the middle one's.

    Like is compared with like: what the formula misses of one kind of steps it misses on all
    engines, and must not make those look slow that happen to do more of that kind.
    """
    lasted = reckoned = 0.0
    for pace, middle in zip(paces, usual, strict=True):
        if middle is not None and pace.steps >= TRUSTED:
            lasted += pace.lasted
            reckoned += pace.reckoned * middle
    slowness = lasted / reckoned if reckoned else 1.0
    return 1.0 if 1.0 / ALIKE < slowness < ALIKE else slowness


class StepCosts:
    """The five constants, as learned so far."""

    def __init__(self, prior: Costs = PRIOR) -> None:
        self.costs = prior
        self._prior = prior
        size = len(prior)
        self._factors = [1.0] * size  # of the prior's constants
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._spent = [0.0, 0.0]  # seconds: as they were, and as the prior has them
        self._steps = 0

    def __repr__(self) -> str:
        named = zip(Costs._fields, self._factors, strict=True)
        factors = ", ".join(f"{name} {factor:.2f}x" for name, factor in named)
        return f"<StepCosts after {self._steps} steps: {factors}>"

    @property
    def are_settled(self) -> bool:
        """Whether paces can be reckoned by them."""
        return self._steps >= EVERY

    def learn(self, work: StepWork, lasted: float, slowness: float = 1.0) -> None:
        """Take a step, and how long it took in seconds, on an engine of that speed."""
        if not is_believable(work, lasted):
            return
        prior, usual = self._prior, lasted / slowness
        parts = (
            prior.step / usual,
            prior.prefill * work.prefill_tokens / usual,
            prior.decode * work.decodes / usual,
            prior.context * work.decode_context / usual,
            prior.attention * work.prefill_context / usual,
        )
        for row, part in enumerate(parts):
            if part:
                sums = self._squares[row]
                for column, other in enumerate(parts):
                    sums[column] += part * other
                self._products[row] += part
        self._spent[0] += usual
        self._spent[1] += usual * sum(parts)
        self._steps = steps = self._steps + 1
        if not steps % EVERY or (steps < EVERY and not steps & (steps - 1)):
            self._fit()

    def _fit(self) -> None:
        """Coordinate descent within the bounds: what a bounded least squares of five needs."""
        factors, scale = self._factors, self._spent[0] / self._spent[1]
        faith, low, high = FAITH / scale**2, scale / BOUND, scale * BOUND
        for _ in range(SWEEPS):
            for index, sums in enumerate(self._squares):
                others = sum(map(float.__mul__, sums, factors)) - sums[index] * factors[index]
                best = self._products[index] - others + faith * scale
                factors[index] = min(high, max(low, best / (sums[index] + faith)))
        self.costs = Costs(*map(float.__mul__, factors, self._prior))
        if not self._steps % EVERY:
            self._squares = [[KEEP * value for value in sums] for sums in self._squares]
            self._products = [KEEP * value for value in self._products]
            self._spent = [KEEP * value for value in self._spent]
