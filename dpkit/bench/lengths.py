"""How long prompts and answers are: one number, or drawn from a distribution. Knows no prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.errors import DpkitError
from dpkit.traces import LONGEST

if TYPE_CHECKING:
    import random

_FORMS = (
    "a number such as 128, uniform:64,256 (both may come), "
    "or lognormal:128,0.5 (the median, and sigma)"
)


class BadLength(DpkitError):  # noqa: N818 - reads as what happened
    """A length is put wrong (yours)."""


class Lengths(ABC):
    """Where lengths come from, in tokens."""

    @abstractmethod
    def draw(self, rng: random.Random) -> int:
        """The next one, 1 at least."""


@frozen
class Fixed(Lengths):
    """Always the same."""

    tokens: int

    def __str__(self) -> str:
        return str(self.tokens)

    def draw(self, rng: random.Random) -> int:  # noqa: ARG002 - nothing is left to chance
        """As `Lengths` says."""
        return self.tokens


@frozen
class Uniform(Lengths):
    """Each from `low` to `high` is as likely as any other."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"uniform:{self.low},{self.high}"

    def draw(self, rng: random.Random) -> int:
        """As `Lengths` says."""
        return rng.randint(self.low, self.high)


@frozen
class LogNormal(Lengths):
    """exp(N(ln median, sigma²)), rounded: what lengths of real prompts look like."""

    median: float
    sigma: float

    def __str__(self) -> str:
        return f"lognormal:{self.median:g},{self.sigma:g}"

    def draw(self, rng: random.Random) -> int:
        """As `Lengths` says."""
        return min(LONGEST, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))


def parse_lengths(text: str) -> Lengths:
    """Lengths from ``128``, ``uniform:LOW,HIGH`` or ``lognormal:MEDIAN,SIGMA``.

    Raises:
        BadLength: it is none of these, or a number is out of range.
    """
    kind, _, arguments = text.rpartition(":")
    try:
        numbers = [float(number) for number in arguments.split(",")]
        lengths = _of(kind, numbers)
    except (ValueError, OverflowError):
        lengths = None
    if lengths is None:
        raise BadLength(f"{text!r} says no length; say {_FORMS}")
    return lengths


def _of(kind: str, numbers: list[float]) -> Lengths | None:
    match kind, numbers:
        case "", [tokens] if _is_length(tokens):
            return Fixed(int(tokens))
        case "uniform", [low, high] if _is_length(low) and _is_length(high) and low <= high:
            return Uniform(int(low), int(high))
        case "lognormal", [median, sigma] if 1 <= median <= LONGEST and 0 <= sigma <= 10:
            return LogNormal(median, sigma)
        case _:
            return None


def _is_length(number: float) -> bool:
    return number == int(number) and 1 <= number <= LONGEST
