"""`dpkit config show` and `dpkit schema`: what they print, and that it can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.cli.main import main
from dpkit.config.load import load_config, parse_config
from tests.documented import page

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "dpkit.toml"


def test_what_is_shown_is_the_config_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(EXAMPLE)]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert parse_config(out) == load_config(EXAMPLE)
    assert "\n# max_num_seqs = none\n" in out


def test_origin_tells_flag_variable_and_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DPKIT__LOG__LEVEL", "info")
    assert main(["config", "show", "--origin", "--set", "engines.smol.count=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    pairs = (line.rsplit("  # ", 1) for line in lines if "  # " in line)
    found = {pair[0].split(" =")[0]: pair[1] for pair in pairs}
    assert found["count"] == "--set engines.smol.count=3"
    assert found["level"] == "$DPKIT__LOG__LEVEL"
    assert found["grace"] == "default"
    line = int(found["policy"].split(":")[1])
    assert EXAMPLE.read_text().splitlines()[line - 1].startswith("policy = ")


def test_json_holds_config_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(EXAMPLE), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["file", "config"]
    log = {"level": "warning", "format": "text", "prompts": False, "events": None, "steps": None}
    assert shown["config"]["log"] == log
    assert main(["config", "show", str(EXAMPLE), "--json", "--origin"]) == 0
    assert json.loads(capsys.readouterr().out)["origins"]["engines.0.kv.block_size"] == "default"


def test_a_wrong_config_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(EXAMPLE), "--set", "log.level=loud"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: --set log.level=loud: log.level: expected one of")


def test_schema_prints_what_is_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == (ROOT / "dpkit/config/dpkit.schema.json").read_text()


def test_the_page_shows_origins_as_they_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = page("config.md").partition("    $ ")[2].partition("\n\n")[0]
    asked, *lines = (line.strip() for line in example.splitlines())
    variable, _, command = asked.partition(" dpkit ")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(*variable.split("="))
    assert main(command.split()) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    assert [line for line in lines if line != "…" and line not in printed] == []
