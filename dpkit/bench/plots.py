"""The plots of a report: how times are spread, how a run went, and what each engine did.

A plot is left out when there is nothing to plot. Knows nothing of the page.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from dpkit.bench.record import Outcome
from dpkit.bench.spread import percentile
from dpkit.bench.tables import milliseconds
from dpkit.pages.svg import SERIES, Axis, Plot, round_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.bench.record import Record
    from dpkit.bench.report import Report

_BINS = 48
_MOMENTS = 60
_MOST_DOTS = 3000  # more make a page slow and no plot clearer
_WIDE = 20.0  # p99 over p1 from which on an axis is logarithmic


def plots(report: Report) -> Iterator[Plot]:
    """All plots, in order."""
    measured = [each for each in report.records if not each.is_warm_up]
    done = [each for each in measured if each.outcome is Outcome.FINISHED]
    ttfts = [each.ttft for each in done if each.ttft is not None]
    yield from _histogram("Time to first token", ttfts, "requests")
    gaps = list(chain.from_iterable(each.gaps() for each in done))
    yield from _histogram("Between tokens (ITL)", gaps, "gaps")
    yield from _histogram("End to end", [each.latency for each in done], "requests")
    if done:
        yield from _over_time(done, measured)


def _histogram(title: str, samples: Sequence[float], what: str) -> Iterator[Plot]:
    """With the median and p99 marked. Milliseconds."""
    values = sorted(1000 * sample for sample in samples)
    if not values:
        return
    x = _axis_of(values)
    edges = _edges(x)
    counts = [bisect_left(values, high) - bisect_left(values, low) for low, high in pairwise(edges)]
    counts[-1] += len(values) - bisect_left(values, edges[-1])
    plot = Plot(title, x, Axis(what, 0, _above(max(counts))))
    bars = zip(pairwise(edges), counts, strict=True)
    plot.bars([(low, high, count) for (low, high), count in bars if count], 0)
    for row, percent in enumerate((50, 99)):
        value = percentile(values, percent)
        plot.rule(min(value, x.high), f"p{percent} {milliseconds(value / 1000)} ms", row)
    yield plot


def _axis_of(values: Sequence[float]) -> Axis:
    low, high = percentile(values, 1), values[-1]
    if low > 0 and percentile(values, 99) / low > _WIDE:
        return Axis(
            "milliseconds", max(values[0], low / 2, 1e-3), max(high, low) * 1.02, is_log=True
        )
    room = max((high - values[0]) * 0.02, high * 0.01, 1e-3)
    return Axis("milliseconds", max(0.0, values[0] - room), high + room)


def _edges(axis: Axis) -> list[float]:
    if axis.is_log:
        ratio = (axis.high / axis.low) ** (1 / _BINS)
        return [axis.low * ratio**each for each in range(_BINS + 1)]
    return [axis.low + (axis.high - axis.low) * each / _BINS for each in range(_BINS + 1)]


def _over_time(done: Sequence[Record], measured: Sequence[Record]) -> Iterator[Plot]:
    origin = min(each.intended for each in measured)
    end = max(each.ended for each in measured) - origin
    if end <= 0:
        return
    width = round_step(end / _MOMENTS)
    yield from _first_tokens(done, origin, end)
    yield _tokens(done, origin, end, width)
    yield _under_way(measured, origin, end, width)
    yield from _by_engine(done)


def _first_tokens(done: Sequence[Record], origin: float, end: float) -> Iterator[Plot]:
    points: dict[str, list[tuple[float, float]]] = {}
    engines = sorted({each.engine or "" for each in done}, key=lambda name: (len(name), name))
    every = math.ceil(len(done) / _MOST_DOTS)
    for each in done[::every]:
        if each.ttft is not None:
            name = (each.engine or "") if len(engines) <= SERIES else "all engines"
            points.setdefault(name, []).append((each.intended - origin, 1000 * each.ttft))
    if not points:
        return
    highest = max(y for line in points.values() for _, y in line)
    y = Axis("ms to first token", 0, _above(highest))
    plot = Plot("First tokens over time", Axis("seconds from the beginning", 0, end), y)
    for series, name in enumerate(sorted(points, key=lambda name: (len(name), name))):
        plot.dots(points[name], series, name)
    yield plot


def _tokens(done: Sequence[Record], origin: float, end: float, width: float) -> Plot:
    """Pieces that came, each with its share of its answer's tokens."""
    sums = [0.0] * (math.floor(end / width) + 1)
    for each in done:
        worth = each.output_tokens / len(each.moments) if each.moments else 0
        for moment in each.moments:
            sums[min(len(sums) - 1, math.floor((moment - origin) / width))] += worth
    bars = [
        (start * width, min(end, (start + 1) * width), tokens / width)
        for start, tokens in enumerate(sums)
        if start * width < end
    ]
    y = Axis("output tokens/s", 0, _above(max(height for _, _, height in bars)))
    plot = Plot("Throughput over time", Axis("seconds from the beginning", 0, end), y)
    plot.bars(bars, 2)
    return plot


def _under_way(measured: Sequence[Record], origin: float, end: float, width: float) -> Plot:
    began = sorted(each.began - origin for each in measured)
    ended = sorted(each.ended - origin for each in measured)
    points: list[tuple[float, float]] = []
    for step in range(math.floor(4 * end / width) + 1):
        moment = step * width / 4
        running = bisect_left(began, moment + 1e-9) - bisect_left(ended, moment + 1e-9)
        points.append((moment, running))
    y = Axis("requests", 0, _above(max(count for _, count in points)))
    plot = Plot("Under way", Axis("seconds from the beginning", 0, end), y)
    plot.line(points, 1, "requests under way")
    return plot


def _by_engine(done: Sequence[Record]) -> Iterator[Plot]:
    tokens: dict[str, int] = {}
    for each in done:
        if each.engine is not None:
            tokens[each.engine] = tokens.get(each.engine, 0) + each.output_tokens
    if len(tokens) < 2:
        return
    names = sorted(tokens, key=lambda name: (len(name), name))
    y = Axis("output tokens", 0, _above(max(tokens.values())))
    plot = Plot("Engines", Axis("", -0.5, len(names) - 0.5, names=tuple(names)), y)
    plot.bars([(at - 0.4, at + 0.4, tokens[name]) for at, name in enumerate(names)], 3)
    yield plot


def _above(value: float) -> float:
    """The end of an axis that begins at 0: not below the highest value, and never 0."""
    return value * 1.08 if value > 0 else 1.0
