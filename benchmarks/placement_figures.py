"""What is said of placement runs: Markdown tables, and plots. Knows rows, not how they came about.

A ratio is ours over another's; of times, below 1, ours is better.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from attrs import field, frozen
from placement_cells import NEAR, OURS, PEERS, SEED, TABLES

from dpkit.pages.svg import Axis, Plot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from placement_cells import Case, Row

P99, MEAN, MOST, TPOT, RATE = (
    "ttft_p99_s",
    "ttft_mean_s",
    "ttft_max_s",
    "tpot_p99_s",
    "throughput_rps",
)

NONE = "-"

_INK = 5  # a series' colour

_STYLE = """<style>
svg { background: #fff } text { font: 11px sans-serif; fill: #556 }
.title { font-weight: 600; font-size: 13px; fill: #112 } .grid { stroke: #e3e6ea }
.axis { stroke: #889 } .dot { fill: none; stroke-width: 6; stroke-linecap: round }
.line { fill: none; stroke-dasharray: 3 3 } .s0 { stroke: #0072b2 } .s1 { stroke: #d55e00 }
.s2 { stroke: #009e73 } .s3 { stroke: #c2669b } .s4 { stroke: #b8860b } .s5 { stroke: #112 }
</style>"""


@frozen(kw_only=True)
class Figures:
    """The runs of one table, all with as many clients and of as many rows."""

    table: str
    loads: Sequence[float]
    rows: Sequence[Row] = field(repr=False)

    def cases(self, load: float) -> list[Case]:
        """Those of which there is a run of ours at a load, in the order of the table."""
        return [case for case in TABLES[self.table].cases if self.runs(OURS, case, load)]

    def runs(self, policy: str, case: Case, load: float) -> dict[float, Row]:
        """A policy's runs at a load and its neighbours."""
        own = load if case.load is None else case.load
        return {
            row["load"]: row
            for row in self.rows
            if (row["case"], row["policy"]) == (case.name, policy)
            and abs(row["load"] - own) <= NEAR + 1e-9
        }

    def mean(self, name: str, policy: str, case: Case, load: float) -> float:
        """A measure, over a load and its neighbours."""
        return fmean(row[name] for row in self.runs(policy, case, load).values())

    def ratio(self, name: str, policy: str, case: Case, load: float) -> float | None:
        """Ours over another's, at the loads that both were run at; None: there is none."""
        ours, others = (self.runs(each, case, load) for each in (OURS, policy))
        both = ours.keys() & others.keys()
        below = sum(others[each][name] for each in both)
        return sum(ours[each][name] for each in both) / below if below else None

    def worst(self, name: str, policies: Sequence[str], case: Case, load: float) -> float | None:
        """Ours over the best single one of several, which is the greatest of the ratios."""
        ratios = (self.ratio(name, policy, case, load) for policy in policies)
        return max((ratio for ratio in ratios if ratio is not None), default=None)


def to_markdown(figures: Figures) -> str:
    """All that there is to say of one table."""
    if figures.table in _SECTIONS:
        parts = [_section(figures, load) for load in figures.loads if figures.cases(load)]
    else:
        parts = [_listing(figures)]
    return "\n\n".join(parts)


def _section(figures: Figures, load: float) -> str:
    header, line, closing = _SECTIONS[figures.table]
    lines = [line(figures, case, load) for case in figures.cases(load)]
    return f"Load {load:g}:\n\n" + _table(header, [*lines, *closing(figures, load)])


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    known = [ratio for ratio in ratios if ratio is not None]
    return math.exp(fmean(map(math.log, known))) if known else None


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.3g}"


# Without a cache: the seed and ours.

_NO_CACHE = (
    "trace",
    "p99 TTFT, s",
    "ratio",
    "mean TTFT",
    "longest TTFT, s",
    "p99 TPOT",
    "throughput",
    "preemptions",
)


def _no_cache(figures: Figures, case: Case, load: float) -> list[str]:
    def both(name: str, show: Callable[[float], str]) -> str:
        found = (figures.mean(name, policy, case, load) for policy in (SEED, OURS))
        return " → ".join(map(show, found))

    return [
        case.name,
        both(P99, _seconds),
        *(_times(figures.ratio(name, SEED, case, load)) for name in (P99, MEAN)),
        both(MOST, _seconds),
        *(_times(figures.ratio(name, SEED, case, load)) for name in (TPOT, RATE)),
        both("preemptions", "{:.0f}".format),
    ]


def _no_cache_closing(figures: Figures, load: float) -> Iterator[list[str]]:
    ratios = {
        name: [figures.ratio(name, SEED, case, load) for case in figures.cases(load)]
        for name in (P99, MEAN, TPOT, RATE)
    }
    p99, mean, tpot, rate = (_times(geometric_mean(each)) for each in ratios.values())
    yield ["**geometric mean**", "", f"**{p99}**", f"**{mean}**", "", tpot, rate, ""]
    p99, mean, tpot, _ = (_times(max(filter(None, each))) for each in ratios.values())
    yield ["worst", "", p99, mean, "", tpot, _times(min(filter(None, ratios[RATE]))), ""]


# With one: the seed, the peers and ours.

_PREFIX = (
    "trace",
    *(f"`{policy}`" for policy in (SEED, *PEERS)),
    "ours",
    "p99 / best peer",
    "mean / best peer",
    "p99 TPOT / seed",
    "runs",
)


def _prefix(figures: Figures, case: Case, load: float) -> list[str]:
    def p99(policy: str) -> str:
        there = figures.runs(policy, case, load)
        return _seconds(figures.mean(P99, policy, case, load)) if there else NONE

    return [
        case.name,
        *map(p99, (SEED, *PEERS)),
        f"**{p99(OURS)}**",
        *(_times(figures.worst(name, PEERS, case, load)) for name in (P99, MEAN)),
        _times(figures.ratio(TPOT, SEED, case, load)),
        str(len(figures.runs(OURS, case, load))),
    ]


def _prefix_closing(figures: Figures, load: float) -> Iterator[list[str]]:
    cases = figures.cases(load)
    p99, mean = (
        _times(geometric_mean(figures.worst(name, PEERS, case, load) for case in cases))
        for name in (P99, MEAN)
    )
    tpot = _times(geometric_mean(figures.ratio(TPOT, SEED, case, load) for case in cases))
    nothing = [""] * (len(PEERS) + 2)
    yield ["**geometric mean**", *nothing, f"**{p99}**", f"**{mean}**", tpot, ""]


_SECTIONS = {
    "no-cache": (_NO_CACHE, _no_cache, _no_cache_closing),
    "prefix": (_PREFIX, _prefix, _prefix_closing),
}


# All else: a line a run.

_LISTING = (
    "case",
    "load",
    "policy",
    "p99 TTFT, s",
    "mean, s",
    "p99 TPOT, ms",
    "requests/s",
    "goodput",
    "preemptions",
    "failed",
)


def _listing(figures: Figures) -> str:
    lines = [
        [
            case.name,
            f"{row['load']:g}",
            f"`{policy.partition(':')[2] or policy}`",
            *(_seconds(row[name]) for name in (P99, MEAN)),
            _seconds(1e3 * row[TPOT]),
            _seconds(row[RATE]),
            f"{row['goodput']:.1%}",
            *(str(row[name]) for name in ("preemptions", "failed")),
        ]
        for case in TABLES[figures.table].cases
        for load in ([case.load] if case.load is not None else figures.loads)
        for policy in TABLES[figures.table].policies
        for row in figures.runs(policy, case, load).values()
    ]
    return _table(_LISTING, lines)


# Plots.


def to_svg(figures: Figures) -> str:
    """The ratios of a table that has a plot, one dot a run or mean of runs: `PLOTS`."""
    drawn = PLOTS[figures.table](figures).render()
    head = '<svg xmlns="http://www.w3.org/2000/svg"'
    return drawn.replace("<svg", head, 1).replace(">", f">\n{_STYLE}\n", 1) + "\n"


def _plot_no_cache(figures: Figures) -> Plot:
    names = {"p99 TTFT": P99, "mean TTFT": MEAN, "p99 TPOT": TPOT}
    series = {
        shown: _dots(figures, place, partial(figures.ratio, name, SEED))
        for place, (shown, name) in enumerate(names.items())
    }
    loads = ", ".join(f"{load:g}" for load in figures.loads if figures.cases(load))
    return _plotted(figures, f"{OURS} over {SEED}: loads {loads}", series, is_log=False)


def _plot_prefix(figures: Figures) -> Plot:
    series = {
        policy: _dots(figures, place, partial(_times_ours, figures, policy))
        for place, policy in enumerate((SEED, *PEERS))
    }
    return _plotted(figures, f"p99 TTFT, times that of {OURS}", series, is_log=True)


def _times_ours(figures: Figures, policy: str, case: Case, load: float) -> float | None:
    ratio = figures.ratio(P99, policy, case, load)
    return None if ratio is None else 1 / ratio


def _dots(
    figures: Figures, place: int, ratio: Callable[[Case, float], float | None]
) -> list[tuple[float, float]]:
    """Of one series; series stand side by side."""
    found = (
        (across + 0.13 * (place - 1), ratio(case, load))
        for across, case in enumerate(TABLES[figures.table].cases)
        for load in figures.loads
        if figures.runs(OURS, case, load)
    )
    return [(x, y) for x, y in found if y is not None]


def _plotted(
    figures: Figures, title: str, series: dict[str, list[tuple[float, float]]], *, is_log: bool
) -> Plot:
    cases = TABLES[figures.table].cases
    values = [y for dots in series.values() for _, y in dots] or [1.0]
    low, high = (min(0.8, *values), max(2.0, *values)) if is_log else (0.0, max(1.3, *values))
    x = Axis("", -0.5, len(cases) - 0.5, names=tuple(case.label for case in cases))
    plot = Plot(title, x, Axis("", low, high, is_log=is_log))
    for place, (name, dots) in enumerate(series.items()):
        plot.dots(dots, place, name)
    plot.line([(x.low, 1.0), (x.high, 1.0)], _INK, "equal")
    return plot


PLOTS = {"no-cache": _plot_no_cache, "prefix": _plot_prefix}
