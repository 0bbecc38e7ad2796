"""The kit that proves things must itself be believed: what it cancels, when, and what it says."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit import _trio
from dpkit.errors import InternalError
from dpkit.testing.mark import Case, Mark, Mode
from dpkit.testing.sweep import REPLAY, SweepFailed, SweepStatistics, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator


async def _wait() -> None:
    """An operation that another task makes succeed: one step that may be aborted."""
    event = trio.Event()
    trio.lowlevel.current_trio_token().run_sync_soon(event.set)
    await event.wait()


async def _three_steps(mark: Mark) -> list[str]:
    """What the target got done, with every operation noted once it has succeeded."""
    done = []
    with mark.target():
        done.append("a")
        await trio.lowlevel.cancel_shielded_checkpoint()
        done.append("b")
        await _wait()
        done.append("c")
    done.append("left")
    return done


def test_every_step_is_cancelled_on_both_sides() -> None:
    ends: list[str] = []
    done = sweep(_three_steps, seeds=[0], check=lambda done: ends.append("".join(done)))
    assert done == SweepStatistics(runs=6, steps=2)
    # Never; before and after steps 0 and 1; before step 2, whose sleep has succeeded by then.
    assert ends == ["abcleft", "ableft", "ableft", "ableft", "ableft", "abcleft"]


def test_a_shielded_operation_is_not_cut() -> None:
    async def scenario(mark: Mark) -> int:
        finished = 0
        with mark.target(), trio.CancelScope(shield=True):
            for _ in range(5):
                await trio.sleep(1)
                finished += 1
        return finished

    results: list[int] = []
    assert sweep(scenario, seeds=[0], check=results.append).steps == 5
    assert set(results) == {5}


def test_only_the_targets_steps_count() -> None:
    async def scenario(mark: Mark) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 1)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            with mark.target():
                await trio.lowlevel.checkpoint()
            for _ in range(3):
                await trio.lowlevel.checkpoint()

    assert sweep(scenario, seeds=[0], check=lambda _: None) == SweepStatistics(runs=4, steps=1)


async def _leaky(mark: Mark) -> set[str]:
    """Leaks when cancelled in the very step after its charge."""
    held = {"slot"}
    with mark.target():
        await _wait()
        held.clear()
    return held


def _is_empty(held: set[str]) -> None:
    assert not held, "the slot\nis held"


def test_a_failure_says_in_one_line_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SweepFailed) as caught:
        sweep(_leaky, seeds=[7], check=_is_empty)
    assert caught.value.case == Case(7, 0, Mode.BEFORE)
    assert isinstance(caught.value.__cause__, AssertionError)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("sweep failed: AssertionError: the slot is held")
    assert f"replay: {REPLAY}=7:0:before " in message
    assert "test_sweep.py::test_a_failure_says_in_one_line_how_to_replay_it" in message

    monkeypatch.setenv(REPLAY, "7:0:before")
    with pytest.raises(SweepFailed) as again:
        sweep(_leaky, seeds=[], check=_is_empty)
    assert again.value.case == caught.value.case

    monkeypatch.setenv(REPLAY, "7:1:before")
    assert sweep(_leaky, seeds=[], check=_is_empty) == SweepStatistics(runs=1, steps=1)


async def _raise() -> None:
    async with trio.open_nursery():
        await trio.lowlevel.checkpoint()
        raise ValueError("boom")


def test_the_error_of_a_nested_task_is_named_itself() -> None:
    async def scenario(mark: Mark) -> None:
        with mark.target():
            async with trio.open_nursery() as outer:
                outer.start_soon(_raise)

    with pytest.raises(SweepFailed, match="sweep failed: ValueError: boom; replay"):
        sweep(scenario, seeds=[0], check=lambda _: None)


def test_a_run_that_hangs_fails() -> None:
    async def scenario(mark: Mark) -> None:
        with mark.target():
            await trio.lowlevel.checkpoint()
        await trio.sleep_forever()

    with pytest.raises(SweepFailed, match="TooSlowError"):
        sweep(scenario, seeds=[0], check=lambda _: None, limit=60)


def test_a_task_that_is_left_fails() -> None:
    async def scenario(mark: Mark) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep_forever)
        with mark.target():
            await trio.lowlevel.checkpoint()

    with pytest.raises(SweepFailed, match="1 tasks are left"):
        sweep(scenario, seeds=[0], check=lambda _: None)


def _chances() -> Iterator[int]:
    return itertools.chain([5], itertools.repeat(1))


def test_a_scenario_that_is_not_deterministic_is_told() -> None:
    chances = _chances()

    async def scenario(mark: Mark) -> None:
        with mark.target():
            for _ in range(next(chances)):
                await trio.lowlevel.checkpoint()

    with pytest.raises(SweepFailed, match=r"never came to this step.*not deterministic"):
        sweep(scenario, seeds=[0], check=lambda _: None)


def test_a_scenario_without_a_target_is_told() -> None:
    async def scenario(_: Mark) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(SweepFailed, match="the scenario marks none"):
        sweep(scenario, seeds=[0], check=lambda _: None)


def test_a_second_target_is_refused() -> None:
    async def scenario(mark: Mark) -> None:
        for _ in range(2):
            with mark.target():
                await trio.lowlevel.checkpoint()

    with pytest.raises(SweepFailed, match="a sweep has one target"):
        sweep(scenario, seeds=[0], check=lambda _: None)


async def _race(order: list[int]) -> None:
    async def note(number: int) -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(note, number)


def _order(seed: int) -> tuple[int, ...]:
    order: list[int] = []
    with _trio.seeded_scheduler(seed):
        trio.run(_race, order)
    return tuple(order)


def test_a_seed_is_a_schedule() -> None:
    orders = [_order(seed) for seed in range(10)]
    assert orders == [_order(seed) for seed in range(10)]
    assert len(set(orders)) == 10


def test_the_scheduler_is_as_before_afterwards() -> None:
    module: Any = trio._core._run
    before = (module._ALLOW_DETERMINISTIC_SCHEDULING, module._r.getstate())
    _order(1)
    assert (module._ALLOW_DETERMINISTIC_SCHEDULING, module._r.getstate()) == before


@pytest.mark.parametrize(
    ("name", "what"),
    [("_ALLOW_DETERMINISTIC_SCHEDULING", "switch"), ("_r", "random source")],
)
def test_a_trio_that_moved_its_random_source_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    monkeypatch.delattr(trio._core._run, name)
    said = f"cannot make Trio {trio.__version__} deterministic: .*{name} is no {what} any more"
    with pytest.raises(InternalError, match=said):
        _trio.self_test()


def test_a_trio_that_ignores_its_switch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(_trio, "_order", lambda _seed: [next(numbers)])
    with pytest.raises(InternalError, match="the same seed gave two orders"):
        _trio.self_test()
    monkeypatch.setattr(_trio, "_order", lambda _seed: [1, 2])
    with pytest.raises(InternalError, match="two seeds gave the same order"):
        _trio.self_test()
