"""Restart what fails, within reason: Erlang's supervisor, for Trio tasks.

A child is a function that lives: it is called with the number of its life (0, 1, …), returns when
it was asked to end, and raises when it fails. Knows nothing of engines, and may be used by any Trio
program::

    await supervise({"reader": reader, "writer": writer}, Restarts(intensity=3, period=60))

The words and the arithmetic are OTP's: more than `intensity` restarts within `period` seconds and
the supervisor gives up. Its warnings hold as well: an intensity of 1 forbids even one burst, a long
period turns old crashes into giving up, and nested supervisors multiply, so have one level.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio
from attrs import define, field, frozen

from dpkit.names import Strategy

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Collection, Mapping

    Life = Callable[[int], Awaitable[None]]

LAST_WORDS_S = 2.0
"""How long children are heard that failed in consequence: whoever began it says so meanwhile."""


@frozen(kw_only=True)
class Restarts:
    """How often and how fast a child is restarted. Times are seconds."""

    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: int = 3
    """Restarts within `period` that are still put up with; one more and it is given up."""
    period: float = 60.0
    backoff: float = 0.1
    """Wait before the first restart; each further one within `period` waits twice as long."""
    backoff_max: float = 10.0
    jitter: float = 0.1
    """Share of the wait by which it is longer or shorter, at random: children that fail together
    should not come back together."""


@define(eq=False)
class RestartWindow:
    """The arithmetic of one restart history; knows no clock but what it is told."""

    policy: Restarts
    rng: random.Random | None = None
    _failures: deque[tuple[float, Exception]] = field(factory=deque, init=False)

    @property
    def first_error(self) -> Exception:
        """The oldest failure within the period: the later ones are most often its consequences."""
        return self._failures[0][1]

    def delay(self, now: float, error: Exception) -> float | None:
        """Seconds to wait before the restart that is due after a failure; None: give up."""
        policy, recent = self.policy, self._failures
        while recent and recent[0][0] <= now - policy.period:
            recent.popleft()
        restarts = len(recent)
        recent.append((now, error))
        if restarts >= policy.intensity:
            return None
        wait = min(policy.backoff_max, policy.backoff * 2.0 ** min(restarts, 1000))
        if self.rng is not None:
            wait *= 1 + policy.jitter * self.rng.uniform(-1, 1)
        return wait


class Observer:
    """What a supervisor tells whoever wants to know; every call is synchronous."""

    def failed(self, name: str, life: int, error: Exception) -> None:
        """A life of a child ended by an error."""

    def gave_up(self, name: str, error: Exception) -> None:
        """A child will not be restarted any more; `error` is the first one of this period."""

    # With `ALL_BUT_ONE`:

    def is_consequence(self, name: str) -> bool:  # noqa: ARG002 - a hook
        """Whether a child that has just failed did so only because another had."""
        return False

    def goes_on(self, names: Collection[str]) -> bool:  # noqa: ARG002 - a hook
        """These are about to begin their next life together, and no others; False: too few."""
        return True


async def supervise(
    children: Mapping[str, Life],
    policy: Restarts,
    *,
    rng: random.Random | None = None,
    observer: Observer | None = None,
) -> None:
    """Run children, restarting those that fail, until all have returned or were given up.

    Args:
        children: By name; each is called with 0, then 1, and so on.
        policy: How often, and who with whom.
        rng: For the jitter; None: no jitter.
        observer: Hears of failures and of giving up.

    Resource handling:
        Every life runs in a nursery in here; cancel this function and all of them end.

    Error handling:
        A child's exception is the observer's to keep; it does not come out of here. With
        `ONE_FOR_ALL` the other children are cancelled, awaited, and begin their next life together.
        With `ALL_BUT_ONE` they do so without those that failed within `period`, who are given up
        for as long; who failed in consequence of that is not among these.
    """
    observer = observer or Observer()
    if policy.strategy is not Strategy.ONE_FOR_ONE:
        goes_without = policy.strategy is Strategy.ALL_BUT_ONE
        together = _all_but_the_lost if goes_without else _all_together
        await together(children, RestartWindow(policy, rng), observer)
        return
    async with trio.open_nursery() as nursery:
        for name, life in children.items():
            window = RestartWindow(policy, rng)
            nursery.start_soon(_alone, name, life, window, observer, name=f"supervisor {name}")


# Ctrl-C is the main task's, never a child's: Trio's tasks do not inherit that from each other.
@trio.lowlevel.enable_ki_protection
async def _alone(name: str, life: Life, window: RestartWindow, observer: Observer) -> None:
    number = 0
    while (error := await _live(name, life, number, observer)) is not None:
        delay = window.delay(trio.current_time(), error)
        if delay is None:
            observer.gave_up(name, window.first_error)
            return
        await trio.sleep(delay)
        number += 1


async def _live(name: str, life: Life, number: int, observer: Observer) -> Exception | None:
    """One life of one child: the error that ended it, if one did."""
    try:
        await life(number)
    except Exception as error:  # noqa: BLE001 - what may be restarted is judged by the caller
        observer.failed(name, number, error)
        return error
    return None


async def _all_together(
    children: Mapping[str, Life], window: RestartWindow, observer: Observer
) -> None:
    number = 0
    while (error := await _live_together(children, number, observer)) is not None:
        delay = window.delay(trio.current_time(), error)
        if delay is None:
            for name in children:
                observer.gave_up(name, window.first_error)
            return
        await trio.sleep(delay)
        number += 1


async def _all_but_the_lost(
    children: Mapping[str, Life], window: RestartWindow, observer: Observer
) -> None:
    number, lost_at = 0, dict[str, float]()
    while True:
        taking_part = {name: life for name, life in children.items() if name not in lost_at}
        if not observer.goes_on(taking_part):
            _give_up(taking_part, window, observer)
            return
        failures = await _live_until_a_loss(taking_part, number, observer)
        if not failures:
            return
        now = trio.current_time()
        delay = window.delay(now, next(iter(failures.values())))
        if delay is None:
            _give_up(taking_part, window, observer)
            return
        lost = _blame(taking_part, failures, observer)
        lost_at = {name: at for name, at in lost_at.items() if at > now - window.policy.period}
        lost_at |= dict.fromkeys(lost, now)
        for name, error in lost.items():
            observer.gave_up(name, error)
        if len(lost_at) == len(children):  # nobody would be left
            lost_at.clear()
        await trio.sleep(delay)
        number += 1


def _give_up(names: Collection[str], window: RestartWindow, observer: Observer) -> None:
    for name in names:
        observer.gave_up(name, window.first_error)


def _blame(
    names: Collection[str], failures: Mapping[str, Exception], observer: Observer
) -> dict[str, Exception]:
    """Who began it, and by which error: if all who failed did so in consequence, who is silent."""
    began = {name: error for name, error in failures.items() if not observer.is_consequence(name)}
    return began or dict.fromkeys(set(names) - failures.keys(), next(iter(failures.values())))


async def _live_until_a_loss(
    children: Mapping[str, Life], number: int, observer: Observer
) -> dict[str, Exception]:
    """One life of all: errors of those that failed, until it was known who began it."""
    failures: dict[str, Exception] = {}
    async with trio.open_nursery() as nursery:

        @trio.lowlevel.enable_ki_protection
        async def live(name: str, life: Life) -> None:
            error = await _live(name, life, number, observer)
            if error is None or nursery.cancel_scope.cancel_called:
                return
            failures[name] = error
            if observer.is_consequence(name):
                nursery.cancel_scope.deadline = min(
                    nursery.cancel_scope.deadline, trio.current_time() + LAST_WORDS_S
                )
            else:
                nursery.cancel_scope.cancel()

        for name, life in children.items():
            nursery.start_soon(live, name, life, name=name)
    return failures


async def _live_together(
    children: Mapping[str, Life], number: int, observer: Observer
) -> Exception | None:
    first: Exception | None = None
    async with trio.open_nursery() as nursery:

        @trio.lowlevel.enable_ki_protection
        async def live(name: str, life: Life) -> None:
            nonlocal first
            error = await _live(name, life, number, observer)
            if error is not None:
                first = first or error
                nursery.cancel_scope.cancel()

        for name, life in children.items():
            nursery.start_soon(live, name, life, name=name)
    return first
