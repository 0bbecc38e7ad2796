"""The explorer runs every schedule, each once, and says which one failed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import trio

from dpkit import _trio
from dpkit.errors import InternalError
from dpkit.testing.explorer import REPLAY, Exploration, ExplorationFailed, Race, explore


async def _race(race: Race, runners: int = 3, steps: int = 1) -> str:
    """Who stepped when."""
    order: list[str] = []

    async def run(name: str) -> None:
        for _ in range(steps):
            order.append(name)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        with race.open():
            for name in "abc"[:runners]:
                nursery.start_soon(run, name)
            await trio.sleep(1)
    return "".join(order)


def test_every_order_is_run_once() -> None:
    orders: list[str] = []
    done = explore(_race, check=orders.append)
    # Three tasks start in any order; the tick in which they end is one of 3! more.
    assert done == Exploration(schedules=36, complete=True)
    assert set(orders) == {"".join(each) for each in itertools.permutations("abc")}


def test_orders_multiply_from_tick_to_tick() -> None:
    async def scenario(race: Race) -> str:
        return await _race(race, runners=2, steps=3)

    orders: list[str] = []
    assert explore(scenario, check=orders.append).schedules == math.factorial(2) ** 4
    assert len(set(orders)) == 2**3


def test_outside_of_the_race_tasks_run_by_age() -> None:
    async def scenario(_: Race) -> str:
        return await _race(Race([]), runners=3)

    orders: list[str] = []
    assert explore(scenario, check=orders.append).schedules == 1
    assert orders == ["abc"]


def test_a_race_may_be_explored_in_part() -> None:
    async def scenario(race: Race) -> None:
        async with trio.open_nursery() as nursery:
            with race.open(choices=1):
                for _ in range(3):
                    nursery.start_soon(trio.sleep, 0)
                await trio.sleep(1)

    assert explore(scenario, check=lambda _: None) == Exploration(schedules=6, complete=True)


def test_it_stops_at_the_bound_and_says_so() -> None:
    done = explore(_race, check=lambda _: None, most=5)
    assert done == Exploration(schedules=5, complete=False)


def _c_is_not_first(order: str) -> None:
    assert not order.startswith("c"), order


def test_a_failure_says_in_one_line_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExplorationFailed, match="exploration failed: AssertionError: cab") as found:
        explore(_race, check=_c_is_not_first)
    schedule = ".".join(map(str, found.value.schedule))
    assert "\n" not in str(found.value)
    assert f"replay: {REPLAY}={schedule} " in str(found.value)
    monkeypatch.setenv(REPLAY, schedule)
    with pytest.raises(ExplorationFailed) as again:
        explore(_race, check=_c_is_not_first)
    assert again.value.schedule == found.value.schedule
    monkeypatch.setenv(REPLAY, "0.0")
    assert explore(_race, check=_c_is_not_first).schedules == 1


def test_a_scenario_that_is_not_deterministic_is_told() -> None:
    runners = itertools.chain([3, 3], itertools.repeat(2))

    async def scenario(race: Race) -> str:
        return await _race(race, runners=next(runners))

    with pytest.raises(
        ExplorationFailed, match="had more before: the scenario is not deterministic"
    ):
        explore(scenario, check=lambda _: None)


def test_a_race_that_gets_shorter_is_told() -> None:
    races = itertools.chain([2], itertools.repeat(1))

    async def scenario(race: Race) -> str:
        return await _race(race, runners=next(races))

    with pytest.raises(ExplorationFailed, match=r"the race had 0 ticks, and 2 before"):
        explore(scenario, check=lambda _: None)


def test_a_trio_that_shuffles_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trio._Oracle, "shuffle", lambda *_: None)
    with pytest.raises(InternalError, match="did not run in the order that was asked for"):
        _trio.self_test()


def test_the_scheduler_is_as_before_afterwards() -> None:
    module: Any = trio._core._run
    before = (module._ALLOW_DETERMINISTIC_SCHEDULING, module._r)
    explore(_race, check=lambda _: None, most=1)
    assert (module._ALLOW_DETERMINISTIC_SCHEDULING, module._r) == before
