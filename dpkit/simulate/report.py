"""A comparison as one HTML page: the table, and plots that show where the policies differ.

Self-contained: no script, no font, nothing is fetched. Pure function of findings.
"""

from __future__ import annotations

from bisect import bisect_right
from html import escape
from typing import TYPE_CHECKING

from dpkit.simulate.measures import WARM_UP
from dpkit.simulate.plots import COLOURS, Axis, Line, plot
from dpkit.simulate.table import COLUMNS, show_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.simulate.meter import Answer
    from dpkit.simulate.study import Finding
    from dpkit.simulate.watch import Moment

_POINTS = 200
"""Points of a line: as many as one can see."""

_HIGHER_IS_BETTER = {"throughput_rps", "goodput"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
.best { font-weight: bold }
.grid { stroke: #e4e4e4 } .tick { font-size: 10px; fill: #555; text-anchor: middle }
.side { text-anchor: end; dominant-baseline: middle }
.title { font-size: 11px; fill: #222; text-anchor: middle }
svg { width: 100%; max-width: 48rem } figure { margin: 1.5rem 0 } figcaption { color: #444 }
.key span { margin-right: 1.2rem; white-space: nowrap } .key i { display: inline-block;
  width: 1.4rem; height: .25rem; margin-right: .4rem; vertical-align: middle }
"""


def to_html(findings: Sequence[Finding], *, title: str, tail: str) -> str:
    """Make the page.

    Args:
        findings: One or more.
        title: What was simulated, in a line.
        tail: How long it took.
    """
    policies = [finding.result.policy for finding in findings]
    body = [
        f"<h1>{escape(title.partition(':')[0])}</h1><p>{escape(title)}</p>",
        _table(findings),
        _key(policies),
        _figure(_ttft_plot(findings), "Time to first token: share of requests that waited longer."),
        _figure(_e2e_plot(findings), "Whole answers: share of requests that took longer."),
        _figure(_waiting_plot(findings), "Requests without a first token yet, wherever they wait."),
        _figure(
            _kv_plot(findings), "KV in use: of the fullest engine, and of the emptiest (thin)."
        ),
        f"<p>{escape(tail)}</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


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
    return f"<table>{''.join(rows)}</table>"


def _key(policies: Sequence[str]) -> str:
    entries = (
        f'<span><i style="background:{_colour(place)}"></i>{escape(policy)}</span>'
        for place, policy in enumerate(policies)
    )
    return f'<p class="key">{"".join(entries)}</p>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _counted(finding: Finding) -> list[Answer]:
    answers = finding.outcome.answers
    return [a for a in answers[int(WARM_UP * len(answers)) :] if a.tokens and not a.failed]


def _ttft_plot(findings: Sequence[Finding]) -> str:
    return _tails([sorted(a.ttft_s for a in _counted(each)) for each in findings], findings, "TTFT")


def _e2e_plot(findings: Sequence[Finding]) -> str:
    return _tails([sorted(a.e2e_s for a in _counted(each)) for each in findings], findings, "e2e")


def _tails(times: Sequence[list[float]], findings: Sequence[Finding], name: str) -> str:
    """How large a share took longer, on logarithmic axes: the tail is what differs."""
    every = [time for each in times for time in each if time > 0] or [1e-3, 1.0]
    fewest = 1 / max(10, *(len(each) for each in times))
    lines = [
        Line(name=finding.result.policy, points=list(_tail(each)), colour=_colour(place))
        for place, (finding, each) in enumerate(zip(findings, times, strict=True))
    ]
    x = Axis(title=name, least=min(every), most=max(every), is_log=True, show=show_seconds)
    y = Axis(title="longer", least=fewest, most=1.0, is_log=True, show=lambda v: f"{100 * v:g} %")
    return plot(lines, x, y)


def _tail(ordered: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Evenly spaced on the logarithmic axis of shares, so that the end is as fine as the start."""
    count = len(ordered)
    places = (
        sorted({count - int(count ** (n / _POINTS)) for n in range(_POINTS + 1)}) if count else []
    )
    for place in places:
        yield ordered[place], (count - place) / count


def _waiting_plot(findings: Sequence[Finding]) -> str:
    time = _time(findings)
    lines = [
        Line(
            name=each.result.policy,
            points=_waiting(each.outcome.answers, time.most),
            colour=_colour(place),
        )
        for place, each in enumerate(findings)
    ]
    most = max(count for line in lines for _, count in line.points)
    return plot(lines, time, Axis(title="waiting", least=0, most=max(1, most)))


def _waiting(answers: Sequence[Answer], span_s: float) -> list[tuple[float, float]]:
    """How many have come and got nothing yet, at evenly spaced moments."""
    came = sorted(answer.arrival_s for answer in answers)
    began = came[0]
    got = sorted(answer.first_s for answer in answers if answer.tokens)
    moments = [began + span_s * n / _POINTS for n in range(_POINTS + 1)]
    return [(at - began, bisect_right(came, at) - bisect_right(got, at)) for at in moments]


def _kv_plot(findings: Sequence[Finding]) -> str:
    lines = []
    for place, each in enumerate(findings):
        moments = _thinned(each.outcome.watch.moments)
        for faint, edge in ((False, "kv_most"), (True, "kv_least")):
            points = [(m.at_s, getattr(m, edge)) for m in moments]
            name = each.result.policy
            lines.append(Line(name=name, points=points, colour=_colour(place), faint=faint))
    y = Axis(title="KV in use", least=0, most=1, show=lambda value: f"{100 * value:g} %")
    return plot(lines, _time(findings), y)


def _time(findings: Sequence[Finding]) -> Axis:
    return Axis(title="seconds", least=0, most=max(each.outcome.duration_s for each in findings))


def _thinned(moments: Sequence[Moment]) -> Sequence[Moment]:
    """A point where one can be seen: the one of each stretch whose KV is fullest."""
    stretch = -(-len(moments) // _POINTS) or 1
    starts = range(0, len(moments), stretch)
    return [max(moments[start : start + stretch], key=lambda m: m.kv_most) for start in starts]
