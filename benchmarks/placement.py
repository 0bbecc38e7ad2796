"""The tables of docs/placement.md: policies on public traces, one command a figure.

``python benchmarks/placement.py TRACES --table no-cache --load 0.9 --out results.jsonl``, with a
folder of the traces that the page names, in the CSV form of docs/simulate.md. Each run is a line of
the file as soon as it is done, and what is there is not run again: an interrupted table goes on
where it stopped, and further loads, policies and numbers of clients join those that are there.
``--show`` only prints what the file has. ``--plot FILE.svg`` draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from placement_cells import NEAR, TABLES, Case, Cell, cells_of, measure_capacity, measure_cell
from placement_figures import PLOTS, Figures, to_markdown, to_svg

from dpkit.simulate.pool import run_side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from placement_cells import Row


LOADS = (0.75, 0.9, 1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if not options.show:
        near = (-NEAR, NEAR) if options.neighbours else ()
        loads = [round(load + by, 3) for load in options.load for by in (0.0, *near)]
        cells = cells_of(
            options.table,
            loads,
            clients=options.clients,
            policies=options.policy,
            cases=options.case,
            rows=options.rows,
        )
        run(options.traces, cells, options.out, options.jobs)
    rows = chosen(read(options.out), options)
    figures = Figures(table=options.table, loads=options.load, rows=rows)
    print(to_markdown(figures))
    if options.plot is not None:
        options.plot.write_text(to_svg(figures), encoding="utf-8")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare policies on public traces.")
    parser.add_argument("traces", type=Path, help="the folder of the traces")
    parser.add_argument("--table", choices=list(TABLES), required=True)
    parser.add_argument("--load", type=float, action="append", help=f"repeat it; or {LOADS}")
    parser.add_argument("--neighbours", action="store_true", help=f"and loads {NEAR} away")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--policy", action="append", default=[], help="only these of the table")
    parser.add_argument("--case", action="append", default=[], help="likewise")
    parser.add_argument("--rows", type=int, help="at most so many of each trace")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    options = parser.parse_args(arguments)
    options.load = options.load or LOADS
    if options.plot is not None and options.table not in PLOTS:
        parser.error(f"--plot: {options.table} has none; {', '.join(PLOTS)} have")
    return options


def read(path: Path) -> list[Row]:
    """All rows there are; a last line that was cut off is none, and is taken away."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def chosen(rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """Those of one table, with so many clients, and of as long traces."""
    cases = TABLES[options.table].cases
    sizes = {case.name: min(case.rows, options.rows or case.rows) for case in cases}
    return [
        row
        for row in rows
        if row.get("table") == options.table
        and row["clients"] == options.clients
        and row["rows"] == sizes.get(row["case"])
    ]


def run(folder: Path, cells: Sequence[Cell], out: Path, jobs: int) -> None:
    """Do what is missing: first how much each pool can do at best, then the cells."""
    rows = read(out)
    missing = [cell for cell in cells if not any(cell.key.items() <= row.items() for row in rows)]
    known = {row["pool"] for row in rows if "pool" in row}
    pools = {cell.case.pool: cell.case for cell in missing if cell.case.pool not in known}
    do(add_capacity, [(folder, case, out) for case in pools.values()], jobs)
    rates = {row["pool"]: row["rps"] for row in read(out) if "pool" in row}
    do(add_cell, [(folder, cell, rates[cell.case.pool], out) for cell in missing], jobs)


def do(work: Callable[..., None], tasks: Sequence[tuple[object, ...]], jobs: int) -> None:
    """Each task by a process of its own, so many at once; with one job, here."""
    if jobs == 1:
        for task in tasks:
            work(*task, lambda _: None)
    elif tasks:
        run_side_by_side(f"placement:{work.__name__}", tasks, at_once=jobs, tell=lambda *_: None)


def add_capacity(folder: Path, case: Case, out: Path, _tell: Callable[[int], None]) -> None:
    append(out, measure_capacity(folder, case))


def add_cell(
    folder: Path, cell: Cell, capacity: float, out: Path, _tell: Callable[[int], None]
) -> None:
    append(out, measure_cell(folder, cell, capacity))


def append(out: Path, row: Row) -> None:
    """Add a line at once, whoever else does the same."""
    line = (json.dumps(row) + "\n").encode()
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    name = row.get("pool") or f"{row['case']}, {row['load']}, {row['policy']}"
    print(f"{name}: {row['cpu_s']:.0f} s of CPU time", file=sys.stderr)


if __name__ == "__main__":
    main()
