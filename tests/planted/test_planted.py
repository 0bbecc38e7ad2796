"""Each promise, broken on purpose: the test that stands for it must go red."""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from subprocess import CompletedProcess


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


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, CompletedProcess[str]]:
    """Those asked for, as many side by side as there are cores: each is a process of its own."""
    items = [each for each in request.session.items if isinstance(each, pytest.Function)]
    asked = [str(each.callspec.params["name"]) for each in items if runs_a_plant(each)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(asked, pool.map(lambda name: plant.run(name, "-x"), asked), strict=True))


def runs_a_plant(item: pytest.Function) -> bool:
    return item.originalname == test_a_broken_promise_is_noticed.__name__


@pytest.mark.timeout(900)  # the first one waits for all
@pytest.mark.parametrize("name", plant.PLANTS)
def test_a_broken_promise_is_noticed(name: str, runs: dict[str, CompletedProcess[str]]) -> None:
    done, planted = runs[name], plant.PLANTS[name]
    assert done.returncode == 1, f"{planted.why}, and no test noticed:\n{done.stdout}{done.stderr}"
    assert " failed" in done.stdout, "a copy that does not even start proves nothing"
    if planted.test in REPLAYS:
        assert f"replay: {REPLAYS[planted.test]}" in done.stdout, "P8: a failure can be replayed"


@pytest.mark.slow  # these tests pass in the tree itself; what a copy may lack changes rarely
def test_an_unbroken_copy_passes() -> None:
    done = plant.run("none")
    assert done.returncode == 0, done.stdout
