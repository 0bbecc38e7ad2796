"""How numbers, prompts and errors are put for a person at a terminal."""

from __future__ import annotations

import sys

import click

from dpkit import errors
from dpkit.errors import DpkitError

_HEADER = 80  # characters: a line of the smallest terminal in use


def show_seconds(seconds: float) -> str:
    """A time, in milliseconds when it is short."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def one_line(text: str) -> str:
    """The beginning of a text, as one line without what a terminal might obey."""
    start = text[: 10 * _HEADER]  # a prompt may be a book
    line = " ".join("".join(c if c.isprintable() else " " for c in start).split())
    cut = len(line) > _HEADER or len(start) < len(text)
    return f"{line[: _HEADER - 1]}…" if cut else line


def describe(error: BaseException) -> str:
    """What went wrong: dpkit's own words, or those of somebody else's exception with its name."""
    return str(error) if isinstance(error, DpkitError) else errors.describe(error)


def say(message: str) -> None:
    """Tell a person at a terminal what takes a while; programs need not know."""
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(message, err=True)
