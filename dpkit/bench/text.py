"""A report for a terminal, and the same in Markdown."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from dpkit.bench.tables import Table, tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.bench.report import Report


def text_report(report: Report) -> str:
    """For a terminal."""
    lines = [f"{report.model} at {report.target}", _in_a_line(report), ""]
    for table in tables(report):
        if any(table.header):
            lines += [table.title] * (table.title != "Times")
        lines += [*_plain(table), ""]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def markdown_report(report: Report) -> str:
    """For a page."""
    lines = [f"## {report.model} at {report.target}", "", _in_a_line(report), ""]
    for table in tables(report):
        lines += [f"### {table.title}", "", *_piped(table), ""]
    lines += [f"> {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def _in_a_line(report: Report) -> str:
    first, *others = report.settings.items()
    return "; ".join((first[1], *(f"{name}: {value}" for name, value in others)))


def _plain(table: Table) -> Iterator[str]:
    rows = [table.header, *table.rows] if any(table.header) else list(table.rows)
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        yield "  ".join(_aligned(row, widths, table)).rstrip()


def _aligned(row: Sequence[str], widths: Sequence[int], table: Table) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        to_the_left = column == 0 or table.is_prose
        yield cell.ljust(width) if to_the_left else cell.rjust(width)


def _piped(table: Table) -> Iterator[str]:
    marks = [
        "---" if table.is_prose or not column else "--:" for column in range(len(table.header))
    ]
    for row in (table.header, marks, *table.rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
