"""The effective config: every key with the value it has, and where that value came from.

What a source said is shown as it was written (``"1.5GiB"``), so that the result can be loaded again
and means the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from dpkit.config.schema import Config, may_be_absent, table_of
from dpkit.config.units import Bytes, Seconds, show_duration, show_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attrs import Attribute

    from dpkit.config.load import Loaded
    from dpkit.config.rules import Path


def effective(loaded: Loaded) -> dict[str, Any]:
    """Plain tables with every key; None where leaving a key out is what chooses its value."""
    return _filled(Config, loaded.layers.tables)


def origins(loaded: Loaded) -> dict[Path, str]:
    """Where each value came from: ``FILE:LINE:COL``, ``$VARIABLE``, ``--set …`` or ``default``."""
    return {path: _origin(loaded, path) for path in _values(effective(loaded))}


def to_toml(loaded: Loaded, *, with_origins: bool = False) -> str:
    """The effective config as a file; a key without a value is a comment, as TOML has no null."""
    lines = list(_lines(effective(loaded)))[1:]  # the first is the blank above the first table
    if not with_origins:
        return "".join(f"{line}\n" for line, _ in lines)
    found = origins(loaded)
    width = max(len(line) for line, path in lines if path in found)
    return "".join(
        f"{line:<{width}}  # {found[path]}\n" if path in found else f"{line}\n"
        for line, path in lines
    )


def plain_default(attribute: Attribute[Any]) -> Any:
    """A key's default as a file would have it; None where there is none."""
    if attribute.default is attrs.NOTHING or attribute.default is None:
        return None
    if attribute.type == Seconds:
        return show_duration(attribute.default)
    if attribute.type == Bytes:
        return show_size(attribute.default)
    return str(attribute.default) if isinstance(attribute.default, str) else attribute.default


def _filled(table: type, said: Mapping[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for attribute in attrs.fields(table):
        name, nested = attribute.name, table_of(attribute)
        if nested is None:
            filled[name] = said.get(name, plain_default(attribute))
        elif may_be_absent(attribute) and name not in said:
            continue
        elif isinstance(groups := said.get(name, {}), list):
            filled[name] = [_filled(nested, group) for group in groups]
        else:
            filled[name] = _filled(nested, groups)
    return filled


def _values(place: Any, path: Path = ()) -> Iterator[Path]:
    if not isinstance(place, dict | list):
        yield path
        return
    for step, below in place.items() if isinstance(place, dict) else enumerate(place):
        yield from _values(below, (*path, step))


def _origin(loaded: Loaded, path: Path) -> str:
    place: Any = loaded.layers.tables
    for step in path:
        if isinstance(place, dict) and step not in place:
            return "default"
        place = place[step]
    return loaded.layers.source(path).at(path)


def _lines(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[str, Path | None]]:
    """Each line, and the path of the value on it: first the table's values, then its tables."""
    for key, value in table.items():
        if not isinstance(value, dict | list):
            yield (f"# {key} = none" if value is None else f"{key} = {_toml(value)}"), (*path, key)
    for key, value in table.items():
        below = (*path, key)
        header = ".".join(step for step in below if isinstance(step, str))
        if isinstance(value, dict):
            yield from _section(f"[{header}]", value, below)
        for index, group in enumerate(value if isinstance(value, list) else ()):
            yield from _section(f"[[{header}]]", group, (*below, index))


def _section(
    header: str, table: Mapping[str, Any], path: Path
) -> Iterator[tuple[str, Path | None]]:
    yield "", None
    yield header, None
    yield from _lines(table, path)


def _toml(value: object) -> str:
    """A scalar. JSON's strings are TOML's, but for one control character that JSON leaves bare."""
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
