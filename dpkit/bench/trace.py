"""A trace: a CSV file with a request a row, when it came and how long it was.

The columns that are read: `prompt_tokens`, `output_tokens`, `arrival_s` (seconds, sorted), and
`blocks`, ids of the prompt's prefix blocks of 512 tokens, separated by spaces: equal ids are equal
prefixes. The last two may be missing. A name that ends in `.gz` is unpacked.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.bench.lengths import LONGEST
from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS = 512
_LENGTHS = ("prompt_tokens", "output_tokens")
_LONGEST_FIELD = 2**24  # bytes: block ids of the longest prompts of known traces are 10 kB


class BadTrace(DpkitError):  # noqa: N818 - reads as what happened
    """A trace cannot be read (yours)."""


@frozen(kw_only=True)
class Row:
    """One request of a trace."""

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0  # seconds from the first row
    blocks: tuple[int, ...] = ()


def read_trace(path: str, *, arrivals: bool = True) -> tuple[Row, ...]:
    """Read a file.

    Args:
        path: Of the file.
        arrivals: It must say when requests came.

    Raises:
        BadTrace: it cannot be read, or a row is wrong.
    """
    try:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path, newline="") as file:  # noqa: PTH123 - gzip.open's twin
            csv.field_size_limit(_LONGEST_FIELD)
            rows = tuple(_rows(path, csv.DictReader(file), arrivals=arrivals))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise BadTrace(f"reading the trace {path}: {error}; it is to be a CSV file") from error
    if not rows:
        raise BadTrace(f"reading the trace {path}: it has no rows")
    return rows


def _rows(path: str, reader: csv.DictReader[str], *, arrivals: bool) -> Iterator[Row]:
    needed = (*_LENGTHS, "arrival_s") if arrivals else _LENGTHS
    if missing := set(needed).difference(reader.fieldnames or ()):
        raise BadTrace(
            f"reading the trace {path}: no column {', '.join(sorted(missing))}; "
            f"the first line is to name {', '.join(needed)}"
        )
    last = 0.0
    for fields in reader:
        try:
            row = _row(fields, last)
        except (TypeError, ValueError) as error:
            raise BadTrace(f"reading the trace {path}: line {reader.line_num}: {error}") from None
        last = row.arrival
        yield row


def _row(fields: dict[str, str], last: float) -> Row:
    prompt, output = (int(fields[name]) for name in _LENGTHS)
    arrival = float(fields.get("arrival_s") or 0)
    if not (1 <= prompt <= LONGEST and 1 <= output <= LONGEST):
        raise ValueError("lengths are 1 token at least")
    if not last <= arrival < float("inf"):
        raise ValueError(f"arrival_s = {arrival:g} is before that of the line before")
    blocks = tuple(int(block) for block in (fields.get("blocks") or "").split())
    return Row(prompt_tokens=prompt, output_tokens=output, arrival=arrival, blocks=blocks)
