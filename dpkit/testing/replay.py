"""What the replay tools share: reading a file of cases, and telling how the replay went.

Knows nothing of what a case holds. Files are JSON, gzipped or not: ``{"source": …, "cases": […]}``.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import sys
import zlib
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click
from attrs import frozen

from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

GZIP_MAGIC = b"\x1f\x8b"
SHOWN = 10
"""Differences printed; one wrong choice makes many that follow from it."""


class ReplayFileError(DpkitError):
    """The file cannot be replayed (yours): missing, unreadable, or not of the tool's format."""


@frozen(kw_only=True)
class Report:
    """How a replay went."""

    summary: str
    """What was replayed, in a line."""

    differences: Sequence[str]
    """Every place where the replay and the file disagree; empty is success."""


class Case(Protocol):
    """One case of a file, taken apart."""

    def differences(self, place: str) -> Iterator[str]:
        """Replay it, telling all that is not the file's."""
        ...


C = TypeVar("C", bound=Case)


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Turn what goes wrong while a part of a file is taken apart into an error that names it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ReplayFileError(
            f"{place} is not as the format has it: {type(error).__name__}: {error}"
        ) from error


def read_cases(path: Path) -> list[Any]:
    """Read the cases of a replay file.

    Error handling:
        ReplayFileError: there is no such file, or it holds no cases.
    """
    try:
        content = path.read_bytes()
        if content.startswith(GZIP_MAGIC):
            content = gzip.decompress(content)
        cases = json.loads(content)["cases"]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ReplayFileError(f"cannot be read: {error}") from error
    except (KeyError, TypeError) as error:
        raise ReplayFileError("is no replay file: it has no 'cases'") from error
    if not isinstance(cases, list) or not cases:
        raise ReplayFileError("is no replay file: 'cases' must be a list that is not empty")
    return cases


def parse_loads(rows: Sequence[Sequence[Any]]) -> tuple[tuple[int, int, float], ...]:
    """Take a snapshot apart: ``[[waiting, running, kv_cache_usage], …]``."""
    return tuple((int(waiting), int(running), float(usage)) for waiting, running, usage in rows)


def replay_cases(
    raw_cases: Sequence[Any],
    parse: Callable[[Any, str], C],
    summary: Callable[[Sequence[C]], str],
) -> Report:
    """Take all cases apart, then replay them one by one."""
    places = [f"cases[{number}]" for number in range(len(raw_cases))]
    cases = [parse(raw, place) for raw, place in zip(raw_cases, places, strict=True)]
    return Report(
        summary=summary(cases),
        differences=[
            difference
            for case, place in zip(cases, places, strict=True)
            for difference in case.differences(place)
        ],
    )


def run_tool(path: Path, replay: Callable[[Sequence[Any]], Report]) -> None:
    """Replay a file, print the outcome, and exit: 0 all equal, 1 differences, 2 a bad file."""
    # What the parts warn of was recorded on purpose; only the outcome belongs on the terminal.
    logging.getLogger("dpkit").addHandler(logging.NullHandler())
    try:
        report = replay(read_cases(path))
    except ReplayFileError as error:
        click.echo(f"error: {path}: {error}", err=True)
        sys.exit(2)
    if not report.differences:
        click.echo(f"{report.summary}: all equal")
        sys.exit(0)
    click.echo(f"{report.summary}: {len(report.differences)} differences, the first of them:")
    for difference in report.differences[:SHOWN]:
        click.echo(f"  {difference}")
    sys.exit(1)
