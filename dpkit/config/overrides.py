"""``--set key.path=value``: a change to one key, applied to the plain tables of a file.

The value is a TOML value; a bare word that is none is a string, so that no shell quoting is needed
(``--set balancer.policy=inflight``). Groups of engines go by index or by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomli

from dpkit.config.checks import BadValue, describe, did_you_mean, quote
from dpkit.config.rules import dotted

if TYPE_CHECKING:
    from dpkit.config.rules import Path


def apply_override(tables: dict[str, Any], override: str) -> Path:
    """Set one key of `tables`, in place; the path that was set.

    Raises:
        BadValue: no key or value in it, or no such place in the tables.
    """
    key, equals, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise BadValue("expected KEY.PATH=VALUE, for example coordinator.interval=50ms")
    value = _value(text.strip())
    path: Path = ()
    place: Any = tables
    for name in names[:-1]:
        step = _step(place, name, path)
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
        path = (*path, step)
    last = _step(place, names[-1], path)
    place[last] = value
    return (*path, last)


def _step(place: Any, name: str, path: Path) -> str | int:
    """The key or index that `name` means in a table or an array of tables."""
    if isinstance(place, dict):
        return name
    if not isinstance(place, list):
        raise BadValue(f"{dotted(path)} is {describe(place)}, which has no key {name!r}")
    indices = [str(index) for index in range(len(place))]
    if name in indices:
        return int(name)
    known = [str(group.get("name", "")) for group in place if isinstance(group, dict)]
    if name in known:
        return known.index(name)
    message = f"there is no {dotted((*path, name))}; indices here: {', '.join(indices) or 'none'}"
    raise BadValue(message + did_you_mean(name, known))


def _value(text: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        if text.startswith(('"', "'", "[", "{")):
            raise BadValue(f"{quote(text)} is not a TOML value") from None
        return text
    return parsed["value"] if len(parsed) == 1 else text
