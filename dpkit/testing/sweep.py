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
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from dpkit._trio import seeded_scheduler, self_test
from dpkit.testing.mark import Case, Mark, Mode
from dpkit.testing.runs import LIMIT, RunFailed, run_once, this_command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

T = TypeVar("T")

REPLAY = "DPKIT_SWEEP"
"""Environment variable that makes every sweep run one case only: the one that a failure named."""

self_test()


class SweepFailed(RunFailed):
    """One case failed; `__cause__` is how, and the message is one line that replays it."""

    tool = "sweep"

    def __init__(self, case: Case, error: BaseException) -> None:
        super().__init__(this_command(REPLAY, case), error)
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
    limit: float = LIMIT,
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
        cases = list(cases_of(seed, steps))
        for case in cases:
            _run(scenario, check, limit, case)
        runs += 1 + len(cases)
    return SweepStatistics(runs=runs, steps=most)


def cases_of(seed: int, steps: int) -> Iterator[Case]:
    """Every place at which a target of that many steps can be cancelled."""
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
    try:
        result = run_once(
            scenario, mark, scheduler=seeded_scheduler(case.seed), limit=limit, instruments=[mark]
        )
        mark.verify()
        check(result)
    except Exception as error:
        raise SweepFailed(case, error) from error
    return mark
