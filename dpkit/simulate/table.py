"""The policies side by side, for a terminal; and as JSON, for whoever compares further."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpkit.simulate.measures import Result


def show_seconds(value: float) -> str:
    """A time, in three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _share(value: float) -> str:
    return f"{value:.1%}"


COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "ttft_p50_s": ("TTFT p50", show_seconds),
    "ttft_p99_s": ("TTFT p99", show_seconds),
    "ttft_mean_s": ("TTFT mean", show_seconds),
    "itl_p99_s": ("ITL p99", show_seconds),
    "tpot_p99_s": ("TPOT p99", show_seconds),
    "e2e_p99_s": ("e2e p99", show_seconds),
    "throughput_rps": ("requests/s", lambda value: f"{value:.3g}"),
    "goodput": ("goodput", _share),
    "preemptions": ("preempted", lambda value: f"{value:.0f}"),
    "kv_cv": ("KV CV", lambda value: f"{value:.2f}"),
    "queue_while_room": ("queue beside room", _share),
}
"""What a column is called, and how its numbers are shown."""


def to_json(results: Sequence[Result]) -> str:
    """``{"results": [{"policy": …, …}, …]}``, one measure a line."""
    return json.dumps({"results": [each.as_json() for each in results]}, indent=1) + "\n"


def to_table(results: Sequence[Result], *, width: int | None = None) -> str:
    """One column a policy, so that it fits a terminal.

    Args:
        results: In the order of the columns.
        width: Of the terminal; None: whatever it is.
    """
    from rich.console import Console  # noqa: PLC0415 - costs a JSON run 70 ms for nothing
    from rich.table import Table  # noqa: PLC0415

    table = Table("", box=None, header_style="bold")
    for result in results:
        table.add_column(result.policy, justify="right")
    for name, (title, show) in COLUMNS.items():
        table.add_row(title, *(show(getattr(each, name)) for each in results))
    console = Console(highlight=False, width=width)
    with (
        console.capture() as captured
    ):  # written by us: rich would end the process at a closed pipe
        console.print(table)
    return captured.get()
