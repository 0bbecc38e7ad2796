"""The effective config is itself a config that means the same, and says where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tomli
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from dpkit.config.load import load_layers, parse_config
from dpkit.config.schema import table_of, walk
from dpkit.config.show import effective, origins, plain_default, to_toml

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.config.load import Loaded

KEYS = {key: attribute for key, attribute in walk() if table_of(attribute) is None}
NAMES = st.text("abcxyz019_-", min_size=1, max_size=5)
GROUPS = st.fixed_dictionaries(
    {"model": st.sampled_from(["smollm2-135m", "my_model", "x"])},
    optional={
        "count": st.integers(1, 1024),
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "kv": st.one_of(
            st.fixed_dictionaries({"num_blocks": st.integers(1, 2**31 - 1)}),
            st.fixed_dictionaries({"memory": st.sampled_from(["1.0000001GiB", "3 B", "999TB"])}),
        ),
    },
)
CONFIGS = st.fixed_dictionaries(
    {"engines": GROUPS.map(lambda group: [group])},
    optional={
        "cluster": st.fixed_dictionaries({"name": NAMES}, optional={"seed": st.integers(0, 9**18)}),
        "coordinator": st.fixed_dictionaries(
            {},
            optional={
                "interval": st.sampled_from(["1.2345678ms", "0.0171717m", "1m", "999.9999999 ms"]),
                "kv_publish_delta": st.one_of(st.floats(0, 1), st.sampled_from([0, 1])),
            },
        ),
        "log": st.just({}),
    },
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _shown(text: str, path: Path, *, with_origins: bool = False) -> str:
    path.write_text(text)
    return to_toml(load_layers(path), with_origins=with_origins)


@given(tables=CONFIGS, with_origins=st.booleans())
def test_what_is_shown_means_the_same(
    tables: dict[str, object], with_origins: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "shown.toml"
    shown = _shown(tomli_w.dumps(tables), path, with_origins=with_origins)
    assert parse_config(shown) == parse_config(tomli_w.dumps(tables))


def test_what_is_shown_may_be_loaded_from_anywhere(folder: Path) -> None:
    weights = folder / "conf" / 'odd "name"\\\x7f ü'
    weights.mkdir(parents=True)
    text = f"[[engines]]\nmodel = {tomli_w.dumps({'m': f'./{weights.name}'})[4:]}\n"
    shown = _shown(text, folder / "conf" / "dpkit.toml", with_origins=True)
    assert parse_config(shown).engines[0].model == str(weights)


def test_every_key_is_shown(full_example: str, folder: Path) -> None:
    path = folder / "dpkit.toml"
    assert {
        ".".join(step for step in found if isinstance(step, str))
        for found in origins(_loaded(path, full_example))
    } == set(KEYS)
    assert tomli.loads(to_toml(load_layers(path)))["engines"][0]["kv"]["num_blocks"] == 2048


def test_a_default_is_shown_as_a_file_would_have_it() -> None:
    shown = {key: plain_default(attribute) for key, attribute in KEYS.items()}
    assert shown["coordinator.interval"] == "100ms"
    assert shown["log.level"] == "warning"
    assert type(shown["log.level"]) is str
    assert shown["engines.model"] is shown["cluster.seed"] is None


def test_origins_name_file_line_variable_flag_and_default(folder: Path) -> None:
    (folder / "base.toml").write_text('[log]\nlevel = "info"\n[coordinator]\npublish = false\n')
    (folder / "dpkit.toml").write_text(
        'extends = "base.toml"\n[[engines]]\nmodel = "echo"\nkv = { block_size = 8 }\n'
    )
    loaded = load_layers(
        "dpkit.toml",
        environment={"DPKIT__CLUSTER": '{name = "x"}'},
        overrides=["engines.0.count=2"],
    )
    found = origins(loaded)
    assert {path: at for path, at in found.items() if at != "default"} == {
        ("cluster", "name"): "$DPKIT__CLUSTER",
        ("engines", 0, "count"): "--set engines.0.count=2",
        ("engines", 0, "model"): "dpkit.toml:3:1",
        ("engines", 0, "kv", "block_size"): "dpkit.toml:4:8",
        ("coordinator", "publish"): "base.toml:4:1",
        ("log", "level"): "base.toml:2:1",
    }
    assert effective(loaded)["cluster"] == {
        "name": "x",
        "seed": None,
        "grace": "10s",
        "kill_after": None,
        "pre_stop": "0s",
        "min_ready": 1,
    }


def _loaded(path: Path, text: str) -> Loaded:
    path.write_text(text)
    return load_layers(path)
