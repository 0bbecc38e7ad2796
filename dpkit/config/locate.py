"""Where each key of a TOML text stands: key path to line and column.

tomli tells positions of syntax errors only, so this scans the text once more, and only when there
is something to report. It reads text that tomli has already accepted, which is why it may be lax:
it looks for where things begin and end, not for what is allowed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING

import tomli

from dpkit.errors import InternalError

if TYPE_CHECKING:
    from dpkit.config.rules import Path

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BETWEEN = re.compile(r"(?:[ \t\n,]|#[^\n]*)*")  # between the items of an array or inline table
_SPACE = re.compile(r"[ \t]*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_SCALAR = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'  # up to two quotes may precede the closing three
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\]|\\.)*"'
    r"|'[^']*'"
    r"|[^,\]}#\n]+",  # numbers, booleans and dates, which may hold a space
    re.DOTALL,
)


def locate(text: str) -> dict[Path, tuple[int, int]]:
    """Line and column, both from 1, of every table, key and array item; the root stands at 1:1.

    A key stands at its last part (``c`` of ``a.b.c = 1``), a table at the bracket of its header.
    """
    text = text.replace("\r\n", "\n")  # as tomli does; no column changes
    starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(offset: int) -> tuple[int, int]:
        line = bisect_right(starts, offset)
        return line, offset - starts[line - 1] + 1

    return {path: place(offset) for path, offset in _Scanner(text).scan().items()}


class _Scanner:
    """One pass over a document; `_at` is the offset of what comes next."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._table: Path = ()
        self._lengths: dict[Path, int] = {}  # of the arrays of tables seen so far
        self._offsets: dict[Path, int] = {(): 0}

    def scan(self) -> dict[Path, int]:
        self._take(_BLANK)
        while self._at < len(self._text):
            if self._text.startswith("[", self._at):
                self._header()
            else:
                self._value(self._key(self._table))
            self._take(_BLANK)
        return self._offsets

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise InternalError(f"lost at offset {self._at} of a TOML text that tomli accepted")
        self._at = match.end()
        return match[0]

    def _header(self) -> None:
        """``[a.b]`` or ``[[a.b]]``."""
        start = self._at
        brackets = 2 if self._text.startswith("[[", start) else 1
        self._at += brackets
        *parents, (last, _) = self._parts()
        self._at = self._text.index("]", self._at) + brackets
        path: Path = ()
        for name, offset in parents:
            path = self._newest(self._seen((*path, name), offset))
        path = (*path, last)
        if brackets == 2:
            self._seen(path, start)
            self._lengths[path] = self._lengths.get(path, 0) + 1
        self._table = self._newest(path)
        self._offsets[self._table] = start  # an explicit header beats an implicit mention

    def _newest(self, path: Path) -> Path:
        """What a header's part means: of an array of tables, its newest table."""
        return (*path, self._lengths[path] - 1) if path in self._lengths else path

    def _seen(self, path: Path, offset: int) -> Path:
        self._offsets.setdefault(path, offset)
        return path

    def _key(self, table: Path) -> Path:
        """``a.b =``, with the blanks around it."""
        path = table
        for name, offset in self._parts():
            path = self._seen((*path, name), offset)
        self._at += 1  # the equals sign
        self._take(_SPACE)
        return path

    def _parts(self) -> list[tuple[str, int]]:
        """A dotted key, part by part, and the blanks around it."""
        parts = []
        while True:
            self._take(_SPACE)
            offset, part = self._at, self._take(_KEY)
            if part[0] in "\"'":
                part = tomli.loads(f"k={part}")["k"]  # tomli knows the escapes
            parts.append((part, offset))
            self._take(_SPACE)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1

    def _value(self, path: Path) -> None:
        """One value and all that is nested in it; a stack of its own, so depth is no matter."""
        containers: list[tuple[Path, int | None]] = []  # with the next index; None: inline table
        while True:
            if self._text.startswith("[", self._at):
                containers.append((path, 0))
                self._at += 1
            elif self._text.startswith("{", self._at):
                containers.append((path, None))
                self._at += 1
            else:
                self._take(_SCALAR)
            self._close(containers)
            if not containers:
                return
            parent, index = containers.pop()
            if index is None:
                containers.append((parent, None))
                path = self._key(parent)
            else:
                containers.append((parent, index + 1))
                path = self._seen((*parent, index), self._at)

    def _close(self, containers: list[tuple[Path, int | None]]) -> None:
        """Leave every container that ends here; stop at the next item."""
        while containers:
            self._take(_BETWEEN)
            if self._text[self._at] not in "]}":
                return
            self._at += 1
            containers.pop()
