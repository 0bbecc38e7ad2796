"""Where the plan of a world is carried out: the real cluster, on a simulated stage.

Part of `dpkit.testing.world`. Only the models, the clock and the line of the stats are simulated; a
trouble is put in through them, never through the cluster.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import trio
from attrs import evolve, frozen

from dpkit._trio import seeded_scheduler
from dpkit.engine.models.cost import CostModel
from dpkit.errors import ClusterClosed, ClusterFailed, ConfigError, ScalingFailed
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.faults import (
    CRASH,
    GARBAGE,
    HANG,
    Fault,
    FaultKind,
    FaultyModel,
    kill_coordinator,
)
from dpkit.testing.history import History
from dpkit.testing.links import Line, LineFaults, put_stats_on
from dpkit.testing.plan import BLOCKS, EVERYONE, Blow, Plan, changed, config_of, draw_ask
from dpkit.testing.runs import RunFailed, run_once
from dpkit.testing.wrapper import ModelOfEach, named

if TYPE_CHECKING:
    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster
    from dpkit.testing.plan import Ask, Trouble

BAD_STATS = LineFaults(duplicate=0.2, delay=0.3, reorder=True)
"""What is wrong with stats that a trouble does not lose."""


LEAVE_WITHIN_S = 0.3
"""What engines that leave have not finished by then goes elsewhere."""

AGAIN_S = 0.05
"""How long a coordinator may live that is to be dead."""

_CHANGES = {Blow.SCALE, Blow.RELOAD, Blow.DRAIN}


class WorldFailed(RunFailed):
    """A promise was broken: `__cause__` tells which, and the message how to replay it."""

    tool = "world"

    def __init__(self, seed: int, error: BaseException) -> None:
        super().__init__(f"python -m dpkit.testing.world --seed {seed}", error)
        self.seed = seed


@frozen(kw_only=True)
class WorldResult:
    """How a world ended, all promises kept."""

    seed: int
    digest: str
    requests: int
    outcomes: dict[str, int]
    failed: str
    """What ended the cluster before its time, if anything did."""

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        failed = f"; the cluster failed: {self.failed}" if self.failed else ""
        return f"seed {self.seed}: {self.digest}, {self.requests} requests: {ends}{failed}"


def run_world(plan: Plan) -> WorldResult:
    """Run a plan and judge its history.

    Error handling:
        WorldFailed: a promise was broken, or the run broke down. Not for use inside a Trio run.
    """
    world = World(plan)
    try:
        with named(world.model) as world.name:
            world.config = config_of(plan, world.name)
            cluster = run_once(World.run, world, scheduler=seeded_scheduler(plan.seed))
        world.history.check(cluster, bad_stats=True)
    except Exception as error:
        raise WorldFailed(plan.seed, error) from error
    return world.result()


class World:
    """One run of one plan."""

    config: Config

    def __init__(self, plan: Plan) -> None:
        self.history = History(retries=plan.retries)
        self.models = {group: FaultyModel(CostModel("h100-32b")) for group in plan.groups}
        sizes = {BLOCKS + number: model for number, model in enumerate(self.models.values())}
        self.model = self.history.model(ModelOfEach(sizes))
        self.name = ""
        self._plan = plan
        self._failed = ""
        self._rng = random.Random(f"{plan.seed}/world")  # noqa: S311 - no secrets
        self._line = Line(self._rng)
        self._readers: dict[trio.CancelScope, None] = {}

    def result(self) -> WorldResult:
        """What came of it."""
        outcomes = [entry.outcomes[0] for entry in self.history.entries]
        return WorldResult(
            seed=self._plan.seed,
            digest=self.history.digest(),
            requests=len(outcomes),
            outcomes=dict(Counter(outcomes)),
            failed=self._failed,
        )

    async def run(self) -> Cluster | None:
        """Let everything happen; returns the cluster, closed."""
        cluster = None
        try:
            async with open_cluster(self.config, clients=self._plan.clients) as cluster:
                put_stats_on(cluster, self._line)
                await self._live(cluster)
        except ClusterFailed as error:
            self._failed = type(error.__cause__).__name__
            self.history.note("failed", "cluster", self._failed)
        return cluster

    async def _live(self, cluster: Cluster) -> None:
        async with trio.open_nursery() as background:
            background.start_soon(self._line.run)
            async with trio.open_nursery() as nursery:
                for ask in self._plan.asks:
                    nursery.start_soon(self._ask, cluster, ask)
                for trouble in self._plan.troubles:
                    nursery.start_soon(self._befall, cluster, nursery, trouble)
            background.cancel_scope.cancel()

    async def _ask(self, cluster: Cluster, ask: Ask) -> None:
        await trio.sleep_until(ask.at)
        with trio.move_on_after(ask.patience) as scope:
            self._readers[scope] = None
            try:
                await self.history.complete(
                    cluster.clients[ask.client],
                    ask.prompt,
                    pause=ask.pause,
                    max_tokens=ask.max_tokens,
                    timeout=ask.timeout,
                    resume=ask.resume,
                    engine=ask.engine,
                )
            finally:
                del self._readers[scope]

    async def _befall(self, cluster: Cluster, nursery: trio.Nursery, trouble: Trouble) -> None:
        await trio.sleep_until(trouble.at)
        self.history.note("trouble", trouble.target, f"{trouble.blow} {trouble.size:g}")
        if trouble.blow in _CHANGES:
            await self._change(cluster, trouble)
        elif trouble.target != EVERYONE:
            _strike(self.models[trouble.target], trouble)
        elif trouble.blow is Blow.STATS:
            self._line.faults = evolve(BAD_STATS, loss=trouble.size)
        elif trouble.blow is Blow.COORDINATOR:
            await _keep_dead(cluster, trouble.at + trouble.size)
        elif trouble.blow is Blow.LEAVE:
            readers = list(self._readers)
            for scope in self._rng.sample(readers, round(len(readers) * trouble.size)):
                scope.cancel()
        elif trouble.blow is Blow.BURST:
            for _ in range(round(trouble.size)):
                ask = draw_ask(self._rng, self._plan, trouble.at)
                nursery.start_soon(self._ask, cluster, ask)

    async def _change(self, cluster: Cluster, trouble: Trouble) -> None:
        """Have an operator change the cluster; that it cannot be is an answer like any other."""
        deadline, said = trio.current_time() + LEAVE_WITHIN_S, "done"
        try:
            match trouble.blow:
                case Blow.SCALE:
                    await cluster.scale(trouble.target, round(trouble.size), deadline=deadline)
                case Blow.RELOAD:
                    replaced = trouble.target if trouble.size % 2 else ""
                    plan = changed(self._plan, trouble.size)
                    config = config_of(plan, self.name, replaced=replaced)
                    await cluster.apply(config, deadline=deadline)
                case Blow.DRAIN:
                    await cluster.drain(trio.current_time() + trouble.size)
        except (ConfigError, ScalingFailed, ClusterClosed) as error:
            said = type(error).__name__
        self.history.note("changed", trouble.target, f"{trouble.blow} {said}")


async def _keep_dead(cluster: Cluster, until: float) -> None:
    kill_coordinator(cluster)
    while trio.current_time() < until:
        await trio.sleep(AGAIN_S)
        kill_coordinator(cluster)


def _strike(model: FaultyModel, trouble: Trouble) -> None:
    """Let something go wrong with one engine."""
    match trouble.blow:
        case Blow.CRASH:
            model.inject(CRASH)
        case Blow.HANG:
            model.inject(HANG)
        case Blow.GARBAGE:
            model.inject(GARBAGE)
        case Blow.OUT_OF_MEMORY:
            model.inject(Fault(FaultKind.OUT_OF_MEMORY, trouble.size))
        case Blow.STILLBORN:
            model.births[model.lives + round(trouble.size)] = CRASH
        case Blow.SLOW:
            model.always = Fault(FaultKind.SLOW, trouble.size)
        case Blow.MEND:
            model.always = None
