"""Who has the last word: flags, the environment, the file, the files that it extends, defaults."""

from __future__ import annotations

import copy
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from dpkit.config.layers import Layers, Source
from dpkit.config.load import load_config, load_layers, parse_config
from dpkit.config.locate import locate
from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from dpkit.config.rules import Path as KeyPath

MINIMAL = '[[engines]]\nmodel = "echo"\n'
LAYERS = ("base.toml", "dpkit.toml", "$DPKIT__CLUSTER__NAME", "--set cluster.name=flag")


def _complaint(text: str = MINIMAL, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, environment=environment)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


@pytest.mark.parametrize("highest", range(-1, 4))
def test_each_layer_wins_over_all_below_it(highest: int, folder: Path) -> None:
    said = [
        f'\n[cluster]\nname = "{name}"\n' if highest >= level else ""
        for level, name in enumerate(["base", "file"])
    ]
    _write("base.toml", MINIMAL + said[0])
    _write("dpkit.toml", 'extends = "base.toml"\n' + said[1])
    loaded = load_layers(
        "dpkit.toml",
        environment={"DPKIT__CLUSTER__NAME": "variable"} if highest >= 2 else {},
        overrides=["cluster.name=flag"] if highest >= 3 else [],
    )
    expected = ["base", "file", "variable", "flag", "dpkit"][highest]
    assert loaded.config.cluster.name == expected
    if highest >= 0:
        assert loaded.layers.source(("cluster", "name")).name == LAYERS[highest]


# --- environment


@pytest.mark.parametrize(
    ("name", "value", "key", "found"),
    [
        ("DPKIT__ENGINES__0__COUNT", "3", "count", 3),
        ("DPKIT__ENGINES__SMOL__COUNT", "3", "count", 3),
        ("dpkit__Engines__smol__Count", " 0x3 ", "count", 3),
        ("DPKIT__ENGINES__0__MODEL", "cost:h20-4b", "model", "cost:h20-4b"),
        ("DPKIT__ENGINES__0__MODEL", '"other"', "model", "other"),
    ],
)
def test_a_variable_changes_one_key(name: str, value: str, key: str, found: object) -> None:
    (group,) = parse_config(f'{MINIMAL}name = "smol"', environment={name: value}).engines
    assert getattr(group, key) == found


def test_underscores_within_a_key_are_single() -> None:
    config = parse_config(MINIMAL, environment={"DPKIT__COORDINATOR__KV_PUBLISH_DELTA": "0.5"})
    assert config.coordinator.kv_publish_delta == 0.5


def test_a_whole_table_comes_before_the_keys_in_it() -> None:
    environment = {"DPKIT__LOG__LEVEL": "debug", "DPKIT__LOG": '{level = "info"}'}
    assert parse_config(MINIMAL, environment=environment).log.level == "debug"


@pytest.mark.parametrize("name", ["DPKIT_CACHE", "DPKIT_LOG__LEVEL", "_DPKIT_COMPLETE", "DPKIT"])
def test_other_variables_are_none_of_the_configs_business(name: str) -> None:
    assert parse_config(MINIMAL, environment={name: "loud"}) == parse_config(MINIMAL)


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPKIT__LOG__LEVEL", "debug")
    assert parse_config(MINIMAL).log.level == "debug"
    assert parse_config(MINIMAL, environment={}).log.level == "warning"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DPKIT__LOG__LEVL", "info", "log.levl: unknown key; did you mean 'level'?"),
        ("DPKIT__CORDINATOR__X", "1", "cordinator: unknown key; did you mean 'coordinator'?"),
        ("DPKIT__ENGINES__0__COUNT", "0", "engines.0.count: must be between 1 and 1024, got 0"),
        ("DPKIT__ENGINES__7__COUNT", "1", "there is no engines.7; indices here: 0; names: engine"),
        ("DPKIT__ENGINES", "[", "'[' is not a TOML value"),
        (
            "DPKIT__EXTENDS",
            "b.toml",
            "extends: only a file says this, at its top, before the first",
        ),
        ("DPKIT__", "1", "expected DPKIT__KEY__PATH=VALUE, for example DPKIT__COORDINATOR__INT"),
        ("DPKIT__LOG____LEVEL", "1", "expected DPKIT__KEY__PATH=VALUE, for example DPKIT__COORD"),
    ],
)
def test_a_wrong_variable_is_located_at_its_name(name: str, value: str, message: str) -> None:
    assert _complaint(**{name: value}).startswith(f"${name}: {message}")


