"""How many engines a trace needs: the least that keep a promise, for each policy.

A pool with one engine more is taken to be no worse, so the count is doubled until it suffices and
then halved in. Runs what `dpkit.simulate.study` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from dpkit.errors import ConfigError
from dpkit.simulate.study import find, with_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpkit.simulate.measures import Result
    from dpkit.simulate.run import Scenario


@frozen(kw_only=True)
class Promise:
    """What a pool must keep. Times are seconds; None: no matter."""

    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    e2e_p99_s: float | None = None
    goodput: float | None = None

    def is_kept(self, result: Result) -> bool:
        """Whether a run kept all of it."""
        return not any(self.broken(result))

    def broken(self, result: Result) -> Iterator[str]:
        """Each part that a run did not keep, by name."""
        for name in ("ttft_p99_s", "tpot_p99_s", "e2e_p99_s"):
            bound = getattr(self, name)
            if bound is not None and getattr(result, name) > bound:
                yield name
        if self.goodput is not None and result.goodput < self.goodput:
            yield "goodput"


@frozen(kw_only=True)
class Need:
    """What one policy needs."""

    policy: str
    engines: int | None
    """The least that suffice; None: not even the most that were tried."""
    result: Result
    """With so many, or with the most."""
    tried: tuple[int, ...]


def least_engines(
    scenario: Scenario,
    policy: str,
    promise: Promise,
    *,
    most: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Need:
    """Find the least number of engines with which a policy keeps a promise.

    Args:
        scenario: With one group of engines; its count does not matter.
        policy: Its name.
        promise: What must be kept.
        most: More engines are not tried.
        on_progress: Told of each run how many engines it has, and how many requests have ended.

    Raises:
        ConfigError: the config has several groups, and it is not said which is to grow.
    """
    if (groups := len(scenario.config.engines)) > 1:
        raise ConfigError([f"plan: the config has {groups} groups of engines; leave one of them"])
    scenario = with_policy(scenario, policy)
    results: dict[int, Result] = {}

    def suffices(count: int) -> bool:
        if count not in results:
            of_count = _with_engines(scenario, count)
            found = find(of_count, policy, None, lambda ended: on_progress(count, ended))
            results[count] = found.result
        return promise.is_kept(results[count])

    low, high = 0, 1
    while not suffices(high):
        if high == most:
            return _need(policy, None, results)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return _need(policy, high, results)


def _need(policy: str, engines: int | None, results: dict[int, Result]) -> Need:
    return Need(
        policy=policy,
        engines=engines,
        result=results[engines or max(results)],
        tried=tuple(results),
    )


def _with_engines(scenario: Scenario, count: int) -> Scenario:
    group = evolve(scenario.config.engines[0], count=count)
    return evolve(scenario, config=evolve(scenario.config, engines=(group,)))
