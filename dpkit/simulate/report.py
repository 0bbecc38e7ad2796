"""A comparison as one HTML page: the table, and plots that show where the policies differ.

Pure function of findings.
"""

from __future__ import annotations

from bisect import bisect_right
from html import escape
from typing import TYPE_CHECKING

from dpkit.pages.page import page, plots_side_by_side
from dpkit.pages.svg import Axis, Plot
from dpkit.simulate.measures import WARM_UP
from dpkit.simulate.table import COLUMNS, show_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.simulate.meter import Answer
    from dpkit.simulate.study import Finding
    from dpkit.simulate.watch import Moment

_POINTS = 200
"""Points of a line: as many as one can see."""

_HIGHER_IS_BETTER = {"throughput_rps", "goodput"}


def to_html(findings: Sequence[Finding], *, title: str, tail: str) -> str:
    """Make the page.

    Args:
        findings: One or more.
        title: What was simulated, in a line.
        tail: How long it took.
    """
    body = (
        f"<h1>{escape(title.partition(':')[0])}</h1>\n",
        f'<div class="soft">{escape(title)}</div>\n',
        _table(findings),
        plots_side_by_side(_plots(findings)),
        f'<p class="soft">{escape(tail)}</p>\n',
    )
    return page(f"dpkit simulate: {title}", body)


def _table(findings: Sequence[Finding]) -> str:
    heads = "".join(f"<th>{escape(finding.result.policy)}</th>" for finding in findings)
    rows = [f"<tr><th></th>{heads}</tr>"]
    for name, (column, show) in COLUMNS.items():
        values = [getattr(finding.result, name) for finding in findings]
        best = max(values) if name in _HIGHER_IS_BETTER else min(values)
        differ = len(values) > 1 and max(values) > min(values)
        cells = "".join(
            f'<td class="{"best" if differ and value == best else ""}">{escape(show(value))}</td>'
            for value in values
        )
        rows.append(f"<tr><td>{escape(column)}</td>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(rows)}</table></div>\n'


def _plots(findings: Sequence[Finding]) -> Iterator[Plot]:
    counted = [_counted(each) for each in findings]
    ttfts = [sorted(answer.ttft_s for answer in each) for each in counted]
    yield _tails("Time to first token", ttfts, findings)
    e2es = [sorted(answer.e2e_s for answer in each) for each in counted]
    yield _tails("End to end", e2es, findings)
    yield _waiting_plot(findings)
    yield _kv_plot(findings)


def _counted(finding: Finding) -> list[Answer]:
    answers = finding.outcome.answers
    return [a for a in answers[int(WARM_UP * len(answers)) :] if a.tokens and not a.failed]


def _tails(title: str, times: Sequence[list[float]], findings: Sequence[Finding]) -> Plot:
    """How large a share took longer, on logarithmic axes: the tail is what differs."""
    every = [time for each in times for time in each if time > 0] or [1e-3, 1.0]
    fewest = 1 / max(10, *(len(each) for each in times))
    x = Axis("time", min(every), max(every), is_log=True, show=show_seconds)
    y = Axis("share of requests that took longer", fewest, 1.0, is_log=True, show=_percent)
    plot = Plot(title, x, y)
    for series, (finding, each) in enumerate(zip(findings, times, strict=True)):
        plot.line(list(_tail(each)), series, finding.result.policy)
    return plot


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _tail(ordered: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Evenly spaced on the logarithmic axis of shares, so that the end is as fine as the start."""
    count = len(ordered)
    places = (
        sorted({count - int(count ** (n / _POINTS)) for n in range(_POINTS + 1)}) if count else []
    )
    for place in places:
        yield ordered[place], (count - place) / count


def _waiting_plot(findings: Sequence[Finding]) -> Plot:
    time = _time(findings)
    lines = [_waiting(each.outcome.answers, time.high) for each in findings]
    most = max(count for line in lines for _, count in line)
    plot = Plot("Without a first token yet", time, Axis("requests", 0, max(1, most)))
    for series, (finding, line) in enumerate(zip(findings, lines, strict=True)):
        plot.line(line, series, finding.result.policy)
    return plot


def _waiting(answers: Sequence[Answer], span_s: float) -> list[tuple[float, float]]:
    """How many have come and got nothing yet, at evenly spaced moments."""
    came = sorted(answer.arrival_s for answer in answers)
    began = came[0]
    got = sorted(answer.first_s for answer in answers if answer.tokens)
    moments = [began + span_s * n / _POINTS for n in range(_POINTS + 1)]
    return [(at - began, bisect_right(came, at) - bisect_right(got, at)) for at in moments]


def _kv_plot(findings: Sequence[Finding]) -> Plot:
    title = "KV cache in use: the fullest engine, and the emptiest (thin)"
    plot = Plot(title, _time(findings), Axis("share of its blocks", 0, 1, show=_percent))
    for series, each in enumerate(findings):
        moments, name = _thinned(each.outcome.watch.moments), each.result.policy
        plot.line([(m.at_s, m.kv_most) for m in moments], series, name)
        least = [(m.at_s, m.kv_least) for m in moments]
        plot.line(least, series, f"{name}, emptiest", is_faint=True)
    return plot


def _time(findings: Sequence[Finding]) -> Axis:
    span_s = max(each.outcome.duration_s for each in findings)
    return Axis("seconds from the first arrival", 0, span_s)


def _thinned(moments: Sequence[Moment]) -> Sequence[Moment]:
    """A point where one can be seen: the one of each stretch whose KV is fullest."""
    stretch = -(-len(moments) // _POINTS) or 1
    starts = range(0, len(moments), stretch)
    return [max(moments[start : start + stretch], key=lambda m: m.kv_most) for start in starts]
