"""When requests are meant to begin, in seconds from the first: open loop. Knows no requests."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Arrivals(StrEnum):
    """How the gaps between requests of a rate are."""

    POISSON = "poisson"
    CONSTANT = "constant"


def at_rate(rate: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Moments without end, `rate` of them a second on average; the first is 0.

    Poisson: the gaps are independent and exponential, as are those of many users who know nothing
    of each other. Constant: each gap is 1 / rate, and the n-th moment exactly n / rate.
    """
    rng = random.Random(f"arrivals {seed}")  # noqa: S311 - load, not secrets
    number, moment = 0, 0.0
    while True:
        yield moment
        number += 1
        poisson = arrivals is Arrivals.POISSON
        moment = moment + rng.expovariate(rate) if poisson else number / rate


def from_trace(moments: Iterable[float], speed: float) -> Iterator[float]:
    """Those of a trace, from its first on, `speed` times as fast."""
    first: float | None = None
    for moment in moments:
        first = moment if first is None else first
        yield (moment - first) / speed
