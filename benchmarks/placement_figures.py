"""What is said of placement runs: Markdown tables, and plots. Knows rows, not how they came about."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from placement_cells import OURS, PEERS, SEED, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Row = dict[str, Any]


@frozen(kw_only=True)
class Figures:
    """The runs of one table with so many clients."""

    table: str
    clients: int
    rows: Sequence[Row] = field(repr=False)


def to_markdown(figures: Figures) -> str:
    return ""


def to_svg(figures: Figures) -> str:
    return ""
