"""Restarts by the numbers: exact times on a virtual clock, and giving up when it is too much."""

from __future__ import annotations

import random

import pytest
import trio

from dpkit.names import Strategy
from dpkit.nursery.supervisor import Observer, Restarts, RestartWindow, supervise


class Recorder(Observer):
    """Remembers what a supervisor tells."""

    def __init__(self) -> None:
        self.failures: list[tuple[float, str, int]] = []
        self.given_up: list[tuple[float, str, Exception]] = []

    def failed(self, name: str, life: int, error: Exception) -> None:
        self.failures.append((trio.current_time(), name, life))
        assert str(error) == f"life {life}"

    def gave_up(self, name: str, error: Exception) -> None:
        self.given_up.append((trio.current_time(), name, error))


class Child:
    """Lives for given times, failing each time; a life beyond them returns."""

    def __init__(self, *spans: float) -> None:
        self.spans = spans
        self.births: list[tuple[float, int]] = []

    async def live(self, number: int) -> None:
        self.births.append((trio.current_time(), number))
        if number < len(self.spans):
            await trio.sleep(self.spans[number])
            raise RuntimeError(f"life {number}")


async def test_a_failed_child_is_restarted_with_doubling_waits(autojump_clock) -> None:
    child, recorder = Child(0, 0, 0), Recorder()
    policy = Restarts(intensity=3, period=60, backoff=0.1, backoff_max=10)
    await supervise({"a": child.live}, policy, observer=recorder)
    moments, numbers = zip(*child.births, strict=True)
    assert moments == pytest.approx((0.0, 0.1, 0.3, 0.7))
    assert numbers == (0, 1, 2, 3)
    assert recorder.given_up == []


async def test_one_restart_too_many_within_the_period_is_given_up(autojump_clock) -> None:
    child, recorder = Child(0, 0, 0, 0), Recorder()
    await supervise({"a": child.live}, Restarts(intensity=3), observer=recorder)
    [(at, name, error)] = recorder.given_up
    assert at == pytest.approx(0.7)
    assert name == "a"
    assert str(error) == "life 0", "the first error of the period is the cause"
    assert [life for _, _, life in recorder.failures] == [0, 1, 2, 3]


async def test_failures_further_apart_than_the_period_are_put_up_with_for_ever(
    autojump_clock,
) -> None:
    child, recorder = Child(*[61.0] * 20), Recorder()
    policy = Restarts(intensity=1, period=60, backoff=0.5)
    await supervise({"a": child.live}, policy, observer=recorder)
    assert len(child.births) == 21
    assert recorder.given_up == []
    gaps = {
        round(after - before, 6)
        for (before, _), (after, _) in zip(child.births, child.births[1:], strict=False)
    }
    assert gaps == {61.5}, "an old crash does not lengthen the wait"


async def test_the_wait_has_a_bound(autojump_clock) -> None:
    child = Child(*[0.0] * 9)
    await supervise({"a": child.live}, Restarts(intensity=9, backoff=1, backoff_max=4))
    gaps = [b - a for (a, _), (b, _) in zip(child.births, child.births[1:], strict=False)]
    assert gaps == pytest.approx([1, 2, 4, 4, 4, 4, 4, 4, 4])


def test_jitter_spreads_the_waits_and_the_seed_repeats_them() -> None:
    def waits(seed: int) -> list[float | None]:
        policy = Restarts(intensity=5, backoff=1, backoff_max=1, jitter=0.1)
        window = RestartWindow(policy, random.Random(seed))
        return [window.delay(0.0, RuntimeError()) for _ in range(5)]

    first = waits(1)
    assert first == waits(1) != waits(2)
    assert len(set(first)) == 5
    assert all(wait is not None and 0.9 <= wait <= 1.1 for wait in first)


async def test_one_for_one_leaves_the_others_alone(autojump_clock) -> None:
    failing, steady = Child(1, 1), Child()
    ended = []

    async def live(number: int) -> None:
        await steady.live(number)
        await trio.sleep(10)
        ended.append(trio.current_time())

    await supervise({"a": failing.live, "b": live}, Restarts())
    assert len(failing.births) == 3
    assert steady.births == [(0.0, 0)]
    assert ended == [10.0]


async def test_one_for_all_begins_the_next_life_of_all_together(autojump_clock) -> None:
    births: list[tuple[float, str, int]] = []
    cancelled = []

    async def failing(number: int) -> None:
        births.append((trio.current_time(), "a", number))
        await trio.sleep(1)
        if number < 2:
            raise RuntimeError(f"life {number}")

    async def steady(number: int) -> None:
        births.append((trio.current_time(), "b", number))
        try:
            await trio.sleep(3)
        except trio.Cancelled:
            cancelled.append((trio.current_time(), number))
            raise

    policy = Restarts(strategy=Strategy.ONE_FOR_ALL, backoff=0.1)
    await supervise({"a": failing, "b": steady}, policy)
    assert sorted(births) == [
        (0.0, "a", 0),
        (0.0, "b", 0),
        (pytest.approx(1.1), "a", 1),
        (pytest.approx(1.1), "b", 1),
        (pytest.approx(2.3), "a", 2),
        (pytest.approx(2.3), "b", 2),
    ]
    assert cancelled == [(1.0, 0), (pytest.approx(2.1), 1)]


async def test_one_for_all_gives_all_up_at_once(autojump_clock) -> None:
    child, recorder = Child(0, 0), Recorder()
    policy = Restarts(strategy=Strategy.ONE_FOR_ALL, intensity=1)
    await supervise({"a": child.live, "b": Child().live}, policy, observer=recorder)
    assert [name for _, name, _ in recorder.given_up] == ["a", "b"]
    assert {str(error) for _, _, error in recorder.given_up} == {"life 0"}


async def test_cancelling_a_supervisor_ends_all_lives(autojump_clock) -> None:
    living = 0

    async def live(_: int) -> None:
        nonlocal living
        living += 1
        try:
            await trio.sleep_forever()
        finally:
            living -= 1

    for strategy in Strategy:
        with trio.move_on_after(1):
            await supervise({"a": live, "b": live}, Restarts(strategy=strategy))
        assert living == 0
