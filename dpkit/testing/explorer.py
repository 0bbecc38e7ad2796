"""Run a small race under every schedule that there is.

On a virtual clock and without I/O, the only thing that is free is the order in which Trio runs the
tasks that are ready in one tick. So a race is a tree of choices, and this walks all of it::

    async def scenario(race):
        async with open_cluster(config) as cluster:
            async with cluster.client.generate("ab", max_tokens=2) as stream:
                with race.open():
                    ...  # who is first: the engine that finishes, or the reader that leaves?
        return cluster

    print(explore(scenario, check=check_idle).schedules)

Choices multiply: n ready tasks are n! orders. Open the race late, close it soon, and keep out
whoever does not race. Outside of it, tasks run by age. Knows nothing of clusters.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from dpkit._trio import oracle_scheduler
from dpkit.errors import InternalError
from dpkit.testing.runs import LIMIT, RunFailed, run_once, this_command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

T = TypeVar("T")

REPLAY = "DPKIT_SCHEDULE"
"""Environment variable that makes every exploration run one schedule only."""

MOST = 10_000
"""Schedules after which an exploration stops unless told otherwise: a minute or so."""


class Race:
    """Given to the scenario, which opens it where order matters; made by `explore`, one a run."""

    def __init__(self, schedule: Sequence[int]) -> None:
        self.taken: list[int] = []
        """The order chosen at each tick of the race, as its number among all orders."""
        self.widths: list[int] = []
        """How many orders there were to choose from."""
        self._schedule = schedule
        self._open = False
        self._last: int | None = None
        self._problem = ""

    @contextmanager
    def open(self, *, choices: int | None = None) -> Iterator[None]:
        """Explore all orders in which tasks can run while the block lasts.

        Args:
            choices: Explore this many ticks that leave a choice; later ones run by age. None: all.
        """
        self._last = None if choices is None else len(self.taken) + choices
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def arrange(self, tasks: list[Any]) -> list[Any]:
        """Put the tasks of one tick into the order that is this schedule's turn."""
        place = len(self.taken)
        if not self._open or len(tasks) < 2 or place == self._last:
            return tasks
        width = math.factorial(len(tasks))
        choice = self._schedule[place] if place < len(self._schedule) else 0
        if choice >= width:  # an error must not go through Trio's own loop: `verify` tells it
            self._problem = f"tick {place} of the race has {width} orders, and had more before"
            choice = 0
        self.taken.append(choice)
        self.widths.append(width)
        return _permuted(tasks, choice)

    def verify(self) -> None:
        """Check, after the run, that it made the choices it was made for.

        Raises:
            InternalError: it did not.
        """
        if len(self.taken) < len(self._schedule):
            self._problem = (
                f"the race had {len(self.taken)} ticks, and {len(self._schedule)} before"
            )
        if self._problem:
            raise InternalError(f"{self._problem}: the scenario is not deterministic")


def _permuted(items: list[Any], number: int) -> list[Any]:
    """The order of that number; 0 leaves the items as they are."""
    left, order = list(items), []
    while left:
        index, number = divmod(number, math.factorial(len(left) - 1))
        order.append(left.pop(index))
    return order


class ExplorationFailed(RunFailed):
    """One schedule failed; `__cause__` is how, and the message is one line that replays it."""

    tool = "exploration"

    def __init__(self, schedule: Sequence[int], error: BaseException) -> None:
        super().__init__(this_command(REPLAY, ".".join(map(str, schedule)) or "0"), error)
        self.schedule = tuple(schedule)


@frozen(kw_only=True)
class Exploration:
    """What an exploration did."""

    schedules: int
    """Schedules that were run."""
    complete: bool
    """Whether those were all there are."""


def explore(
    scenario: Callable[[Race], Awaitable[T]],
    *,
    check: Callable[[T], object],
    most: int = MOST,
    limit: float = LIMIT,
) -> Exploration:
    """Run a scenario once under each schedule of its race.

    Args:
        scenario: Opens the race that it is given and returns what `check` looks at. It must depend
            on nothing but the schedule.
        check: Called after every run, outside of Trio, when all tasks are gone.
        most: Schedules after which it stops; `Exploration.complete` tells.
        limit: Virtual seconds after which a run counts as hung.

    Error handling:
        ExplorationFailed: what the scenario or the check raised is its cause, and with the
        environment variable that its message gives, that schedule alone is run. Not for use inside
        a Trio run.
    """
    if replay := os.environ.get(REPLAY):
        _run(scenario, check, limit, [int(choice) for choice in replay.split(".")])
        return Exploration(schedules=1, complete=False)
    schedule: list[int] | None = []
    count = 0
    while schedule is not None and count < most:
        race = _run(scenario, check, limit, schedule)
        count += 1
        schedule = _next(race)
    return Exploration(schedules=count, complete=schedule is None)


def _next(race: Race) -> list[int] | None:
    """The schedule after this one, in the order of a walk through the tree; None: it is done."""
    for place in range(len(race.taken) - 1, -1, -1):
        if race.taken[place] + 1 < race.widths[place]:
            return [*race.taken[:place], race.taken[place] + 1]
    return None


def _run(
    scenario: Callable[[Race], Awaitable[T]],
    check: Callable[[T], object],
    limit: float,
    schedule: Sequence[int],
) -> Race:
    race = Race(schedule)
    try:
        result = run_once(scenario, race, scheduler=oracle_scheduler(race.arrange), limit=limit)
        race.verify()
        check(result)
    except Exception as error:
        raise ExplorationFailed(race.taken, error) from error
    return race
