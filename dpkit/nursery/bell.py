"""Where one task sleeps until it is rung, over and over: at half the price of Trio's own lots.

A reader of a paced stream is woken for every token, so with a thousand of them waking is most of
what a client does. Trio's public traps allow a cheaper form: `wait_task_rescheduled` yields a
message to the loop; all may yield the same message, again and again, and one shared result may wake
them all. Trio promises neither, so each process tries it once, in a run of its own; where it fails,
`Bell` is the plain form. Knows nothing of what the sleeper waits for.
"""

from __future__ import annotations

import logging
import threading
import types
from typing import TYPE_CHECKING, Any, Protocol

import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

_log = logging.getLogger(__name__)

RUNG: outcome.Outcome[None] = outcome.Value(None)
"""Shared by all wakings, which must never unwrap it: an Outcome can be unwrapped once."""

PATIENCE_S = 5.0
"""How long a try may take, on a machine that has other things to do; it takes a few ms."""


def _message_of(sleep: Coroutine[Any, Any, Any]) -> object:
    """What a sleep tells Trio's loop; nobody sleeps."""
    message: object = sleep.send(None)
    sleep.close()
    return message


def _let_go(_raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
    """Whoever sleeps may be woken by a cancellation."""
    return trio.lowlevel.Abort.SUCCEEDED


_TRAP = _message_of(trio.lowlevel.wait_task_rescheduled(_let_go))  # noqa: ASYNC105 - see above


class AnyBell(Protocol):
    """What both forms of a bell can do; for one sleeper at a time, on Trio's thread."""

    def wait(self) -> Awaitable[None]:
        """Sleep until rung, exactly one checkpoint. What rings while nobody sleeps is not heard."""

    def ring(self) -> None:
        """Wake the sleeper, if there is one: nobody is woken twice by one wait."""


class QuickBell:
    """The form in which all go to sleep by the same message."""

    __slots__ = ("_sleeper",)

    def __init__(self) -> None:
        self._sleeper: trio.lowlevel.Task | None = None

    @types.coroutine
    def wait(self) -> Generator[Any, Any, None]:
        """As `AnyBell` says."""
        answer = yield self.lie_down()
        if answer is not RUNG:
            answer.unwrap()  # a cancellation, or Ctrl-C

    def lie_down(self) -> object:
        """What `wait` yields to Trio, for whoever is a generator already and would save another."""
        sleeper = self._sleeper = trio.lowlevel.current_task()
        sleeper.custom_sleep_data = self
        return _TRAP

    def ring(self) -> None:
        """As `AnyBell` says."""
        sleeper = self._sleeper
        # Trio forgets that data when it wakes a task, as it does by itself to cancel it.
        if sleeper is not None and sleeper.custom_sleep_data is self:
            self._sleeper = None
            trio.lowlevel.reschedule(sleeper, RUNG)


class PlainBell:
    """The form that asks nothing special of Trio."""

    __slots__ = ("_lot",)

    def __init__(self) -> None:
        self._lot = trio.lowlevel.ParkingLot()

    async def wait(self) -> None:
        """As `AnyBell` says."""
        await self._lot.park()

    def ring(self) -> None:
        """As `AnyBell` says."""
        self._lot.unpark()


async def _rehearse(make: Callable[[], AnyBell]) -> None:
    """Everything that a reader may do with a bell, several times over. Raises if it goes wrong."""
    bell, scopes = make(), [trio.CancelScope() for _ in range(6)]

    async def sleep() -> None:
        scopes[0].cancel()  # too late, now and then: Trio wakes the sleeper before it sleeps
        for scope in scopes:
            await bell.wait()
            with scope:
                await bell.wait()
            if not scope.cancelled_caught:
                raise RuntimeError("a cancellation did not wake the sleeper")

    with trio.fail_after(PATIENCE_S / 2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep)
            for scope in scopes:
                await _pass()
                bell.ring()
                bell.ring()  # nobody is there to hear it
                await _pass()
                scope.cancel()


async def _pass() -> None:
    for _ in range(4):  # whoever can run has run by then, in whichever order
        await trio.lowlevel.checkpoint()


def works(make: Callable[[], AnyBell]) -> bool:
    """Whether this Trio takes such bells; tried in a thread, as Trio may be running in this one."""
    failures: list[BaseException | None] = []

    def rehearse() -> None:
        try:
            trio.run(_rehearse, make)
        except BaseException as error:  # noqa: BLE001 - whatever it is: it does not work
            failures.append(error)
        else:
            failures.append(None)

    thread = threading.Thread(target=rehearse, name="dpkit bell rehearsal", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if failures == [None]:
        return True
    _log.warning("trio %s wakes readers at full price: %s", trio.__version__, failures or "hung")
    return False


Bell: type[QuickBell | PlainBell] = QuickBell if works(QuickBell) else PlainBell
"""The best form that works."""