def test_problems_come_layer_by_layer(folder: Path) -> None:
    _write("base.toml", '[log]\nlevel = "loud"\n[cluster]\nseed = -1\n')
    text = f'extends = "base.toml"\n{MINIMAL}count = 0\n'
    with pytest.raises(ConfigError) as caught:
        parse_config(
            text,
            filename="f",
            overrides=["coordinator.publish=maybe", "balancer"],
            environment={"DPKIT__CLUSTER__GRACE": "x", "DPKIT__BALANCER__": "y"},
        )
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "f:4:1",
        "base.toml:2:1",
        "base.toml:4:1",
        "$DPKIT__BALANCER__",
        "$DPKIT__CLUSTER__GRACE",
        "--set coordinator.publish=maybe",
        "--set balancer",
    ]


@given(
    st.dictionaries(
        st.text("ENGISLOGCU0_", max_size=16).map("DPKIT__".__add__),
        st.one_of(st.text(max_size=6), st.sampled_from(["1", "debug", "{}", "[{}]", "\ud800"])),
        max_size=3,
    )
)
def test_any_environment_gives_a_config_or_problems(environment: dict[str, str]) -> None:
    try:
        parse_config(MINIMAL, environment=environment)
    except ConfigError as error:
        for problem in error.problems:
            assert problem.startswith(("$DPKIT__", "<string>:"))
            assert problem.isprintable()


# --- extends


def test_tables_merge_and_arrays_replace(folder: Path) -> None:
    _write(
        "base.toml",
        '[[engines]]\nmodel = "one"\ncount = 4\n[[engines]]\nname = "b"\nmodel = "one"\n'
        '[coordinator]\ninterval = "50ms"\npublish = false\n[log]\nlevel = "info"\n',
    )
    text = f'extends = "base.toml"\n{MINIMAL}[coordinator]\ninterval = "20ms"\n'
    config = parse_config(text, environment={})
    assert [(group.model, group.count) for group in config.engines] == [("echo", 1)]
    assert (config.coordinator.interval, config.coordinator.publish) == (0.02, False)
    assert config.log.level == "info"


def test_a_chain_is_followed_from_folder_to_folder(folder: Path) -> None:
    _write("shared/deep/bottom.toml", f'{MINIMAL}[cluster]\nname = "bottom"\n[log]\nlevel = "info"')
    _write("shared/middle.toml", 'extends = "deep/bottom.toml"\n[cluster]\nname = "middle"\n')
    _write("top/dpkit.toml", 'extends = "../shared/middle.toml"\n')
    config = load_config("top/dpkit.toml", environment={})
    assert (config.cluster.name, config.log.level, config.engines[0].model) == (
        "middle",
        "info",
        "echo",
    )


def test_what_a_base_said_is_void_where_it_is_replaced(folder: Path) -> None:
    _write("base.toml", 'log = 3\n[[engines]]\nmodel = "one"\ncount = 0\n')
    text = f'extends = "base.toml"\n[log]\nlevel = "info"\n{MINIMAL}'
    assert parse_config(text, environment={}).log.level == "info"


def test_a_missing_key_is_missed_where_its_table_stands(folder: Path) -> None:
    _write("base.toml", MINIMAL)
    with pytest.raises(ConfigError, match=r"^<string>:3:1: engines\.0\.model: missing; write"):
        parse_config('extends = "base.toml"\n\n[[engines]]\ncount = 1\n', environment={})


