"""Fail at every call of a kind: the k-th model step, the k-th allocation, the k-th write.

The sweep's other half. A scenario lets its calls pass through named points; it runs once to count
them, and then once for each, in which that call raises `Injected`::

    async def scenario(points):
        with named(points.model(EchoModel())) as model:
            async with open_cluster(config_of(model)) as cluster:
                await ask_some_and_expect_losses(cluster)
        return cluster

    fail_sweep(scenario, seeds=range(20), check=check_idle)

`pair_sweep` fails at one place and cancels at another: every pair, or a sample of them. Knows
nothing of clusters: any call of any Trio program can be a point (`points.wrap`).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from dpkit._trio import seeded_scheduler
from dpkit.testing.points import STEP, FailCase, Points
from dpkit.testing.runs import LIMIT, RunFailed, run_once, this_command
from dpkit.testing.sweep import cases_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

T = TypeVar("T")

REPLAY = "DPKIT_FAIL"
"""Environment variable that makes every fail or pair sweep run one case only."""


class FailSweepFailed(RunFailed):
    """One case failed; `__cause__` is how, and the message is one line that replays it."""

    tool = "fail sweep"

    def __init__(self, case: FailCase, error: BaseException) -> None:
        super().__init__(this_command(REPLAY, case), error)
        self.case = case


@frozen(kw_only=True)
class FailSweepStatistics:
    """What a fail sweep did."""

    runs: int
    """Cases that were run, those that only count included."""
    calls: dict[str, int]
    """Most calls of each kind under any seed."""


def fail_sweep(
    scenario: Callable[[Points], Awaitable[T]],
    *,
    seeds: Iterable[int],
    check: Callable[[T], object],
    kinds: Iterable[str] = (),
    limit: float = LIMIT,
) -> FailSweepStatistics:
    """Run a scenario once per seed, kind and call, failing there.

    Args:
        scenario: Sends calls through the points that it is given, expects them to fail, and returns
            what `check` looks at. It must depend on nothing but the schedule.
        seeds: One schedule each.
        check: Called after every run, outside of Trio, when all tasks are gone.
        kinds: Points that shall fail; empty: all that the scenario has.
        limit: Virtual seconds after which a run counts as hung.

    Error handling:
        FailSweepFailed: what the scenario or the check raised is its cause, and with the
        environment variable that its message gives, that case alone is run. Not for use inside a
        Trio run.
    """
    wanted = frozenset(kinds)

    def cases(counted: Points, seed: int) -> Iterator[FailCase]:
        for kind in sorted(wanted & set(counted.calls) if wanted else counted.calls):
            for call in range(counted.calls[kind]):
                yield FailCase(seed, kind, call)

    return _sweep(scenario, seeds, check, limit, cases)


def pair_sweep(
    scenario: Callable[[Points], Awaitable[T]],
    *,
    seeds: Iterable[int],
    check: Callable[[T], object],
    kind: str = STEP,
    sample: int | None = None,
    limit: float = LIMIT,
) -> FailSweepStatistics:
    """Run a scenario once per seed, call and step: that call fails, and the target is cancelled.

    Args:
        scenario: As for `fail_sweep`; it also marks a target with ``with points.target():``.
        seeds: One schedule each.
        check: Called after every run.
        kind: The point that fails.
        sample: Pairs drawn for each seed; None: all of them.
        limit: Virtual seconds after which a run counts as hung.

    Error handling:
        As for `fail_sweep`.
    """

    def cases(counted: Points, seed: int) -> list[FailCase]:
        pairs = [
            FailCase(seed, kind, call, cancel)
            for call in range(counted.calls[kind])
            for cancel in cases_of(seed, counted.steps)
        ]
        if sample is None or sample >= len(pairs):
            return pairs
        return random.Random(seed).sample(pairs, sample)  # noqa: S311 - no secrets

    return _sweep(scenario, seeds, check, limit, cases)


def _sweep(
    scenario: Callable[[Points], Awaitable[T]],
    seeds: Iterable[int],
    check: Callable[[T], object],
    limit: float,
    cases: Callable[[Points, int], Iterable[FailCase]],
) -> FailSweepStatistics:
    def run(case: FailCase) -> Points:
        points = Points(case)
        scheduler = seeded_scheduler(case.seed)
        try:
            result = run_once(
                scenario, points, scheduler=scheduler, limit=limit, instruments=[points]
            )
            points.verify()
            check(result)
        except Exception as error:
            raise FailSweepFailed(case, error) from error
        return points

    if replay := os.environ.get(REPLAY):
        return FailSweepStatistics(runs=1, calls=dict(run(FailCase.parse(replay)).calls))
    runs, most = 0, Counter[str]()
    for seed in seeds:
        counted = run(FailCase(seed, "", 0))
        most |= counted.calls
        planned = list(cases(counted, seed))
        for case in planned:
            run(case)
        runs += 1 + len(planned)
    return FailSweepStatistics(runs=runs, calls=dict(most))
