"""Whole clusters through troubles drawn from seeds: every promise holds, and every run repeats."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from attrs import evolve
from click.testing import CliRunner

from dpkit.names import PolicyName
from dpkit.nursery.flights import Flights
from dpkit.testing.history import LEFT
from dpkit.testing.plan import Blow, Plan, Trouble, draw_plan
from dpkit.testing.world import WorldFailed, main, run_world

SEEDS = 200
MORE_SEEDS = 10_000
PARTS = 8  # a test has twenty seconds on a busy machine


def run_seeds(seeds: range) -> Counter[str]:
    """How requests ended in all of these worlds."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        outcomes.update(run_world(draw_plan(seed)).outcomes)
    return outcomes


@pytest.mark.parametrize("part", range(PARTS))
def test_promises_hold_in_every_world(part: int) -> None:
    outcomes = run_seeds(range(part, SEEDS, PARTS))
    print(dict(outcomes))
    assert outcomes.keys() >= {"length", "EngineLost", "DeadlineExceeded", "Draining", LEFT}


@pytest.mark.parametrize("part", range(PARTS))
def test_promises_hold_where_clients_have_an_arbiter_that_dies(part: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(part, SEEDS // 2, PARTS):
        plan = evolve(draw_plan(seed), policy=PolicyName.EXPECTED_TTFT, clients=3)
        dies = [Trouble(0.2, Blow.COORDINATOR), Trouble(0.5, Blow.COORDINATOR, size=0.3)]
        plan = evolve(plan, troubles=tuple(sorted([*plan.troubles, *dies])))
        outcomes.update(run_world(plan).outcomes)
    assert outcomes.keys() >= {"length", "EngineLost", "DeadlineExceeded", "Draining", LEFT}


@pytest.mark.parametrize("seed", [19, 31, 51, 122])
def test_what_an_engine_gave_back_goes_on_elsewhere_without_leave_to_resume(seed: int) -> None:
    run_world(evolve(draw_plan(seed), policy=PolicyName.EXPECTED_TTFT))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_promises_hold_in_ten_thousand_worlds(part: int) -> None:
    run_seeds(range(SEEDS + part, MORE_SEEDS, 20))


def test_every_trouble_is_drawn_sometime() -> None:
    drawn = {trouble.blow for seed in range(SEEDS) for trouble in draw_plan(seed).troubles}
    assert drawn == set(Blow)


def test_the_same_seed_gives_the_same_history_in_every_process() -> None:
    command = [sys.executable, "-m", "dpkit.testing.world", "--seeds", "3..8"]
    ours = "".join(f"{run_world(draw_plan(seed))}\n" for seed in range(3, 9))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert done.stdout == ours


def test_another_plan_gives_another_history() -> None:
    plan = draw_plan(3)
    assert run_world(plan) != run_world(evolve(plan, troubles=()))


def alone(*troubles: Trouble) -> Plan:
    plan = evolve(draw_plan(1), engines=1, team=0, intensity=3, troubles=troubles)
    return evolve(plan, max_inflight=None, max_queued=1024)


def test_a_cluster_that_loses_its_last_engine_keeps_its_promises() -> None:
    stillborn = [Trouble(0.0, Blow.STILLBORN, "e0", n) for n in range(3)]
    result = run_world(alone(*stillborn, Trouble(0.1, Blow.CRASH, "e0")))
    assert result.failed == "InjectedCrash"
    assert result.outcomes.keys() & {"ClusterClosed", "EngineLost", LEFT}
    assert not run_world(alone(*stillborn[1:], Trouble(0.1, Blow.CRASH, "e0"))).failed


def test_a_broken_promise_is_told_in_a_line_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deliver = Flights.deliver

    def twice(self: Flights, engine: object, output: object) -> None:
        deliver(self, engine, output)  # type: ignore[arg-type]
        deliver(self, engine, output)  # type: ignore[arg-type]

    monkeypatch.setattr(Flights, "deliver", twice)
    with pytest.raises(WorldFailed, match=r"P2: .* got .*; replay: python -m .*world --seed 4$"):
        run_world(draw_plan(4))
    done = CliRunner().invoke(main, ["--seed", "4"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: world failed: PromiseBroken: P2")


def test_the_plan_is_shown_when_asked_for() -> None:
    done = CliRunner().invoke(main, ["--seeds", "3..4", "--plan"])
    assert done.exit_code == 0
    assert str(draw_plan(3)) in done.stdout
    assert done.stdout.count("requests: ") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --seed N or --seeds A..B"),
        (["--seeds", "a..b"], "'a..b' is not of the form A..B"),
        (["--seed", "x"], "'x' is not a valid integer"),
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
