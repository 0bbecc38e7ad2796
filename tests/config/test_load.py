"""Reading files and overrides: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.config.checks import describe, quote
from dpkit.config.load import load_config, parse_config
from dpkit.config.rules import Conflict, conflicts
from dpkit.config.schema import (
    ClusterConfig,
    Config,
    CoordinatorConfig,
    EngineGroupConfig,
    KvConfig,
    LogLevel,
    VllmConfig,
)
from dpkit.config.structure import structure
from dpkit.errors import ConfigError
from dpkit.names import Dtype, EngineKind, Quant

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = '[[engines]]\nmodel = "echo"\n'
TWO_GROUPS = MINIMAL + 'name = "smol"\n' + MINIMAL + 'name = "0"\n'


def _complaint(text: str = MINIMAL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides=overrides)
    return str(caught.value)


def test_two_lines_are_a_config() -> None:
    config = parse_config(MINIMAL)
    assert config == Config(engines=[EngineGroupConfig(model="echo")])
    assert config.engines[0].kind is EngineKind.LOCAL
    assert config.log.level is LogLevel.WARNING


def test_full_example_is_read_key_by_key(full_example: str) -> None:
    config = parse_config(full_example)
    (group,) = config.engines
    assert (group.name, group.count, group.model) == ("smol", 2, "smollm2-135m")
    assert (group.scheduler.max_num_seqs, group.scheduler.max_num_batched_tokens) == (64, 2048)
    assert (group.kv.block_size, group.kv.num_blocks, group.kv.prefix_cache) == (16, 2048, True)
    assert config.coordinator == CoordinatorConfig()
    assert (config.cluster.grace, config.cluster.seed) == (10.0, 0)


def test_configs_are_values() -> None:
    first, second = parse_config(TWO_GROUPS), parse_config(TWO_GROUPS)
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(AttributeError):
        first.cluster.name = "other"  # type: ignore[misc]


def test_an_integer_may_stand_for_a_float_and_nothing_else_is_coerced() -> None:
    delta = parse_config(MINIMAL, overrides=["coordinator.kv_publish_delta=1"])
    assert type(delta.coordinator.kv_publish_delta) is float
    assert "expected an integer, got 1.0 (a float)" in _complaint(MINIMAL, "engines.0.count=1.0")


def test_all_forms_of_a_model_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.gguf").touch()
    names = ["echo", "cost:h20-4b", "smollm2-135m", "./weights", "model.gguf", "my.pkg:Model"]
    for name in [*names, str(tmp_path)]:
        config = parse_config(MINIMAL, overrides=[f'engines.0.model="{name}"'])
        path = name.startswith(".") or name.endswith(".gguf")
        assert config.engines[0].model == (str(tmp_path / name) if path else name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"./{'a' * 300}", "cannot be looked up: File name too long"),
        ("~nobody-by-this-name/model", "cannot be looked up: Could not determine home directory."),
    ],
)
def test_a_path_that_cannot_be_looked_up_says_why(name: str, problem: str) -> None:
    assert problem in _complaint(MINIMAL, f"engines.0.model={name}")


def test_presets_may_differ_between_groups() -> None:
    config = parse_config(
        '[[engines]]\nname = "a"\nmodel = "cost:h100-8b"\n'
        '[[engines]]\nname = "b"\nmodel = "cost:h20-4b"\n'
    )
    assert len(config.engines) == 2


def test_a_policy_may_be_anyones_class() -> None:
    config = parse_config(MINIMAL, overrides=["balancer.policy=my.pkg:Policy"])
    assert config.balancer.policy == "my.pkg:Policy"


# --- files


def test_byte_order_mark_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(path) == parse_config(MINIMAL)


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load_config(tmp_path / "none.toml")


def test_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}: cannot be read: Is a dir"):
        load_config(tmp_path)


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_no_utf8_are_located(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "latin1.toml"
    path.write_bytes(start + '# größe\nname = "'.encode() + b'\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin1.toml:2:9: not UTF-8: byte 0xe9; save"):
        load_config(path)


def test_text_too_deep_or_too_long_for_tomli_is_refused_in_words() -> None:
    assert "nested too deeply" in _complaint(f"x = {'[' * 3000}{']' * 3000}")
    assert "an integer of thousands of digits" in _complaint(f"x = {'9' * 5000}")


def test_text_as_deep_as_tomli_takes_is_no_trouble() -> None:
    deep = "[" * 300 + "]" * 300
    assert _complaint(f"x = {deep}\n{MINIMAL}count = {deep}") == (
        "<string>:1:1: x: unknown key; "
        "known here: cluster, engines, admission, coordinator, balancer, log, server, extends\n"
        "<string>:4:1: engines.0.count: expected an integer, got an array"
    )


# --- overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("balancer.policy=inflight", "inflight"),
        ('balancer.policy="inflight"', "inflight"),
        ("balancer . policy = inflight ", "inflight"),
        ("engines.0.model=cost:h20-4b", "cost:h20-4b"),
        ("engines.smol.model=other", "other"),
        ("engines.0.count=0x10", 16),
        ("engines.0.kv.prefix_cache=false", False),
        ("engines.0.kv.memory=1.5KiB", 1536),
        ("engines.0.kv={ block_size = 32 }", KvConfig(block_size=32)),
        ("coordinator.interval=50ms", 0.05),
        ("cluster.grace=1m", 60.0),
        ("log.level=debug", LogLevel.DEBUG),
    ],
)
def test_override_wins_over_the_file(override: str, value: object) -> None:
    text = MINIMAL + 'name = "smol"\ncount = "wrong, but replaced below"\n'
    config = parse_config(text, overrides=["engines.0.count=3", override])
    found: Any = config
    for name in override.partition("=")[0].replace(" ", "").split("."):
        found = found[0] if name in {"0", "smol"} else getattr(found, name)
    assert found == value


def test_the_last_override_wins() -> None:
    overrides = ["engines.0.count=2", "engines.0.count=0", "engines.0.count=3"]
    assert parse_config(MINIMAL, overrides=overrides).engines[0].count == 3


def test_an_index_wins_over_a_name() -> None:
    config = parse_config(TWO_GROUPS, overrides=["engines.0.count=7"])
    assert [group.count for group in config.engines] == [7, 1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engines.0.count=0", "engines.0.count: must be between 1 and 1024, got 0"),
        ("engines.smol.count=0", "engines.0.count: must be between 1 and 1024, got 0"),
        ("engines.0.cuont=2", "engines.0.cuont: unknown key; did you mean 'count'?"),
        ("log={x = 1}", "log.x: unknown key; known here: level, format, prompts, events, steps"),
        ("cordinator.interval=1", "cordinator: unknown key; did you mean 'coordinator'?"),
        ("engines.0={}", 'engines.0.model: missing; write for example model = "smollm2-135m"'),
        ("engines.7.count=1", "there is no engines.7; indices here: 0, 1; names: smol, 0"),
        (
            "engines.sml.count=1",
            "there is no engines.sml; indices here: 0, 1; names: smol, 0; did you mean 'smol'?",
        ),
        ("engines.0.name.x=1", "engines.0.name is 'smol' (a string), which has no key 'x'"),
        ("engines.0.count=[1,", "'[1,' is not a TOML value"),
        ("engines.0.count=", "engines.0.count: expected an integer, got '' (a string)"),
        ("cluster.seed=1\nx = 2", "cluster.seed: expected an integer, got '1\\nx = 2' (a string)"),
        ("nonsense", "expected KEY.PATH=VALUE, for example coordinator.interval=50ms"),
        ("engines..count=1", "expected KEY.PATH=VALUE, for example coordinator.interval=50ms"),
    ],
)
def test_wrong_override_is_located_at_the_flag(override: str, message: str) -> None:
    shown = override if override.isprintable() else repr(override)
    assert _complaint(TWO_GROUPS, override) == f"--set {shown}: {message}"


def test_a_group_without_a_name_goes_by_the_one_it_gets() -> None:
    config = parse_config('[[engines]]\nmodel = "echo"\n', overrides=["engines.engine.count=3"])
    assert (config.engines[0].name, config.engines[0].count) == ("engine", 3)


def test_empty_array_has_no_index_to_set() -> None:
    assert "there is no engines.0; indices here: none" in _complaint(
        "engines = []", "engines.0.x=1"
    )


def test_problems_of_the_file_come_before_those_of_flags() -> None:
    assert _complaint(
        TWO_GROUPS.replace("smol", "!"), "engines.1.count=x", "nonsense"
    ).splitlines() == [
        "<string>:3:1: engines.0.name: must be made of 'a' to 'z', digits, '_' and '-', got '!'",
        "--set engines.1.count=x: engines.1.count: expected an integer, got 'x' (a string)",
        "--set nonsense: expected KEY.PATH=VALUE, for example coordinator.interval=50ms",
    ]


def test_rules_hold_between_file_and_flag() -> None:
    text = MINIMAL + "kv.num_blocks = 4\n"
    assert _complaint(text, "engines.0.kv.memory=1GiB").startswith("--set engines.0.kv.memory=1GiB")


# --- configs built in Python


def test_config_built_in_python_passes_the_same_checks() -> None:
    with pytest.raises(ConfigError, match="grace: must be between 0s and 1h, got 2h"):
        ClusterConfig(grace=7200.0)
    with pytest.raises(ConfigError, match=r"engines: at least one \[\[engines\]\] table is needed"):
        Config(engines=())
    kv = KvConfig(num_blocks=4, memory=1024)
    with pytest.raises(Conflict, match=r"engines\.0\.kv\.memory: num_blocks already"):
        Config(engines=[EngineGroupConfig(model="echo", kv=kv)])


def test_requests_may_finish_until_the_last_part_of_the_grace() -> None:
    assert ClusterConfig().finish_within == 8.0
    assert ClusterConfig(grace=1.0).finish_within == pytest.approx(0.8)
    assert ClusterConfig(grace=1.0, kill_after=1.0).finish_within == 0.0
    assert ClusterConfig(grace=0.0).finish_within == 0.0


def test_the_defaults_of_the_rules_between_keys_are_those_of_the_keys() -> None:
    group = EngineGroupConfig(model="echo")
    config = Config(engines=[group])
    alone: dict[str, dict[str, Any]] = {
        "cluster": {"min_ready": 2, "pre_stop": config.cluster.finish_within + 1},
        "balancer": {"eject_max": config.balancer.eject_for / 2},
    }
    supervision = {"backoff": group.supervision.backoff_max * 2}
    found = conflicts({**alone, "engines": [{"model": "echo", "supervision": supervision}]})
    assert [message for _, message in found] == [
        "must be at most backoff_max (10s), got 20s",
        "must be at most 8s, which is grace without kill_after; got 9s",
        "must be at most the number of engines (1), got 2",
        "must be at most eject_max (500ms), got 1s",
    ]


def test_the_event_log_starts_at_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "dpkit.toml"
    path.write_text(MINIMAL + '[log]\nevents = "logs/events.jsonl"\n')
    assert load_config(path).log.events == str(tmp_path / "logs" / "events.jsonl")
    elsewhere = load_config(path, overrides=[f"log.events={tmp_path}/all.jsonl"])
    assert elsewhere.log.events == f"{tmp_path}/all.jsonl"


def test_the_step_log_starts_there_too(tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(MINIMAL + '[log]\nsteps = "steps.csv"\n')
    assert load_config(path).log.steps == str(tmp_path / "steps.csv")


def test_an_event_log_that_cannot_be_looked_up_says_why() -> None:
    problem = "cannot be looked up: Could not determine home directory."
    assert problem in _complaint(MINIMAL, "log.events=~nobody-by-this-name/events")


def test_structuring_leaves_its_input_alone() -> None:
    tables = {"engines": [{"model": "echo", "bogus": 1}, 7], "log": {"level": "loud"}}
    problems = structure(tables)
    assert isinstance(problems, list)
    assert len(problems) == 3
    assert tables == {"engines": [{"model": "echo", "bogus": 1}, 7], "log": {"level": "loud"}}


def test_values_in_messages_stay_short_and_on_one_line() -> None:
    assert quote("x" * 100) == f"'{'x' * 55}...'"
    assert "\n" not in describe("a\nb")
    assert describe(2**70) == "an integer of more than 64 bits"


@pytest.mark.parametrize(
    ("second", "alike"),
    [
        ({}, True),
        ({"kind": EngineKind.PROCESS}, True),
        ({"dtype": Dtype.FLOAT32}, False),
        ({"quant": Quant.INT4}, False),
        ({"device": "cuda"}, False),
        ({"kind": EngineKind.VLLM, "vllm": VllmConfig(handshake="tcp://10.0.0.1:29550")}, False),
    ],
)
def test_engines_compute_alike_if_nothing_that_decides_on_tokens_differs(
    second: dict[str, Any], alike: bool
) -> None:
    groups = [
        EngineGroupConfig(name="a", model="m"),
        EngineGroupConfig(name="b", model="m", **second),
    ]
    assert Config(engines=groups).is_uniform is alike
