"""Each promise of cancellation, broken on purpose: the test that stands for it must go red."""

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


@pytest.mark.parametrize("name", plant.PLANTS)
def test_a_broken_promise_is_noticed(name: str) -> None:
    done = plant.run(name, "-x")
    assert done.returncode == 1, f"{plant.PLANTS[name].why}, and no test noticed:\n{done.stdout}"
    if plant.PLANTS[name].test == plant.SWEEP:
        assert "SweepFailed" in done.stdout
        assert "replay: DPKIT_SWEEP=" in done.stdout


def test_an_unbroken_copy_passes() -> None:
    done = plant.run("none")
    assert done.returncode == 0, done.stdout
