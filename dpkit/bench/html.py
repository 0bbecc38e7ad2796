"""A report as one page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from dpkit.bench.plots import plots
from dpkit.bench.tables import milliseconds, number, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.bench.report import Report
    from dpkit.bench.tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667080; --line: #e3e6ea;
  --paper: #fff; --card: #f6f7f9; --c0: #2f6fde; --c1: #12946b; --c2: #c2570c; --c3: #8250c4;
  --c4: #b8860b; --c5: #c23a63; --c6: #0f8a9d; --c7: #66707e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #98a2b0; --line: #2c333c;
  --paper: #14181d; --card: #1c2229; --c0: #6ea1ff; --c1: #3fc493; --c2: #f08c46; --c3: #b48cf2;
  --c4: #d9ac3c; --c5: #f07a9b; --c6: #4cc4d6; --c7: #98a2b0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.soft, caption { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem;
  margin: 1.5rem 0; }
.card { background: var(--card); border-radius: 8px; padding: .75rem 1rem;
  overflow-wrap: anywhere; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.note { border-left: 3px solid var(--c2); background: var(--card); padding: .5rem 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; background: var(--card); border-radius: 8px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg .name { fill: var(--ink); stroke: var(--card); stroke-width: 3px; paint-order: stroke; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.rule { stroke: var(--ink); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.8; }
.dot { fill: none; stroke-width: 5; stroke-linecap: round; stroke-opacity: .65; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .75rem; text-align: right; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child, .prose th, .prose td { text-align: left; }
.wide { overflow-x: auto; }
""" + "".join(
    f".line.s{each}, .dot.s{each} {{ stroke: var(--c{each}); }}\n"
    f".bar.s{each} {{ fill: var(--c{each}); }}\n"
    for each in range(8)
)


def html_report(report: Report) -> str:
    """A page; nothing in it is loaded from anywhere."""
    title = escape(f"{report.model} at {report.target}")
    return "".join(
        (
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width, initial-scale=1">',
            '<link rel=icon href="data:,">',
            f"<title>dpkit bench: {title}</title><style>{_STYLE}</style></head><body>\n",
            f"<h1>{title}</h1>\n<div class=soft>{escape(report.settings['load'])}</div>\n",
            *_cards(report),
            *(f"<p class=note>{escape(note)}</p>\n" for note in report.notes),
            "<div class=plots>\n",
            *(f"{plot.render()}\n" for plot in plots(report)),
            "</div>\n",
            *(_table(table) for table in tables(report)),
            "<h2>Settings</h2>\n<table class=prose>",
            *(
                f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
                for name, value in report.settings.items()
            ),
            "</table>\n</body></html>\n",
        )
    )


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
    yield "<div class=cards>\n"
    for name, value in cards:
        label = f"<span class=soft>{escape(name)}</span>"
        yield f"<div class=card><b>{escape(value)}</b>{label}</div>\n"
    yield "</div>\n"


def _table(table: Table) -> str:
    kind = " class=prose" if table.is_prose else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    head = f"<tr>{head}</tr>\n" * any(table.header)
    return (
        f"<h2>{escape(table.title)}</h2>\n<div class=wide><table{kind}>{head}{body}</table></div>\n"
    )
