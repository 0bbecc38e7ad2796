"""The smallest races, under every schedule that there is.

Each test prints how many schedules there were. What must hold after each of them is the same: one
outcome for every request, no token lost or repeated, nothing held by anybody.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.explorer import REPLAY, explore
from dpkit.testing.faults import CRASH, Fault, FaultKind, FaultyModel
from dpkit.testing.history import LEFT, History
from dpkit.testing.wrapper import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.nursery.client import Client
    from dpkit.testing.explorer import Race

PROMPT = "ab"


def explore_cluster(
    act: Callable[[Race, Cluster, History, FaultyModel], Any],
    check: Callable[[History, Cluster], None] = lambda _history, _cluster: None,
    *,
    engines: int = 1,
    clients: int = 1,
    settings: str = "",
    supervision: str = "",
) -> set[str]:
    """Explore what `act` does on a small cluster that publishes no stats.

    Returns the outcomes that requests had under one schedule or another.
    """
    outcomes: set[str] = set()

    async def scenario(race: Race) -> tuple[History, Cluster]:
        history = History()
        faulty = FaultyModel(EchoModel())
        with named(history.model(faulty)) as model:
            config = parse_config(
                f'{settings}\n[[engines]]\nmodel = "{model}"\ncount = {engines}\n'
                f"[engines.supervision]\n{supervision}\n",
                overrides=["coordinator.publish=false", "cluster.seed=1"],
            )
            async with open_cluster(config, clients=clients) as cluster:
                await act(race, cluster, history, faulty)
        return history, cluster

    def judge(result: tuple[History, Cluster]) -> None:
        history, cluster = result
        history.check(cluster)
        check(history, cluster)
        outcomes.update(entry.outcomes[0] for entry in history.entries)

    done = explore(scenario, check=judge)
    print(f"{done.schedules} schedules, outcomes: {', '.join(sorted(outcomes))}")
    assert done.complete or REPLAY in os.environ
    return Anything() if REPLAY in os.environ else outcomes


class Anything(set[str]):
    """Equal to all: the one schedule of a replay does not show what there is."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


async def read(client: Client, history: History, scope: trio.CancelScope, tokens: int = 2) -> None:
    with scope:
        await history.complete(client, PROMPT, max_tokens=tokens)


async def turns(count: int) -> None:
    """Let so many turns of Trio's loop pass."""
    for _ in range(count):
        await trio.lowlevel.checkpoint()


async def leave(*scopes: trio.CancelScope) -> None:
    """Cancel readers, in a task of its own, so that it may do so before others or after."""
    await turns(1)
    for scope in scopes:
        scope.cancel()


# `before`: turns that pass before the race, so that either side can win. To open it earlier would
# take hours: each task more multiplies the schedules.
@pytest.mark.parametrize(
    ("readers", "before", "choices"), [(1, 3, None), (1, 4, None), (2, 4, None)]
)
def test_finish_against_abort(readers: int, before: int, choices: int | None) -> None:
    async def act(race: Race, cluster: Cluster, history: History, _: FaultyModel) -> None:
        scopes = [trio.CancelScope() for _ in range(readers)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(read, cluster.client, history, scope)
            await turns(before)
            with race.open(choices=choices):
                nursery.start_soon(leave, *scopes)
                await trio.sleep(0.05)

    assert explore_cluster(act) == ({"length", LEFT} if before == 4 else {LEFT})


@pytest.mark.parametrize(
    ("readers", "choices"), [(1, None), (2, 2), pytest.param(2, None, marks=pytest.mark.slow)]
)
def test_admission_against_cancellation(readers: int, choices: int | None) -> None:
    async def act(race: Race, cluster: Cluster, history: History, _: FaultyModel) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, cluster.client, history, trio.CancelScope())
            await turns(1)
            scopes = [trio.CancelScope() for _ in range(readers)]
            for scope in scopes:
                nursery.start_soon(read, cluster.client, history, scope, 1)
            await turns(2)
            with race.open(choices=choices):
                nursery.start_soon(leave, *scopes)
                await trio.sleep(0.1)

    outcomes = explore_cluster(act, settings="admission = { max_inflight = 1 }")
    assert outcomes == {"length", LEFT}


@pytest.mark.parametrize("clients", [1, 2])
def test_drain_against_submission(clients: int) -> None:
    async def drain(cluster: Cluster) -> None:
        await turns(1)
        await cluster.drain()

    async def act(race: Race, cluster: Cluster, history: History, _: FaultyModel) -> None:
        async with trio.open_nursery() as nursery:
            with race.open():
                nursery.start_soon(drain, cluster)
                for client in cluster.clients:
                    nursery.start_soon(read, client, history, trio.CancelScope(), 1)
                await trio.sleep(0.05)

    assert explore_cluster(act, clients=clients) == {"length", "Draining"}


@pytest.mark.parametrize("readers", [1, 2])
def test_crash_against_abort(readers: int) -> None:
    async def act(race: Race, cluster: Cluster, history: History, model: FaultyModel) -> None:
        model.plan = {1: CRASH}  # the first token is delivered, the second never comes
        scopes = [trio.CancelScope() for _ in range(readers)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(read, cluster.client, history, scope)
            await turns(2)
            with race.open():
                nursery.start_soon(leave, scopes[0])
                await trio.sleep(0.05)

    assert explore_cluster(act) == {"EngineLost", LEFT}


@pytest.mark.parametrize("resume", [False, True])
def test_end_of_a_life_against_its_last_output(*, resume: bool) -> None:
    """A step ends at the very moment at which it counts as hung."""

    async def act(race: Race, cluster: Cluster, history: History, model: FaultyModel) -> None:
        model.plan = {1: Fault(FaultKind.SLOW, 2000)}  # milliseconds; the watchdog looks twice
        with race.open():
            await history.complete(cluster.client, PROMPT, max_tokens=2, resume=resume)

    outcomes = explore_cluster(act, supervision='step_timeout = "1s"')
    assert outcomes == ({"length"} if resume else {"length", "EngineLost"})
