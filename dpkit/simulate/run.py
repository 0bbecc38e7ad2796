"""One run: the product's cluster, a trace, and a virtual clock. Same seed, same run.

Owns the Trio run that it starts. Knows nothing of how load is chosen or how results are shown.
"""

from __future__ import annotations

import gc
import logging
import math
import random
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import trio
import trio.testing
from attrs import define, evolve, field, frozen

from dpkit._trio import seeded_scheduler
from dpkit.errors import ClusterClosed, PolicyFailed
from dpkit.messages import SamplingParams
from dpkit.nursery.cluster import open_cluster
from dpkit.simulate.faults import FaultPlan, befall, keep_dead, prepared, strike
from dpkit.simulate.lockstep import step_together
from dpkit.simulate.meter import Life
from dpkit.simulate.prompts import prompt_of
from dpkit.simulate.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dpkit.config.schema import Config
    from dpkit.nursery.client import Client
    from dpkit.nursery.cluster import Cluster
    from dpkit.simulate.meter import Answer
    from dpkit.testing.faults import FaultyModel
    from dpkit.traces import Ask, Trace


@frozen(kw_only=True)
class Scenario:
    """All that a run depends on."""

    config: Config
    """As `dpkit.simulate.settings.simulated` makes it."""
    trace: Trace
    clients: int = 1
    seed: int = 0
    faults: FaultPlan = field(factory=FaultPlan)


@frozen(kw_only=True)
class Outcome:
    """What a run gave."""

    answers: tuple[Answer, ...]
    """One for each request, in the order in which they came."""
    gaps: Counter[int]
    """How often a token came so many `GAP_S` after the one before."""
    watch: Watch
    preemptions: int
    duration_s: float
    """Virtual seconds from the first arrival to the last end."""


def run(scenario: Scenario, *, on_progress: Callable[[int], None] = lambda _: None) -> Outcome:
    """Simulate, to the last request's end.

    Args:
        scenario: What.
        on_progress: Told now and then how many requests have ended.

    Error handling:
        What `open_cluster` raises; Ctrl-C as a bare `KeyboardInterrupt`. Not for use inside a Trio
        run: it starts its own.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    with (
        prepared(scenario.config, scenario.faults) as (config, models),
        seeded_scheduler(scenario.seed),
        seldom_collected(),
        _hushed() if _is_loud(scenario, models) else nullcontext(),
        bare_interrupt(),
    ):
        scenario = evolve(scenario, config=config)
        return trio.run(_main, scenario, models, clock.current_time, on_progress, clock=clock)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A run makes millions of small objects, few of them in cycles: look for those less often."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def bare_interrupt() -> Iterator[None]:
    """Let Ctrl-C come out of a Trio run as what it is, not in the groups of nurseries it passed.

    So does what a policy raised, which is its author's to read.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        if (found := group.subgroup(PolicyFailed)) is None:
            raise
        error: BaseException = found
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


def _is_loud(scenario: Scenario, models: Mapping[int, FaultyModel]) -> bool:
    """Whether dpkit would warn of what goes on."""
    faults, together = scenario.faults, scenario.config.coordinator.wave_coordination
    return bool(models or faults.outages or together)


@contextmanager
def _hushed() -> Iterator[None]:
    """What dpkit would warn of was asked for: engines that fail, ranks that tell late of a step."""
    log, handler = logging.getLogger("dpkit"), logging.NullHandler()
    log.addHandler(handler)
    propagates, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.propagate = propagates
        log.removeHandler(handler)


async def _main(
    scenario: Scenario,
    models: Mapping[int, FaultyModel],
    now: Callable[[], float],
    on_progress: Callable[[int], None],
) -> Outcome:
    async with open_cluster(scenario.config, clients=scenario.clients) as cluster:
        if scenario.config.coordinator.wave_coordination:
            step_together(cluster)
        crowd = Crowd(scenario, cluster, now, on_progress)
        watch = Watch()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run, cluster)
            began = trio.current_time()
            for trouble in scenario.faults.troubles:
                if not trouble.start_s and trouble.factor is not None:
                    strike(trouble, models[trouble.rank])  # before the first request
                nursery.start_soon(befall, trouble, models[trouble.rank], began)
            for outage in scenario.faults.outages:
                nursery.start_soon(keep_dead, cluster, outage, began)
            await crowd.run()
            nursery.cancel_scope.cancel()
        statistics = cluster.statistics()
    return Outcome(
        answers=tuple(sorted(crowd.answers)),
        gaps=crowd.gaps,
        watch=watch,
        preemptions=sum(engine.totals.preemptions for engine in statistics.engines),
        duration_s=crowd.ended_at - began,
    )


@define(eq=False)
class Crowd:
    """All who ask: at the times of the trace, or each again when it is answered."""

    scenario: Scenario
    cluster: Cluster
    now: Callable[[], float]
    on_progress: Callable[[int], None]
    answers: list[Answer] = field(factory=list, init=False)
    gaps: Counter[int] = field(factory=Counter, init=False)
    ended_at: float = field(default=0.0, init=False)
    _done: trio.Event = field(factory=trio.Event, init=False)
    _asked: int = field(default=0, init=False)
    _rng: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(f"{self.scenario.seed}/crowd")  # noqa: S311 - no secrets

    async def run(self) -> None:
        """Ask, and wait for the last answer."""
        trace = self.scenario.trace
        if trace.users is None:
            start = trio.current_time() - trace.asks[0].arrival_s
            for ask in trace.asks:
                if (at := start + ask.arrival_s) > self.now():
                    await trio.sleep_until(at)
                self._ask(ask)
        else:
            for _ in range(min(trace.users, len(trace.asks))):
                self._ask_next()
        await self._done.wait()

    def _ask_next(self) -> None:
        if self._asked < len(self.scenario.trace.asks):
            self._ask(self.scenario.trace.asks[self._asked])

    def _ask(self, ask: Ask) -> None:
        number, self._asked = self._asked, self._asked + 1
        life = Life(
            number=number,
            arrival_s=self.now(),
            prompt_tokens=ask.prompt_tokens,
            now=self.now,
            gaps=self.gaps,
            on_end=self._on_end,
            leaves_after=self._patience(ask),
        )
        life.submission = self._client(number).submit(
            prompt_of(ask, number), SamplingParams(max_tokens=ask.output_tokens, seed=0), sink=life
        )

    def _client(self, number: int) -> Client:
        clients = self.cluster.clients
        if (users := self.scenario.trace.users) is not None and number < users:
            return clients[number % len(clients)]
        return clients[0] if len(clients) == 1 else self._rng.choice(clients)

    def _patience(self, ask: Ask) -> float:
        share = self.scenario.faults.abort_share
        if not share or self._rng.random() >= share:
            return math.inf
        return 1 + int(self._rng.random() * (ask.output_tokens - 1))

    def _on_end(self, answer: Answer) -> None:
        self.answers.append(answer)
        ended = len(self.answers)
        self.on_progress(ended)
        if ended == len(self.scenario.trace.asks):
            self.ended_at = self.now()
            self._done.set()
        elif self.scenario.trace.users is not None:
            with suppress(ClusterClosed):  # interrupted: nobody is to ask again
                self._ask_next()
