"""Whatever is done to a good file, it is a config or a list of located problems, nothing else."""

from __future__ import annotations

import copy
import re

import pytest
import tomli
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from dpkit.config.load import parse_config
from dpkit.config.schema import Config
from dpkit.errors import ConfigError

LOCATED = re.compile(r"f:\d+:\d+: \S|f: not valid TOML: |--set ")
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["1s", "1GiB", "echo", "cost:h20-4b", "round_robin", "info", "a.b:C", "local"]),
    st.dates(),
    st.sampled_from([[], {}, [{}, {"model": "echo"}, 3]]).map(copy.deepcopy),
)


def _config_or_problems(text: str, *overrides: str) -> Config | ConfigError:
    try:
        return parse_config(text, filename="f", overrides=overrides)
    except ConfigError as error:
        refusal = error
    assert refusal.problems
    for problem in refusal.problems:
        assert LOCATED.match(problem), problem
        assert problem.isprintable(), problem
    return refusal


@given(st.data())
def test_a_changed_value_gives_a_config_or_located_problems(
    full_example: str, data: st.DataObject
) -> None:
    tables = tomli.loads(full_example)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(_tables(tables)))
        key = data.draw(st.sampled_from([*place, "name", "extra", "a b\n"]))
        value = data.draw(ODD)
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    _config_or_problems(tomli_w.dumps(tables))


def _tables(table: dict[str, object]) -> list[dict[str, object]]:
    found = [table]
    for value in table.values():
        for item in value if isinstance(value, list) else [value]:
            found += _tables(item) if isinstance(item, dict) else []
    return found


@given(st.data())
def test_a_damaged_text_gives_a_config_or_located_problems(
    full_example: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(full_example)))
    end = data.draw(st.integers(start, min(len(full_example), start + 20)))
    patch = data.draw(st.one_of(st.text(max_size=5), st.text("\"'[]{}=.,#\n\r0ax ", max_size=5)))
    _config_or_problems(full_example[:start] + patch + full_example[end:])


@given(st.text("engis.0smol=kvcount \"'[]{}#\n12", max_size=24))
def test_any_override_gives_a_config_or_problems(full_example: str, override: str) -> None:
    _config_or_problems(full_example, override)


@given(st.permutations(range(7)))
def test_the_order_of_tables_does_not_matter(full_example: str, order: list[int]) -> None:
    tables = list(tomli.loads(full_example).items())
    assert parse_config(tomli_w.dumps(dict(tables[i] for i in order))) == parse_config(full_example)


def test_the_full_example_itself_is_good(full_example: str) -> None:
    result = _config_or_problems(full_example)
    assert isinstance(result, Config)
    with pytest.raises(ConfigError):
        parse_config("")
