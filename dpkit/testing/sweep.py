"""Cancel a task at every step of its life, and check each time that nothing is left behind.

A scenario marks one task; it runs once to count that task's steps, then once per step and mode, on
a virtual clock and under a seeded scheduler, so that a failure can be replayed exactly::

    async def scenario(mark):
        async with open_cluster(config) as cluster:
            with mark.target():
                await cluster.client.complete("hello")
        return cluster

    sweep(scenario, seeds=range(20), check=check_idle)

Knows nothing of clusters: it sweeps any Trio program. Injects through Trio's public Instrument API
(`dpkit.testing.mark`); the seeded scheduler needs `dpkit._trio`.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, TypeVar

import trio
import trio.testing
from attrs import frozen

from dpkit._trio import seeded_scheduler, self_test
from dpkit.errors import DpkitError, InternalError
from dpkit.testing.mark import Case, Mark, Mode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

T = TypeVar("T")

REPLAY = "DPKIT_SWEEP"
"""Environment variable that makes every sweep run one case only: the one that a failure named."""

self_test()


class SweepFailed(DpkitError):  # noqa: N818 - reads as what happened
    """One case failed; `__cause__` is how, and the message is one line that replays it."""

    def __init__(self, case: Case, error: BaseException) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        command = shlex.join([sys.executable, *(["-m", "pytest", test] if test else sys.argv)])
        leaf = error
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        what = " ".join(f"{type(leaf).__name__}: {leaf}".split())
        super().__init__(f"sweep failed: {what[:200]}; replay: {REPLAY}={case} {command}")
        self.case = case


@frozen(kw_only=True)
class SweepStatistics:
    """What a sweep did."""

    runs: int
    """Cases that were run, those that only count included."""
    steps: int
    """Most steps that the target took under any seed."""


def sweep(
    scenario: Callable[[Mark], Awaitable[T]],
    *,
    seeds: Iterable[int],
    check: Callable[[T], object],
    limit: float = 3600.0,
) -> SweepStatistics:
    """Run a scenario once per seed, step and mode, cancelling its target there.

    Args:
        scenario: Marks its target with ``with mark.target():`` and returns what `check` looks at.
            It must depend on nothing but the schedule: no threads, no I/O, no real time.
        seeds: One schedule each.
        check: Called after every run, outside of Trio, when all tasks are gone.
        limit: Virtual seconds after which a run counts as hung.

    Error handling:
        SweepFailed: what the scenario or the check raised is its cause. With the environment
        variable that its message gives, `sweep` runs that case alone. Not for use inside a Trio
        run: it starts its own.
    """
    if replay := os.environ.get(REPLAY):
        return SweepStatistics(runs=1, steps=_run(scenario, check, limit, Case.parse(replay)).steps)
    runs = most = 0
    for seed in seeds:
        steps = _run(scenario, check, limit, Case(seed, 0, Mode.NEVER)).steps
        most = max(most, steps)
        cases = list(_cases(seed, steps))
        for case in cases:
            _run(scenario, check, limit, case)
        runs += 1 + len(cases)
    return SweepStatistics(runs=runs, steps=most)


def _cases(seed: int, steps: int) -> Iterator[Case]:
    for step in range(steps + 1):
        yield Case(seed, step, Mode.BEFORE)
        if step < steps:  # in its last step the task leaves the block
            yield Case(seed, step, Mode.AFTER)


def _run(
    scenario: Callable[[Mark], Awaitable[T]],
    check: Callable[[T], object],
    limit: float,
    case: Case,
) -> Mark:
    mark = Mark(case)
    clock = trio.testing.MockClock(autojump_threshold=0)
    try:
        with seeded_scheduler(case.seed):
            result = trio.run(_main, scenario, mark, limit, clock=clock, instruments=[mark])
        check(result)
    except Exception as error:
        raise SweepFailed(case, error) from error
    return mark


async def _main(scenario: Callable[[Mark], Awaitable[T]], mark: Mark, limit: float) -> T:
    tasks = trio.lowlevel.current_statistics().tasks_living
    with trio.fail_after(limit):
        result = await scenario(mark)
    if left := trio.lowlevel.current_statistics().tasks_living - tasks:
        raise InternalError(f"{left} tasks are left")
    if not mark.reached:
        raise InternalError(
            "the target never came to this step: the scenario marks none, or is not deterministic"
        )
    return result
