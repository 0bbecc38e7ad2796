"""Percentiles, exactly: from all samples, sorted. Knows nothing of requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@frozen(kw_only=True)
class Spread:
    """What some samples are like; all in the unit of the samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of samples in rising order, of which there is one at least.

    Between two samples it is interpolated linearly: at position (n - 1)·percent/100, counted from
    0. So NumPy does by default, and vLLM's own benchmark; so figures can be compared.
    """
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_of(samples: Iterable[float]) -> Spread | None:
    """What samples are like; None of none."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )
