"""A report of a load as a page: figures, plots, tables, and how it was measured."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from dpkit.bench.plots import plots
from dpkit.bench.tables import milliseconds, number, tables
from dpkit.pages.page import page, plots_side_by_side

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.bench.report import Report
    from dpkit.bench.tables import Table


def html_report(report: Report) -> str:
    """A page; nothing in it is loaded from anywhere."""
    title = f"{report.model} at {report.target}"
    return page(f"dpkit bench: {title}", _body(report, title))


def _body(report: Report, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>\n"
    yield f'<div class="soft">{escape(report.settings["load"])}</div>\n'
    yield from _cards(report)
    yield from (f'<p class="note">{escape(note)}</p>\n' for note in report.notes)
    yield plots_side_by_side(plots(report))
    yield from map(_table, tables(report))
    yield '<h2>Settings</h2>\n<table class="prose">'
    for name, value in report.settings.items():
        yield f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
    yield "</table>\n"


def _cards(report: Report) -> Iterator[str]:
    summary = report.summary
    cards = [
        ("output tokens/s", number(summary.output_tokens_per_s)),
        ("requests/s", number(summary.requests_per_s)),
    ]
    for name, spread in (("TTFT", summary.ttft), ("TPOT", summary.tpot), ("e2e", summary.e2e)):
        if spread is not None:
            cards.append((f"{name} p50, ms", milliseconds(spread.p50)))
            cards.append((f"{name} p99, ms", milliseconds(spread.p99)))
    if summary.goodput is not None:
        cards.append((f"within {summary.goodput.slo}", f"{summary.goodput.share:.1%}"))
    cards.append(("failed", f"{summary.failed:,} of {summary.requests:,}"))
    yield '<div class="cards">\n'
    for name, value in cards:
        label = f'<span class="soft">{escape(name)}</span>'
        yield f'<div class="card"><b>{escape(value)}</b>{label}</div>\n'
    yield "</div>\n"


def _table(table: Table) -> str:
    kind = ' class="prose"' if table.is_prose else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    head = f"<tr>{head}</tr>\n" * any(table.header)
    return (
        f"<h2>{escape(table.title)}</h2>\n"
        f'<div class="wide"><table{kind}>{head}{body}</table></div>\n'
    )
