"""Plain tables, as tomli gives them, to a `Config`: strict cattrs, and every problem at once.

Strict: nothing is coerced (``"9"`` is not 9, ``true`` is not 1, an integer may stand for a float),
and no key is ignored. Knows paths of keys, not where they stand in a text.
"""

from __future__ import annotations

import enum
import operator
from functools import cache, partial, reduce
from types import GenericAlias
from typing import TYPE_CHECKING, Any, get_args, get_origin

import attrs
from attrs import frozen
from cattrs import Converter
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override

from dpkit.config.checks import BadValue, describe, did_you_mean, one_of
from dpkit.config.rules import Conflict, conflicts
from dpkit.config.schema import EXTENDS, Config, walk
from dpkit.config.units import Bytes, Seconds, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpkit.config.rules import Path

    Hook = Callable[[Any, Any], Any]


@frozen(kw_only=True)
class Problem:
    """Something wrong with the key at `path`."""

    path: Path
    message: str


def structure(tables: dict[str, Any]) -> Config | list[Problem]:
    """The config that the tables describe, or all that is wrong with them; never raises."""
    try:
        return _converter().structure(tables, Config)
    except ClassValidationError as error:
        problems = list(_problems(error))
        right = reduce(_blanked, [problem.path for problem in problems], tables)
        found = (Problem(path=path, message=message) for path, message in conflicts(right))
        return [*problems, *found]


def _problems(error: Exception, path: Path = ()) -> Iterator[Problem]:
    """Walk the tree of exceptions that cattrs builds; its notes tell the way."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        for nested in error.exceptions:
            yield from _problems(nested, path + _step(nested))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields):
            yield Problem(path=(*path, key), message=_unknown_key(key, error.cl))
    elif isinstance(error, KeyError):
        yield Problem(path=path, message=_missing_key(path))
    elif not isinstance(error, Conflict):  # `structure` asks about conflicts by itself
        yield Problem(path=path, message=getattr(error, "problem", str(error)))


def _step(error: Exception) -> Path:
    """The key or index that cattrs noted; nothing for an error of the table itself."""
    note = next(iter(getattr(error, "__notes__", ())), None)
    if isinstance(note, AttributeValidationNote):
        return (note.name,)
    # The index is an int but for mappings, and the schema has none.
    return (int(note.index),) if isinstance(note, IterableValidationNote) else ()


def _unknown_key(key: str, table: type) -> str:
    if key == EXTENDS:
        return "only a file says this, at its top, before the first table"
    own = [attribute.name for attribute in attrs.fields(table)]
    own += [EXTENDS] if table is Config else []
    elsewhere = [path for path, _ in walk() if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(map(repr, elsewhere))}?"
    return "unknown key" + (did_you_mean(key, own) or f"; known here: {', '.join(own)}")


def _missing_key(path: Path) -> str:
    if path == ("engines",):
        return "missing; at least one [[engines]] table is needed"
    return 'missing; write for example model = "smollm2-135m"'


def _blanked(place: Any, path: Path) -> Any:
    """A copy with None at the path; what lies beside the path is shared."""
    if not path:
        return None
    step, rest = path[0], path[1:]
    copy = place.copy()
    copy[step] = _blanked(place[step] if rest else None, rest)
    return copy


@cache
def _converter() -> Converter:
    converter = Converter(detailed_validation=True, forbid_extra_keys=True)
    converter.register_structure_hook(str, _exactly(str, "a string"))
    converter.register_structure_hook(bool, _exactly(bool, "true or false"))
    converter.register_structure_hook(int, _exactly(int, "an integer"))
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(enum.StrEnum, _member)
    converter.register_structure_hook_func(partial(operator.eq, Seconds), _quantity(parse_duration))
    converter.register_structure_hook_func(partial(operator.eq, Bytes), _quantity(parse_size))
    converter.register_structure_hook_func(_is_array, _array(converter))
    converter.register_structure_hook_factory(attrs.has, lambda table: _table(converter, table))
    return converter


def _exactly(kind: type, expected: str) -> Hook:
    def hook(raw: object, _kind: Any) -> Any:
        # Not isinstance: bool is an int there.
        if type(raw) is kind and not _too_big(raw):
            return raw
        raise BadValue(f"expected {expected}, got {describe(raw)}")

    return hook


def _number(raw: object, _kind: Any) -> float:
    if type(raw) in {int, float} and not _too_big(raw):
        return float(raw)  # type: ignore[arg-type]  # mypy does not narrow by `in`
    raise BadValue(f"expected a number, got {describe(raw)}")


def _too_big(raw: object) -> bool:
    """TOML promises 64 bits; Python would go on to numbers that it refuses to print."""
    return isinstance(raw, int) and raw.bit_length() > 64


def _quantity(parse: Callable[[object], float]) -> Hook:
    return lambda raw, _kind: parse(raw)


def _member(raw: object, kind: type[enum.StrEnum]) -> enum.StrEnum:
    if isinstance(raw, str) and raw in list(kind):
        return kind(raw)
    near = did_you_mean(raw, kind) if isinstance(raw, str) else ""
    raise BadValue(f"expected one of {one_of(kind)}, got {describe(raw)}{near}")


def _is_array(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _array(converter: Converter) -> Hook:
    def hook(raw: object, kind: Any) -> tuple[Any, ...]:
        if isinstance(raw, list):
            listed: Any = GenericAlias(list, get_args(kind)[0])
            return tuple(converter.structure(raw, listed))
        raise BadValue(f"expected an array of tables (written [[...]]), got {describe(raw)}")

    return hook


def _table(converter: Converter, table: type) -> Hook:
    """Every field is checked by itself: attrs alone would stop at the first that is wrong."""
    fields: dict[str, Any] = {
        attribute.name: override(struct_hook=_field(converter, attribute))
        for attribute in attrs.fields(table)
    }
    make: Any = make_dict_structure_fn(table, converter, **fields)

    def hook(raw: object, kind: Any) -> Any:
        if isinstance(raw, dict):
            return make(raw, kind)
        raise BadValue(f"expected a table, got {describe(raw)}")

    return hook


def _field(converter: Converter, attribute: attrs.Attribute[Any]) -> Hook:
    def hook(raw: object, kind: Any) -> Any:
        value = converter.structure(raw, kind)
        if attribute.validator is not None:
            attribute.validator(None, attribute, value)
        return value

    return hook
