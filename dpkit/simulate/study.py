"""Several policies on one trace: the same requests at the same times for each of them.

Finds the load, lays out the runs, and hands them to processes side by side if there are several:
a run depends on nothing but its scenario, so where it happens changes nothing.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from dpkit.balancer.policies import load_policy
from dpkit.errors import ConfigError
from dpkit.names import Binding
from dpkit.simulate.capacity import capacity_rps
from dpkit.simulate.measures import Objectives, Result, measure, prefill_alone
from dpkit.simulate.peers import PEERS
from dpkit.simulate.pool import run_side_by_side
from dpkit.simulate.run import Outcome, Scenario, run
from dpkit.simulate.settings import costs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.config.schema import Config

    Progress = Callable[[str, int, int], None]

_PER_MESSAGE = 16
"""Ended requests between two words on progress: the bar needs no more."""

LOAD_WITHOUT_RATE = 0.85
"""Load at which workloads run that say nothing of their rate, unless one is given."""


@frozen(kw_only=True)
class Finding:
    """What came of one policy."""

    result: Result
    outcome: Outcome
    wall_s: float
    """Real seconds that the run took."""


@frozen(kw_only=True)
class Load:
    """How fast requests come."""

    factor: float
    """Of the trace's own times."""
    offered_rps: float
    capacity_rps: float | None = None
    """Of the pool; None: nobody asked."""


def find_load(
    scenario: Scenario, load: float | None, on_progress: Progress = lambda *_: None
) -> tuple[Scenario, Load]:
    """Stretch a scenario's times so that the pool has a load; None: leave them as they are.

    Raises:
        ConfigError: a closed loop was given a load, which it makes by itself.
    """
    trace = scenario.trace
    if trace.users is not None:
        if load is not None:
            problem = (
                f"--load {load:g}: {trace.name} is a closed loop of {trace.users} users, who make "
                "their load themselves; leave it out"
            )
            raise ConfigError([problem])
        return scenario, Load(factor=1.0, offered_rps=0.0)
    if load is None and not trace.has_rate:
        load = LOAD_WITHOUT_RATE
    rate = len(trace.asks) / trace.span_s if trace.span_s else 0.0
    if load is None or not rate:
        return scenario, Load(factor=1.0, offered_rps=rate)
    total = len(trace.asks)
    capacity = capacity_rps(
        scenario, on_progress=lambda ended: on_progress("capacity", ended, total)
    )
    factor = rate / (load * capacity)
    scaled = evolve(scenario, trace=trace.scaled(factor))
    return scaled, Load(factor=factor, offered_rps=load * capacity, capacity_rps=capacity)


def objectives_of(config: Config) -> tuple[Objectives, Callable[[int], float]]:
    """What makes a request good, and how long a prompt takes alone, by the first group's costs."""
    cost, limits = costs_of(config.engines[0])
    return Objectives.usual(cost), prefill_alone(cost, limits.max_num_batched_tokens)


def with_policy(scenario: Scenario, name: str) -> Scenario:
    """The same under another policy.

    Args:
        scenario: What.
        name: As a config names it; of one of `PEERS`; with ``@early`` or ``@late`` behind it, if
            it is not to be bound as the config says.

    Raises:
        ConfigError: there is no such policy, or it cannot be bound so.
    """
    policy, at, binding = name.partition("@")
    policy = PEERS.get(policy, policy)
    if at and binding not in list(Binding):
        raise ConfigError([f"--policy {name}: bind it {policy}@early or {policy}@late"])
    load_policy(policy)
    balancer = evolve(scenario.config.balancer, policy=policy)
    if at:
        balancer = evolve(balancer, binding=Binding(binding))
    return evolve(scenario, config=evolve(scenario.config, balancer=balancer))


def compare(
    scenario: Scenario,
    policies: Sequence[str],
    *,
    jobs: int | None = None,
    objectives: Objectives | None = None,
    on_progress: Progress = lambda *_: None,
) -> list[Finding]:
    """Run a scenario under each policy.

    Args:
        scenario: With the load it is to have.
        policies: Names, as for `with_policy`; results come in this order.
        jobs: Processes side by side; None: as many as there are cores. With one, none is started.
        objectives: What makes a request good; None: the usual.
        on_progress: Told of each policy how many requests have ended, of how many.

    Error handling:
        ConfigError: a policy cannot be had; nothing was run. What a run raises ends them all.
    """
    total = len(scenario.trace.asks)
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(policies))
    scenarios = [with_policy(scenario, policy) for policy in policies]
    if jobs == 1:
        return [
            find(each, policy, objectives, lambda ended, p=policy: on_progress(p, ended, total))  # type: ignore[misc]
            for each, policy in zip(scenarios, policies, strict=True)
        ]
    return run_side_by_side(
        f"{__name__}:{find_aside.__name__}",
        [(each, name, objectives) for each, name in zip(scenarios, policies, strict=True)],
        at_once=jobs,
        tell=lambda place, ended: on_progress(policies[place], ended, total),
    )


def find(
    scenario: Scenario,
    policy: str,
    objectives: Objectives | None,
    on_progress: Callable[[int], None],
) -> Finding:
    """Run a scenario and measure it; `policy` is how its result is called."""
    began = time.perf_counter()
    outcome = run(scenario, on_progress=on_progress)
    wall_s = time.perf_counter() - began
    usual, alone = objectives_of(scenario.config)
    result = measure(policy, outcome, alone=alone, objectives=objectives or usual)
    return Finding(result=result, outcome=outcome, wall_s=wall_s)


def find_aside(
    scenario: Scenario,
    policy: str,
    objectives: Objectives | None,
    tell: Callable[[int], None],
) -> Finding:
    """`find`, for a process of its own: not every end is worth a word."""

    def seldom(ended: int) -> None:
        if ended % _PER_MESSAGE == 0:
            tell(ended)

    return find(scenario, policy, objectives, seldom)
