"""Waking one task over and over: nothing rings twice, nothing is slept through, Trio permitting."""

from __future__ import annotations

import logging
import random
import re
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit.nursery import bell
from dpkit.nursery.bell import Bell, PlainBell, QuickBell, works

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.nursery.bell import AnyBell

both = pytest.mark.parametrize("make", [QuickBell, PlainBell])


def test_this_trio_takes_the_quick_form() -> None:
    assert Bell is QuickBell


@both
def test_both_forms_pass_the_rehearsal(make: Callable[[], AnyBell]) -> None:
    assert works(make)
    assert not any("rehearsal" in thread.name for thread in threading.enumerate())


class Broken(QuickBell):
    """As if a new Trio had its traps spring once only."""

    __slots__ = ("_sprung",)

    def lie_down(self) -> object:
        if hasattr(self, "_sprung"):
            return object()
        self._sprung = True
        return super().lie_down()


class Deaf(QuickBell):
    """As if nobody were woken."""

    def ring(self) -> None:
        """Do nothing."""


class Raising(QuickBell):
    """As if waking raised."""

    def ring(self) -> None:
        raise RuntimeError("no")


class Stubborn(PlainBell):
    """As if a cancellation were taken for a ring."""

    async def wait(self) -> None:
        with suppress(trio.Cancelled):
            await super().wait()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Broken, "hung|Error"),
        (Deaf, "TooSlowError"),
        (Raising, "no"),
        (Stubborn, "a cancellation did not wake the sleeper"),
    ],
)
def test_a_form_that_does_not_work_is_found_out_and_said(
    make: Callable[[], AnyBell],
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bell, "PATIENCE_S", 0.2)
    with caplog.at_level(logging.WARNING):
        assert not works(make)
    assert re.search(f"wakes readers at full price: .*({words})", caplog.text)


@both
async def test_a_wait_is_one_checkpoint_and_ends_with_a_ring(make: Callable[[], AnyBell]) -> None:
    rung = make()
    woken: list[int] = []

    async def sleep() -> None:
        for number in range(5):
            with trio.testing.assert_checkpoints():
                await rung.wait()
            woken.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        for number in range(5):
            await trio.testing.wait_all_tasks_blocked()
            assert woken == list(range(number))
            rung.ring()
            rung.ring()  # nobody hears it
    rung.ring()


@both
async def test_a_bell_wakes_nobody_who_sleeps_elsewhere_by_now(make: Callable[[], AnyBell]) -> None:
    left, right, woken = make(), make(), []

    async def sleep() -> None:
        with trio.move_on_after(0):
            await left.wait()
        await right.wait()
        woken.append("right")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        await trio.testing.wait_all_tasks_blocked()
        left.ring()
        await trio.testing.wait_all_tasks_blocked()
        assert not woken
        right.ring()
        await trio.testing.wait_all_tasks_blocked()
        assert woken
        left.ring()
        right.ring()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@both
async def test_a_cancelled_sleeper_leaves_the_bell_to_the_next(make: Callable[[], AnyBell]) -> None:
    rung = make()
    with trio.move_on_after(0) as scope:
        await rung.wait()
    assert scope.cancelled_caught
    rung.ring()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_sleep, rung)
        await trio.testing.wait_all_tasks_blocked()
        rung.ring()


@both
async def test_a_ring_and_a_cancellation_in_one_tick_wake_once(make: Callable[[], AnyBell]) -> None:
    for order in ("ring first", "cancel first"):
        rung = make()
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(_act, rung, scope, order)
                await rung.wait()
            assert scope.cancelled_caught == (order == "cancel first")


async def _sleep(rung: AnyBell) -> None:
    await rung.wait()


async def _act(rung: AnyBell, scope: trio.CancelScope, order: str) -> None:
    await trio.testing.wait_all_tasks_blocked()
    if order == "ring first":
        rung.ring()
        scope.cancel()
    else:
        scope.cancel()
        rung.ring()


@both
@pytest.mark.parametrize("seed", range(3))
async def test_nobody_sleeps_through_a_thousand_random_cancellations(
    autojump_clock: object, make: Callable[[], AnyBell], seed: int
) -> None:
    rng = random.Random(seed)
    rung, rings, woken, cancelled = make(), 0, 0, 0

    async def ring() -> None:
        nonlocal rings
        for _ in range(2000):
            rings += 1
            rung.ring()
            await trio.sleep(rng.choice((0, 0, 1)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring)
        while rings < 2000:
            with trio.move_on_after(rng.choice((0, 0, 0.5, 1, 2))) as scope:
                await rung.wait()
                woken += 1
            cancelled += scope.cancelled_caught
    assert cancelled > 300
    assert woken > 300


@both
def test_ctrl_c_wakes_a_sleeper(make: Callable[[], AnyBell]) -> None:
    async def main() -> None:
        rung: Any = make()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_interrupt)
            await rung.wait()

        raise AssertionError("nobody rang")

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - a group, as of any nursery
        trio.run(main)
    assert isinstance(caught.value, BaseExceptionGroup)
    assert caught.value.subgroup(KeyboardInterrupt) is not None
    assert caught.value.split(KeyboardInterrupt)[1] is None


@trio.lowlevel.enable_ki_protection  # so that Trio wakes the main task instead
async def _interrupt() -> None:
    await trio.testing.wait_all_tasks_blocked()
    signal.raise_signal(signal.SIGINT)
