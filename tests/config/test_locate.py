"""Every key path that tomli yields has a place, and something of that key stands there.

300 random documents a run: 100 tables in tomli-w's two layouts, 100 in every style there is.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
import tomli
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from dpkit.config.locate import locate
from dpkit.errors import InternalError

BARE = st.text("abcdeXYZ019_-", min_size=1, max_size=6)
QUOTED = st.text(
    st.one_of(
        st.sampled_from(" .#=[]{}'\"\\\n\té"), st.characters(exclude_categories=["Cs", "Cc"])
    ),
    max_size=6,
)
KEYS = st.one_of(BARE, QUOTED)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.datetimes(timezones=st.sampled_from([None, dt.UTC])),
    st.dates(),
    st.times(),
    st.sampled_from(
        ["", "x", 'a"b', "a'b", "[", "]", "{}", "# no", "a = 1", "\\", 'x"""y', "l\nm\n", "ü"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(st.dictionaries(KEYS, inner, max_size=3), min_size=1, max_size=3),
    ),
    max_leaves=12,
)
TABLES = st.dictionaries(KEYS, VALUES, max_size=5)


class Writer:
    """Writes a table in randomly chosen styles: TOML has several spellings for everything."""

    def __init__(self, choose: Any) -> None:
        self._choose = choose

    def document(self, table: dict[str, Any]) -> str:
        lines = self._table((), table)
        return "".join(
            line + self._of("\n", ' # it\'s a "comment" [x] = {y}\n', "\n\n") for line in lines
        )

    def _of(self, *styles: str) -> str:
        return str(self._choose(st.sampled_from(styles)))

    def _table(self, path: tuple[str, ...], table: dict[str, Any]) -> list[str]:
        """The values first: after a header, they would belong to another table."""
        body: list[str] = []
        headed: list[str] = []
        for key, value in table.items():
            below = (*path, key)
            if isinstance(value, dict) and self._of("header", "inline") == "header":
                headed += [f"[{self._path(below)}]", *self._table(below, value)]
            elif self._tables(value) and self._of("headers", "inline") == "headers":
                for item in value:
                    headed += [f"[[{self._path(below)}]]", *self._table(below, item)]
            else:
                body += self._pair((key,), value)
        return body + headed

    def _pair(self, path: tuple[str, ...], value: Any) -> list[str]:
        if isinstance(value, dict) and value and self._of("dotted", "inline") == "dotted":
            return [line for key, item in value.items() for line in self._pair((*path, key), item)]
        return [f"{self._of('', '  ')}{self._path(path)}{self._of('=', ' = ')}{self._value(value)}"]

    def _path(self, path: tuple[str, ...]) -> str:
        return self._of(".", " . ").join(self._key(key) for key in path)

    def _key(self, key: str) -> str:
        bare = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
        literal = key.isprintable() and "'" not in key
        styles = ['"' + "".join(f"\\U{ord(char):08x}" for char in key) + '"', _text(key)]
        return self._of(*styles, *[key] * bare, *[f"'{key}'"] * literal)

    def _value(self, value: Any) -> str:
        if isinstance(value, list):
            gap = self._of("", " ", "\n  ", " # ], not yet\n")
            end = self._of("", ",") if value else ""
            return f"[{gap}{f',{gap}'.join(map(self._value, value))}{end}{gap}]"
        if isinstance(value, dict):
            gap = self._of("", " ")
            pairs = [f"{self._path((key,))} = {self._value(item)}" for key, item in value.items()]
            return f"{{{gap}{f',{gap}'.join(pairs)}{gap}}}"
        if isinstance(value, str) and "\\" not in value and "'''" not in value:
            if "\n" in value or self._of("long", "short") == "long":
                return f"'''\n{value}'''" if not value.endswith("'") else _text(value)
            return f"'{value}'" if "'" not in value else f'"""\n{_text(value)[1:-1]}"""'
        return _text(value)

    @staticmethod
    def _tables(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _text(value: Any) -> str:
    """tomli-w knows how one scalar is written."""
    return tomli_w.dumps({"k": value}).removeprefix("k = ").removesuffix("\n")


@st.composite
def styled(draw: st.DrawFn) -> str:
    text = Writer(draw).document(draw(TABLES))
    return text.replace("\n", "\r\n") if draw(st.booleans()) else text


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(below for key, item in items for below in _paths(item, (*path, key)))]