def test_overrides_reach_into_the_groups_of_a_base(folder: Path) -> None:
    _write("base.toml", f'{MINIMAL}name = "smol"\n')
    config = parse_config(
        'extends = "base.toml"', environment={}, overrides=["engines.smol.kv.block_size=8"]
    )
    assert config.engines[0].kv.block_size == 8


def test_a_table_that_is_set_as_a_whole_forgets_its_parts() -> None:
    flags = ["engines.0.kv.block_size=0", "engines.0.kv={}", "engines.0.kv.num_blocks=0"]
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL, overrides=flags)
    (problem,) = caught.value.problems
    assert problem.startswith("--set engines.0.kv.num_blocks=0: ")


# --- paths


def test_paths_of_models_start_at_the_file_that_holds_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weights in ["conf/weights", "weights"]:
        Path(weights).mkdir(parents=True)
    _write("conf/base.toml", '[[engines]]\nmodel = "./weights"\n')
    _write("dpkit.toml", 'extends = "conf/base.toml"\n')
    config = load_config("dpkit.toml")
    assert config.engines[0].model == str(folder / "conf/weights")
    flagged = load_config("dpkit.toml", overrides=["engines.0.model=./weights"])
    assert flagged.engines[0].model == str(folder / "weights")
    monkeypatch.chdir("/")
    assert load_config(folder / "dpkit.toml") == config


@pytest.mark.parametrize("model", ["echo", "cost:h20-4b", "smollm2-135m", "my.pkg:Model"])
def test_names_of_models_are_no_paths(model: str, folder: Path) -> None:
    _write("conf/dpkit.toml", f'[[engines]]\nmodel = "{model}"\n')
    assert load_config("conf/dpkit.toml").engines[0].model == model


def test_home_is_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    Path("weights").mkdir()
    _write("conf/dpkit.toml", '[[engines]]\nmodel = "~/weights"\n')
    assert load_config("conf/dpkit.toml").engines[0].model == "~/weights"


# --- any tables at all

KEYS = st.sampled_from("abc")
TABLES = st.recursive(
    st.dictionaries(KEYS, st.integers(0, 3), max_size=3),
    lambda inner: st.dictionaries(
        KEYS, st.one_of(inner, st.integers(0, 3), st.lists(inner, max_size=2)), max_size=3
    ),
    max_leaves=8,
)


def _merged(below: Any, above: Any) -> Any:
    """The rule, as plainly as it can be said."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {
        key: _merged(below[key], value) if key in below else value for key, value in above.items()
    }


def _values(place: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    if not isinstance(place, dict | list):
        return {path: place}
    steps = place.items() if isinstance(place, dict) else enumerate(place)
    return {
        at: value for step, below in steps for at, value in _values(below, (*path, step)).items()
    }


@given(st.lists(TABLES, min_size=1, max_size=3), st.data())
def test_every_value_is_the_highest_layers_and_is_traced_to_it(
    tables: list[dict[str, Any]], data: st.DataObject
) -> None:
    sources = [Source(f"{n}.toml", text=tomli_w.dumps(said)) for n, said in enumerate(tables)]
    layers = Layers(sources[-1])
    for said, source in zip(copy.deepcopy(tables), sources, strict=True):
        layers.merge(said, source)
    assert layers.tables == reduce(_merged, tables)
    spots = {
        source: locate(tomli_w.dumps(said)) for source, said in zip(sources, tables, strict=True)
    }
    for path, value in _values(layers.tables).items():
        source = layers.source(path)
        assert path in spots[source]
        assert _values(tables[sources.index(source)])[path] == value
    places = [path for path in _values(layers.tables) if path]
    if places:
        path = data.draw(st.sampled_from(places))
        flag = Source("--set")
        assert layers.assign([str(step) for step in path], 9, flag) == path
        assert layers.source(path) is flag
        assert _values(layers.tables)[path] == 9
