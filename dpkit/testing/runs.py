"""One run that can be repeated: a virtual clock, a schedule that is given, an error that says how.

What the sweeps, the explorer and the world share. Knows nothing of what is injected, or where.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, TypeVar

import trio
import trio.testing

from dpkit.errors import DpkitError, InternalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

S = TypeVar("S")
T = TypeVar("T")

LIMIT = 3600.0
"""Virtual seconds after which a run counts as hung."""

_MESSAGE = 200
"""Characters of the error that are shown: the line shall stay one line on a screen."""


class RunFailed(DpkitError):  # noqa: N818 - reads as what happened
    """One run failed; `__cause__` is how, and the message is one line that replays it."""

    tool = "run"
    """What ran it, as the message says it."""

    def __init__(self, replay: str, error: BaseException) -> None:
        super().__init__(f"{self.tool} failed: {in_a_line(error)}; replay: {replay}")


def leaf_of(error: BaseException) -> BaseException:
    """The first error, without the groups that nurseries put around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def in_a_line(error: BaseException) -> str:
    """What went wrong, in one line of bounded length."""
    leaf = leaf_of(error)
    return " ".join(f"{type(leaf).__name__}: {leaf}".split())[:_MESSAGE]


def this_command(variable: str, case: object) -> str:
    """The command that runs what runs now, with `variable` telling it to run one case only."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    words = ["-m", "pytest", test] if test else sys.argv
    return f"{variable}={case} {shlex.join([sys.executable, *words])}"


def run_once(
    scenario: Callable[[S], Awaitable[T]],
    subject: S,
    *,
    scheduler: AbstractContextManager[None],
    limit: float = LIMIT,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> T:
    """Run a scenario on a virtual clock of its own.

    Args:
        scenario: What is to be run; it must depend on nothing but the schedule: no threads, no I/O,
            no real time.
        subject: What the scenario is given.
        scheduler: Fixes the schedule; see `dpkit._trio`.
        limit: Virtual seconds after which the run counts as hung.
        instruments: Trio's, to watch the run with.

    Error handling:
        InternalError: tasks are left. trio.TooSlowError: it hung. What the scenario raises comes
        out unchanged. Not for use inside a Trio run: it starts its own.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    with scheduler:
        return trio.run(
            _watched, scenario, subject, limit, clock=clock, instruments=list(instruments)
        )


async def _watched(scenario: Callable[[S], Awaitable[T]], subject: S, limit: float) -> T:
    tasks = trio.lowlevel.current_statistics().tasks_living
    with trio.fail_after(limit):
        result = await scenario(subject)
    if left := trio.lowlevel.current_statistics().tasks_living - tasks:
        raise InternalError(f"{left} tasks are left")
    return result
