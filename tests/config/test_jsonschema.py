"""The JSON Schema that editors read: current, and of one mind with `dpkit check`."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomli

from dpkit.config.jsonschema import json_schema
from dpkit.config.load import parse_config
from dpkit.config.schema import walk

ROOT = Path(__file__).parents[2]
BAD = Path(__file__).parent / "bad"
MINIMAL = '[[engines]]\nmodel = "echo"\n'
# What an editor cannot see: rules between keys, what is on this disk, the range of a duration,
# another file's mistakes.
BEYOND_A_SCHEMA = {
    "budget",
    "device_of_no_weights",
    "duplicate_name",
    "events",
    "events_folder",
    "extends_circle",
    "extends_folder",
    "extends_itself",
    "extends_nothing",
    "extends_nul",
    "int4_in_float32",
    "joining_lockstep",
    "lockstep",
    "lockstep_alone",
    "model_path",
    "pool_size_twice",
    "preset",
    "rules_of_failure",
    "two_models",
}


def _errors(tables: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'dpkit[dev]' brings it")
    validator = jsonschema.Draft7Validator(json_schema())
    return [error.message for error in validator.iter_errors(tables)]


def test_the_shipped_schema_is_current() -> None:
    shipped = importlib.resources.files("dpkit.config") / "dpkit.schema.json"
    assert json.loads(shipped.read_text()) == json_schema(), (
        "dpkit schema > dpkit/config/dpkit.schema.json"
    )


def test_it_is_a_draft_7_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'dpkit[dev]' brings it")
    jsonschema.Draft7Validator.check_schema(json_schema())


def test_every_key_is_described_and_no_other_allowed() -> None:
    found = {}

    def visit(schema: dict[str, Any], prefix: str) -> None:
        assert schema["additionalProperties"] is False
        for name, below in schema["properties"].items():
            found[prefix + name] = below.get("description") or below["items"]["description"]
            inner = below.get("items", below)
            if "properties" in inner:
                visit(inner, f"{prefix}{name}.")

    visit(json_schema(), "")
    assert found.pop("extends")
    assert list(found) == [key for key, _ in walk()]
    assert all(found.values())


def test_good_files_pass(full_example: str) -> None:
    for text in [MINIMAL, full_example, (ROOT / "dpkit.toml").read_text()]:
        parse_config(text)
        assert _errors(tomli.loads(text)) == []
    assert _errors({"extends": "base.toml"}) == []


@pytest.mark.parametrize("path", sorted(BAD.glob("*.toml")), ids=lambda path: path.stem)
def test_bad_files_are_refused_but_for_what_an_editor_cannot_see(path: Path) -> None:
    try:
        tables = tomli.loads(path.read_text())
    except tomli.TOMLDecodeError:
        return  # an editor says so by itself
    assert bool(_errors(tables)) != (path.stem in BEYOND_A_SCHEMA)


def test_the_example_names_its_schema() -> None:
    first = (ROOT / "dpkit.toml").read_text().splitlines()[0]
    assert (ROOT / first.removeprefix("#:schema ")).is_file()


def test_taplo_has_no_complaint_about_the_example(tmp_path: Path) -> None:
    taplo = shutil.which("taplo")
    if taplo is None:
        pytest.skip("taplo is not on the PATH; `npm install -g @taplo/cli` brings it")

    def lint(path: Path) -> int:
        schema = (ROOT / "dpkit/config/dpkit.schema.json").as_uri()
        command = [taplo, "lint", "--schema", schema, str(path)]
        return subprocess.run(command, check=False, capture_output=True, timeout=15).returncode

    assert lint(ROOT / "dpkit.toml") == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(MINIMAL + "cuont = 1\n")
    assert lint(wrong) != 0