def _check(text: str) -> None:
    tables = tomli.loads(text)
    spots = locate(text)
    assert set(spots) == set(_paths(tables))
    lines = text.replace("\r\n", "\n").split("\n")
    for path, (line, column) in spots.items():
        here = lines[line - 1][column - 1 :]
        if path and isinstance(path[-1], str):
            assert here.startswith("[") or _key_of(here) == path[-1], (path, here)
        elif path:
            assert here.strip(), (path, here)


def _key_of(text: str) -> str:
    """The key that stands at the beginning of some TOML, by trying ever longer prefixes."""
    for end in range(1, len(text) + 1):
        try:
            (key,) = tomli.loads(f"{text[:end]} = 0")
        except tomli.TOMLDecodeError:
            continue
        rest = text[end:].lstrip(" \t")
        if rest.startswith(("=", ".", "]")):
            return key
    return ""


@given(TABLES)
def test_every_path_written_by_tomli_w_is_located(table: dict[str, Any]) -> None:
    _check(tomli_w.dumps(table))
    _check(tomli_w.dumps(table, multiline_strings=True, indent=2).replace("\n", "\r\n"))


@given(styled())
def test_every_path_in_every_style_is_located(text: str) -> None:
    _check(text)


@pytest.mark.parametrize(
    ("text", "path", "spot"),
    [
        ("", (), (1, 1)),
        ("a = 1", ("a",), (1, 1)),
        ("\n\n  a.b . c = 1", ("a", "b", "c"), (3, 9)),
        ("[a.b]\nc = 1", ("a",), (1, 2)),
        ("[a.b]\nc = 1", ("a", "b"), (1, 1)),
        ("[a.b]\nc = 1\n[a]\nd = 1", ("a",), (3, 1)),
        ("[[a]]\n[[a]]\n[a.b]\n  c = 1", ("a",), (1, 1)),
        ("[[a]]\n[[a]]\n[a.b]\n  c = 1", ("a", 1), (2, 1)),
        ("[[a]]\n[[a]]\n[a.b]\n  c = 1", ("a", 1, "b", "c"), (4, 3)),
        ("[[a]]\n[[a.b]]\n[[a.b]]\nc = 1", ("a", 0, "b", 1, "c"), (4, 1)),
        ('"a.b" = [\n  1, # ]\n  { c = 2 },\n]', ("a.b", 1, "c"), (3, 5)),
        ('a = """\nb = 1\n""""" \nc = 1', ("c",), (4, 1)),
        ('a = """"\\"""""\nc = 1', ("c",), (2, 1)),
        ("a = '''\n]''''' # it\nc = 1", ("c",), (3, 1)),
        ("a = 1979-05-27 07:32:00 # x\nc = 1", ("c",), (2, 1)),
        ('a = "\\\\" # "\nc = 1', ("c",), (2, 1)),
        ("ä = 1".replace("ä", '"ä"') + "\r\nc = 1", ("c",), (2, 1)),
        ('a = {"ü" = "ü", c = 1}', ("a", "c"), (1, 17)),
        ("a = {\n  b = 1, # TOML 1.1\n  c = [],\n}", ("a", "c"), (3, 3)),
    ],
)
def test_places_are_where_an_editor_would_show_them(
    text: str, path: tuple[str | int, ...], spot: tuple[int, int]
) -> None:
    tomli.loads(text)
    assert locate(text)[path] == spot


def test_text_that_tomli_would_refuse_is_a_bug_of_the_caller() -> None:
    with pytest.raises(InternalError, match="lost at offset 0"):
        locate("= 1")
