"""The few Trio-private names that determinism needs; nothing else in dpkit may touch Trio's inside.

Trio runs the tasks that are ready in one tick in an order it draws itself, so that nobody comes to
rely on one. A sweep needs the same draw twice, and an explorer each draw once. Trio has a switch
for that (it is there for Hypothesis): sort the ready tasks by age, then shuffle them with its own
random source. Both are private, so they may move; whoever imports `dpkit.testing.sweep` learns it
at once, by `self_test`.
Knows nothing of clocks: pair it with `trio.testing.MockClock`, or real time decides again.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio

import dpkit.nursery.bell  # noqa: F401 - it tries Trio out, which must not be in a seeded run
from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence

    Arrange = Callable[[list[Any]], list[Any]]

_SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"
_SOURCE = "_r"


def _scheduler() -> Any:
    """The module that holds both names, if they are what they were."""
    module = getattr(getattr(trio, "_core", None), "_run", None)
    if not isinstance(getattr(module, _SWITCH, None), bool):
        raise _moved(f"trio._core._run.{_SWITCH} is no switch any more")
    if not isinstance(getattr(module, _SOURCE, None), random.Random):
        raise _moved(f"trio._core._run.{_SOURCE} is no random source any more")
    return module


def _moved(what: str) -> InternalError:
    return InternalError(
        f"cannot make Trio {trio.__version__} deterministic: {what}; "
        "dpkit/_trio.py was written for Trio 0.30 to 0.35: try one of those, and report this"
    )


@contextmanager
def seeded_scheduler(seed: int) -> Iterator[None]:
    """Make the order in which Trio runs ready tasks a function of `seed` while the block lasts.

    Args:
        seed: Same seed, same order, in any process.

    Resource handling:
        Put it around `trio.run`, not inside: the setting is the interpreter's, not the run's. It is
        put back as it was afterwards.

    Error handling:
        InternalError: this version of Trio keeps its random source elsewhere.
    """
    module = _scheduler()
    source, switch = getattr(module, _SOURCE), getattr(module, _SWITCH)
    state = source.getstate()
    source.seed(seed)
    setattr(module, _SWITCH, True)
    try:
        yield
    finally:
        setattr(module, _SWITCH, switch)
        source.setstate(state)


class _Oracle(random.Random):
    """A random source whose only shuffle is the oracle's; all else is drawn as ever."""

    def __init__(self, arrange: Arrange) -> None:
        super().__init__(0)
        self._arrange = arrange

    def shuffle(self, x: MutableSequence[Any]) -> None:
        x[:] = reversed(self._arrange(list(x)))  # Trio takes the next task from the end


@contextmanager
def oracle_scheduler(arrange: Arrange) -> Iterator[None]:
    """Let `arrange` decide in which order Trio runs the tasks that are ready in one tick.

    Args:
        arrange: Given those tasks, the oldest first, returns them in the order in which they shall
            run. Asked at every tick.

    Resource and error handling are those of `seeded_scheduler`.
    """
    module = _scheduler()
    source, switch = getattr(module, _SOURCE), getattr(module, _SWITCH)
    setattr(module, _SOURCE, _Oracle(arrange))
    setattr(module, _SWITCH, True)
    try:
        yield
    finally:
        setattr(module, _SWITCH, switch)
        setattr(module, _SOURCE, source)


def self_test() -> None:
    """Check that the names are there and, outside of a Trio run, that they still do their work.

    Raises:
        InternalError: they do not; the message names the version of Trio.
    """
    _scheduler()
    if trio.lowlevel.in_trio_run():
        return
    orders = [_order(seed) for seed in (1, 2, 1, 2)]
    if orders[:2] != orders[2:]:
        raise _moved("the same seed gave two orders")
    if orders[0] == orders[1]:
        raise _moved("two seeds gave the same order of sixteen tasks")
    with oracle_scheduler(lambda tasks: tasks):
        if _first_steps() != list(range(16)):
            raise _moved("the tasks did not run in the order that was asked for")


def _order(seed: int) -> list[int]:
    with seeded_scheduler(seed):
        return _first_steps()


def _first_steps() -> list[int]:
    """The order in which sixteen tasks take their first step."""
    order: list[int] = []

    async def note(number: int) -> None:
        order.append(number)
        await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(note, number)

    trio.run(main)
    return order
