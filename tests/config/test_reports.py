"""Config troubles that users of other routers reported; each test bears the report's id."""

# ruff: noqa: N802 - a report's number is written as its list writes it

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.config.load import load_config, parse_config
from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = '[[engines]]\nmodel = "echo"\n'


def _problems(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, filename="f", overrides=overrides)
    return caught.value.problems


def test_L01_misspelled_keys_are_refused_with_place_and_nearest_name() -> None:
    text = f"[coordinater]\ninterval = '1s'\n{MINIMAL}[engines.scheduler]\nmax_num_seq = 4\n"
    assert _problems(text) == (
        "f:1:1: coordinater: unknown key; did you mean 'coordinator'?",
        "f:6:1: engines.0.scheduler.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
    )


def test_L02_all_mistakes_are_found_in_one_run() -> None:
    text = """\
[[engines]]
model = "$MODEL"
cuont = 2
[[engines]]
model = "echo"
[balancer]
policy = "least_loaded"
[log]
level = "Debug"
"""
    found = _problems(text)
    assert [problem.split(": ")[:2] for problem in found] == [
        ["f:2:1", "engines.0.model"],  # an environment reference that nobody resolves
        ["f:3:1", "engines.0.cuont"],  # a typo
        ["f:4:1", "engines.1.name"],  # a duplicate that would shadow the first
        ["f:7:1", "balancer.policy"],  # an unknown policy
        ["f:9:1", "log.level"],  # case drift
    ]
    assert found[-1].endswith("did you mean 'debug'?")


def test_L02_a_key_written_twice_is_refused() -> None:
    (problem,) = _problems(MINIMAL + "count = 1\ncount = 2\n")
    assert problem == "f:4:10: not valid TOML: Cannot overwrite a value; is it there twice?"


def test_L03_an_update_with_an_unknown_key_applies_nothing() -> None:
    (problem,) = _problems(MINIMAL, "coordinator.interval=50ms", "coordinator.jitter=5ms")
    assert problem.startswith("--set coordinator.jitter=5ms: coordinator.jitter: unknown key")


def test_L05_strictness_holds_inside_a_policys_own_table() -> None:
    (problem,) = _problems(f"{MINIMAL}[balancer.kv_pressure]\nweight = 3\n")
    assert problem == (
        "f:3:1: balancer.kv_pressure: unknown key; "
        "known here: policy, binding, eject_after, eject_for, eject_max, eject_max_share"
    )


def test_L06_a_key_at_the_wrong_level_is_refused_and_shown_its_place() -> None:
    (problem,) = _problems(f"{MINIMAL}[coordinator]\npolicy = 'inflight'\n")
    assert problem == "f:4:1: coordinator.policy: unknown key; did you mean 'balancer.policy'?"


def test_L08_reading_the_same_file_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(MINIMAL)
    assert load_config(path) == load_config(path)
