"""Each promise, broken on purpose: the test that stands for it must go red."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def _load_plant() -> Any:
    spec = importlib.util.spec_from_file_location("plant", Path(__file__).with_name("plant.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plant = _load_plant()

REPLAYS = {plant.SWEEP: "DPKIT_SWEEP=", plant.FAIL_SWEEP: "DPKIT_FAIL="}


def test_every_promise_has_a_plant() -> None:
    assert {each.promise for each in plant.PLANTS.values()} == {f"P{n}" for n in range(1, 8)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", plant.PLANTS)
def test_a_broken_promise_is_noticed(name: str) -> None:
    done = plant.run(name, "-x")
    planted = plant.PLANTS[name]
    assert done.returncode == 1, f"{planted.why}, and no test noticed:\n{done.stdout}{done.stderr}"
    assert " failed" in done.stdout, "a copy that does not even start proves nothing"
    if planted.test in REPLAYS:
        assert f"replay: {REPLAYS[planted.test]}" in done.stdout, "P8: a failure can be replayed"


@pytest.mark.timeout(120)
def test_an_unbroken_copy_passes() -> None:
    done = plant.run("none")
    assert done.returncode == 0, done.stdout
