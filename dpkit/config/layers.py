"""Where a config comes from, layer upon layer, and who said what.

The base files lie at the bottom, then the file itself, environment variables and ``--set``: each
has the last word over those below it. Works on plain tables; reads nothing and judges no value.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from dpkit.config.checks import BadValue, describe, did_you_mean
from dpkit.config.groups import UNNAMED
from dpkit.config.locate import locate
from dpkit.config.rules import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpkit.config.rules import Path, Table


class Source:
    """Something that gives keys their values: a file, an environment variable or a flag."""

    def __init__(self, name: str, *, text: str | None = None) -> None:
        """`text` is what a file holds; the other sources give one value and have no lines."""
        self.name = printable(name)
        self._text = text

    def spot(self, path: Path) -> tuple[int, int]:
        """Line and column of what stands at the path, or of the table that should hold it."""
        while path not in self._spots:
            path = path[:-1]
        return self._spots[path]

    def at(self, path: Path) -> str:
        """The source and the place in it, as an error message begins: ``FILE:LINE:COL``."""
        if self._text is None:
            return self.name
        line, column = self.spot(path)
        return f"{self.name}:{line}:{column}"

    @cached_property
    def _spots(self) -> Mapping[Path, tuple[int, int]]:
        """Found when somebody asks: a file without mistakes is not scanned."""
        return {(): (0, 0)} if self._text is None else locate(self._text)


class Layers:
    """Tables put together from sources, each later one winning over those before it."""

    def __init__(self, source: Source) -> None:
        """Begin with nothing; `source` is blamed for what is missing at the top level."""
        self.tables: dict[str, Any] = {}
        self._said: dict[Path, Source] = {(): source}

    def merge(self, tables: Table, source: Source) -> None:
        """Lay a whole file on top: tables merge key by key, arrays and values replace."""
        pending: list[tuple[dict[str, Any], Table, Path]] = [(self.tables, tables, ())]
        while pending:
            place, said, at = pending.pop()
            for key, value in said.items():
                path = (*at, key)
                if not isinstance(value, dict):
                    self._put(place, key, value, path, source)
                    continue
                if not isinstance(place.get(key), dict):
                    self._put(place, key, {}, path, source)
                pending.append((place[key], value, path))

    def assign(self, names: Sequence[str], value: Any, source: Source) -> Path:
        """Set one key; the path that was set. Groups of engines go by index or by name.

        Raises:
            BadValue: there is no such place.
        """
        place: Any = self.tables
        path: Path = ()
        for name in names[:-1]:
            step = _step(place, name, path)
            path = (*path, step)
            if isinstance(step, str) and step not in place:
                self._put(place, step, {}, path, source)
            place = place[step]
        last = _step(place, names[-1], path)
        self._put(place, last, value, (*path, last), source)
        return (*path, last)

    def source(self, path: Path) -> Source:
        """Who gave what stands at the path its value; for a missing key, who made its table."""
        while path not in self._said:
            path = path[:-1]
        return self._said[path]

    def _put(self, place: Any, step: str | int, value: Any, path: Path, source: Source) -> None:
        if isinstance(place, list) or step in place:  # what was said of its parts is void
            kept = {said: by for said, by in self._said.items() if said[: len(path)] != path}
            self._said = kept
        place[step] = value
        self._said[path] = source


def printable(text: str) -> str:
    """The text itself, or quoted where it would break a line or a terminal."""
    return text if text.isprintable() else repr(text)


def _step(place: Any, name: str, path: Path) -> str | int:
    """The key or index that `name` means in a table or an array of tables."""
    if isinstance(place, dict):
        return name
    if not isinstance(place, list):
        raise BadValue(f"{dotted(path)} is {describe(place)}, which has no key {name!r}")
    indices = [str(index) for index in range(len(place))]
    if name in indices:
        return int(name)
    known = [str(group.get("name", UNNAMED)) for group in place if isinstance(group, dict)]
    if name in known:
        return known.index(name)
    message = f"there is no {dotted((*path, name))}; indices here: {', '.join(indices) or 'none'}"
    if known:
        message += f"; names: {', '.join(map(printable, known))}"
    raise BadValue(message + did_you_mean(name, known))
