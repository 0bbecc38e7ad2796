"""Restarts by the numbers: exact times on a virtual clock, and giving up when it is too much."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.names import Strategy
from dpkit.nursery.supervisor import LAST_WORDS_S, Observer, Restarts, RestartWindow, supervise

if TYPE_CHECKING:
    from collections.abc import Collection


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


class Rank:
    """Fails at given times of given lives, by itself or since another did; else lives for ever."""

    def __init__(self, **spans: float) -> None:
        self.spans = {int(number[1:]): span for number, span in spans.items()}
        self.lives: list[int] = []

    async def live(self, number: int) -> None:
        self.lives.append(number)
        await trio.sleep(self.spans.get(number, 1000))
        raise RuntimeError(f"life {number}")


class Judge(Recorder):
    """Says who failed in consequence, and how few are too few."""

    def __init__(self, *consequences: tuple[str, int], least: int = 1) -> None:
        super().__init__()
        self.consequences = consequences
        self.least = least

    def is_consequence(self, name: str) -> bool:
        return (name, self.failures[-1][2]) in self.consequences

    def goes_on(self, names: Collection[str]) -> bool:
        return len(names) >= self.least


async def all_but_one(judge: Judge, *ranks: Rank, until: float = 100, **more: float) -> None:
    policy = Restarts(strategy=Strategy.ALL_BUT_ONE, intensity=9, backoff=0.1, **more)
    with trio.move_on_at(until):
        children = {"abc"[index]: rank.live for index, rank in enumerate(ranks)}
        await supervise(children, policy, observer=judge)


async def test_all_but_one_go_on_together_and_that_one_is_given_up(autojump_clock) -> None:
    judge, a, b, c = Judge(), Rank(), Rank(_0=5), Rank()
    await all_but_one(judge, a, b, c)
    assert (a.lives, b.lives, c.lives) == ([0, 1], [0], [0, 1])
    assert [(at, name, str(error)) for at, name, error in judge.given_up] == [(5, "b", "life 0")]


async def test_who_failed_in_consequence_goes_on(autojump_clock) -> None:
    judge, a, b, c = Judge(("a", 0)), Rank(_0=5), Rank(_0=5.5), Rank()
    await all_but_one(judge, a, b, c)
    assert (a.lives, b.lives, c.lives) == ([0, 1], [0], [0, 1])


async def test_if_all_failed_in_consequence_the_silent_one_began_it(autojump_clock) -> None:
    judge, a, b, c = Judge(("a", 0), ("c", 0)), Rank(_0=5), Rank(), Rank(_0=5)
    await all_but_one(judge, a, b, c)
    assert (a.lives, b.lives, c.lives) == ([0, 1], [0], [0, 1])
    [(at, name, _)] = judge.given_up
    assert (at, name) == (5 + LAST_WORDS_S, "b")


async def test_if_all_failed_in_consequence_and_nobody_is_silent_all_go_on(autojump_clock) -> None:
    judge, a, b = Judge(("a", 0), ("b", 0)), Rank(_0=5), Rank(_0=5)
    await all_but_one(judge, a, b)
    assert (a.lives, b.lives) == ([0, 1], [0, 1])
    assert judge.given_up == []


async def test_who_was_lost_a_period_ago_tries_again_with_the_next_loss(autojump_clock) -> None:
    a, b, c = Rank(), Rank(_0=5), Rank(_1=10)
    await all_but_one(Judge(), a, b, c, period=8.0)
    assert (a.lives, b.lives, c.lives) == ([0, 1, 2], [0, 2], [0, 1])


async def test_if_nobody_would_be_left_all_try_again(autojump_clock) -> None:
    a, b = Rank(_0=5), Rank(_1=5)
    await all_but_one(Judge(), a, b)
    assert (a.lives, b.lives) == ([0, 2], [0, 1, 2])


async def test_too_few_are_given_up_as_well(autojump_clock) -> None:
    judge, a, b = Judge(least=2), Rank(_0=5), Rank()
    await all_but_one(judge, a, b)
    assert trio.current_time() < 6
    assert [(name, str(error)) for _, name, error in judge.given_up] == [
        ("a", "life 0"),
        ("b", "life 0"),
    ]
