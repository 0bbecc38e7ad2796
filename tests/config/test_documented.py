"""What docs/config.md and dpkit.toml say of keys and defaults is what the schema says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli

from dpkit.config.load import load_config, parse_config
from dpkit.config.schema import Config, table_of, walk

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `([a-z_.]+)` \| (.+?) \| (.+?) \| (.+?) \|")
VALUES = {key: attribute for key, attribute in walk() if table_of(attribute) is None}
MINIMAL = '[[engines]]\nmodel = "echo"\n'


def _rows() -> dict[str, tuple[str, str, str]]:
    text = (ROOT / "docs/config.md").read_text()
    return {row[1]: (row[2], row[3], row[4]) for row in ROW.finditer(text)}


def test_every_key_is_documented_and_no_other() -> None:
    assert list(_rows()) == list(VALUES)


def test_every_table_has_a_heading() -> None:
    headings = re.findall(
        r"^## `\[+([a-z.]+)\]+`$", (ROOT / "docs/config.md").read_text(), re.MULTILINE
    )
    assert headings == [key for key, attribute in walk() if table_of(attribute) is not None]


@pytest.mark.parametrize("key", VALUES)
def test_the_documented_reason_is_the_schemas(key: str) -> None:
    _, _, why = _rows()[key]
    assert why.replace("`", "") == VALUES[key].metadata["why"]


@pytest.mark.parametrize("key", VALUES)
def test_documented_default_is_the_default(key: str) -> None:
    value, default, why = _rows()[key]
    assert value
    assert why.endswith(".")
    if default == "required":
        assert VALUES[key].default is attrs.NOTHING
    elif default == "*none*":
        assert VALUES[key].default is None
    else:
        override = f"{key.replace('engines.', 'engines.0.')}={default.strip('`')}"
        minimal = MINIMAL + "[server]" * key.startswith("server.")
        assert parse_config(minimal, overrides=[override]) == parse_config(minimal)


def test_first_example_of_the_docs_is_a_whole_config() -> None:
    example = re.search(r"```toml\n(.*?)```", (ROOT / "docs/config.md").read_text(), re.DOTALL)
    assert example is not None
    assert parse_config(example[1]).engines[0].count == 2


def test_example_file_spells_out_count_interval_and_policy() -> None:
    tables = tomli.loads((ROOT / "dpkit.toml").read_text())
    assert tables["engines"][0]["count"] == 2
    assert tables["coordinator"]["interval"] == "100ms"
    assert tables["balancer"]["policy"] == "expected_ttft"


def test_example_file_shows_every_key(full_example: str) -> None:
    for key in VALUES:
        assert re.search(rf"^(# )?{key.rpartition('.')[2]} = ", full_example, re.MULTILINE), key


def test_commented_keys_of_the_example_stand_at_their_defaults(full_example: str) -> None:
    full, plain = parse_config(full_example), load_config(ROOT / "dpkit.toml")
    names = ("model_name", "api_key_env", "admin_listen", "admin_key_env", "otlp_traces_endpoint")
    absent: dict[str, Any] = dict.fromkeys(names)
    chosen_by_absence: dict[str, Any] = {"max_num_seqs": None, "max_num_batched_tokens": None}
    (group,) = full.engines
    group = attrs.evolve(
        group,
        scheduler=attrs.evolve(group.scheduler, **chosen_by_absence),
        kv=attrs.evolve(group.kv, num_blocks=None),
    )
    assert full.server is not None
    expected = attrs.evolve(
        full,
        engines=[group],
        balancer=attrs.evolve(full.balancer, binding=None),
        cluster=attrs.evolve(full.cluster, seed=None, kill_after=None),
        admission=attrs.evolve(full.admission, max_inflight=None),
        log=attrs.evolve(full.log, events=None, steps=None),
        server=attrs.evolve(full.server, **absent),
    )
    assert expected == plain
    assert isinstance(plain, Config)
