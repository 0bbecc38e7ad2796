"""`dpkit check`: what it prints, where, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpkit.cli.main import main
from dpkit.testing.tiny import write_tiny_directory

EXAMPLE = Path(__file__).parents[2] / "dpkit.toml"
BAD = Path(__file__).parents[1] / "config" / "bad"


def test_good_file_is_summed_up_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(EXAMPLE)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{EXAMPLE}: ok: 2 engines of smollm2-135m, policy expected_ttft\n"
    assert not err


def test_default_file_is_the_one_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check"]) == 2
    Path("dpkit.toml").write_text('[[engines]]\nmodel = "echo"\n')
    assert main(["check"]) == 0
    out, err = capsys.readouterr()
    assert out == "dpkit.toml: ok: 1 engine of echo, policy kv_pressure\n"
    assert err == "error: dpkit.toml: no such file; name one, or write dpkit.toml\n"


@pytest.mark.parametrize("command", ["check", "plan"])
def test_who_named_a_file_is_not_told_to_name_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "mine.toml")
    more = ["--trace", "azure-conv-2023", "--ttft", "1s"] if command == "plan" else []
    assert main([command, file, *more]) == 2
    assert capsys.readouterr().err == f"error: {file}: no such file\n"


def test_every_problem_goes_to_stderr_with_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(BAD)
    assert main(["check", "rules_beside_errors.toml"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err == (BAD / "rules_beside_errors.expected").read_text()


def test_overrides_are_checked_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--set", "engines.smol.count=4", "--set", "balancer.policy=round_robin"]
    assert main(["check", str(EXAMPLE), *flags]) == 0
    assert "ok: 4 engines of smollm2-135m, policy round_robin" in capsys.readouterr().out
    assert main(["check", str(EXAMPLE), "--set", "engines.smol.count=no"]) == 2
    assert capsys.readouterr().err == (
        "error: --set engines.smol.count=no: "
        "engines.0.count: expected an integer, got 'no' (a string)\n"
    )


def test_json_is_one_object_good_or_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(BAD)
    assert main(["check", str(EXAMPLE), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(EXAMPLE),
        "ok": True,
        "engines": 2,
        "models": ["smollm2-135m"],
        "policy": "expected_ttft",
        "notes": [],
    }
    assert main(["check", "budget.toml", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "file": "budget.toml",
        "ok": False,
        "problems": Path("budget.expected").read_text().splitlines(),
    }
    assert not err


def test_limits_that_a_model_cannot_have_are_found_without_loading_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = write_tiny_directory(tmp_path / "tiny")
    file = tmp_path / "dpkit.toml"
    for model, kv, problem in [
        ("echo", 'memory = "1GiB"', "memory: this model holds no KV cache in memory; give num_"),
        (str(tiny), 'memory = "1B"', "memory: must be at least "),
    ]:
        file.write_text(f'[[engines]]\nmodel = "{model}"\n[engines.kv]\n{kv}\n')
        assert main(["check", str(file)]) == 2
        assert capsys.readouterr().err.startswith(f"{file}:4:1: engines.0.kv.{problem}")
        assert main(["check", str(file), "--json"]) == 2
        [told] = json.loads(capsys.readouterr().out)["problems"]
        assert told.startswith(f"{file}:4:1: engines.0.kv.{problem}")


def test_a_model_that_is_damaged_or_yours_is_not_wrong_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dpkit.toml"
    (tmp_path / "config.json").write_text("[")
    for model in (str(tmp_path), "my.module:Model"):
        file.write_text(f'[[engines]]\nmodel = "{model}"\nkv.memory = "1GiB"\n')
        assert main(["check", str(file)]) == 0


def test_a_process_table_that_no_process_reads_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = '[[engines]]\nname = "{}"\nmodel = "echo"\n[engines.process]\nstart = "spawn"\n'
    file = tmp_path / "dpkit.toml"
    file.write_text(group.format("a") + group.format("b").replace('"b"', '"b"\nkind = "process"'))
    note = (
        f'{file}:4:1: engines.0.process: says nothing to engines of kind "local"; '
        'kind = "process" gives them processes'
    )
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"note: {note}"]
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [note]
