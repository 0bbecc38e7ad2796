"""``python -m dpkit.testing.world --seed N``: a whole cluster through its troubles, from one seed.

The real cluster, with nothing but its models, its clock and its stats line simulated. The seed
gives the trace, the plan of what goes wrong (`dpkit.testing.plan`), and the schedule; the run gives
a history, which the one checker judges. Prints a hash of each history: equal in every process. Exit
0: all promises were kept; 1: one was not, and a line says which seed to run again.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click
import trio
from attrs import evolve, frozen

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.errors import ClusterFailed
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.faults import CRASH, GARBAGE, HANG, Fault, FaultKind, FaultyModel
from dpkit.testing.history import History
from dpkit.testing.links import Line, LineFaults, put_stats_on
from dpkit.testing.plan import EVERYONE, Blow, Plan, draw_ask, draw_plan
from dpkit.testing.runs import RunFailed, run_once
from dpkit.testing.wrapper import ModelOfEach, named

if TYPE_CHECKING:
    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster
    from dpkit.testing.plan import Ask, Trouble

BLOCKS = 24
"""Of the first engine's cache: room for two or three requests."""

BAD_STATS = LineFaults(duplicate=0.2, delay=0.3, reorder=True)
"""What is wrong with stats that a trouble does not lose."""


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
        with named(world.model) as model:
            world.config = config_of(plan, model)
            cluster = run_once(World.run, world, scheduler=seeded_scheduler(plan.seed))
        world.history.check(cluster, bad_stats=True)
    except Exception as error:
        raise WorldFailed(plan.seed, error) from error
    return world.result()


def config_of(plan: Plan, model: str) -> Config:
    """The cluster of a plan: each engine has a cache of another size, by which it is known."""
    groups = [
        f"""
        [[engines]]
        name = "e{number}"
        model = "{model}"
        kv = {{ block_size = 4, num_blocks = {BLOCKS + number} }}
        scheduler = {{ max_num_seqs = 4, max_num_batched_tokens = 32 }}
        supervision = {{ step_timeout = "1s", backoff = "50ms" }}
        """
        for number in range(plan.engines)
    ]
    bound = "" if plan.max_inflight is None else f"max_inflight = {plan.max_inflight}"
    return parse_config(
        f"""
        cluster = {{ seed = {plan.seed} }}
        balancer = {{ policy = "{plan.policy}" }}
        [admission]
        max_queued = {plan.max_queued}
        queue_timeout = "5s"
        {bound}
        {"".join(groups)}
        """
    )


class World:
    """One run of one plan."""

    config: Config

    def __init__(self, plan: Plan) -> None:
        self.history = History()
        self.models = {f"e{n}-0": FaultyModel(CostModel("h100-32b")) for n in range(plan.engines)}
        sizes = {BLOCKS + number: model for number, model in enumerate(self.models.values())}
        self.model = self.history.model(ModelOfEach(sizes))
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
                )
            finally:
                del self._readers[scope]

    async def _befall(self, cluster: Cluster, nursery: trio.Nursery, trouble: Trouble) -> None:
        await trio.sleep_until(trouble.at)
        self.history.note("trouble", trouble.target, f"{trouble.blow} {trouble.size:g}")
        if trouble.target != EVERYONE:
            _strike(self.models[trouble.target], trouble)
        elif trouble.blow is Blow.STATS:
            self._line.faults = evolve(BAD_STATS, loss=trouble.size)
        elif trouble.blow is Blow.LEAVE:
            readers = list(self._readers)
            for scope in self._rng.sample(readers, round(len(readers) * trouble.size)):
                scope.cancel()
        elif trouble.blow is Blow.BURST:
            for _ in range(round(trouble.size)):
                ask = draw_ask(self._rng, self._plan.clients, trouble.at)
                nursery.start_soon(self._ask, cluster, ask)


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


def _seeds(_context: object, _parameter: object, text: str | None) -> range:
    """Read ``A..B``, both ends included."""
    if text is None:
        return range(0)
    first, dots, last = text.partition("..")
    try:
        return range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form A..B") from None


@click.command()
@click.option("--seed", type=int, help="Run this world.")
@click.option("--seeds", callback=_seeds, metavar="A..B", help="Run all of these, both included.")
@click.option("--plan", "show", is_flag=True, help="Show what goes wrong when, first.")
def main(seed: int | None, seeds: range, *, show: bool) -> None:
    """Run whole clusters through troubles drawn from seeds, and judge their histories."""
    if seed is None and not seeds:
        raise click.UsageError("give --seed N or --seeds A..B")
    for each in seeds if seed is None else [seed]:
        plan = draw_plan(each)
        if show:
            click.echo(plan)
        try:
            click.echo(run_world(plan))
        except WorldFailed as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
