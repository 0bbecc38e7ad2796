"""Whoever opens a cluster of processes may be cancelled or fail at any moment: nothing is left.

Real processes know no virtual clock, so moments are drawn from a seed, from the first import of the
first process to the last answer.
"""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import math
import os
import random
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.nursery.cluster import open_cluster
from dpkit.testing.leaks import leak_check
from dpkit.testing.processes import descendants
from tests.clusters import make_config
from tests.processes.lab import group, open_processes

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster

LAST_S = 1.2
"""By then all is up, on a machine with nothing else to do."""


class Boom(Exception):  # noqa: N818 - a noise
    """What the body raises."""


async def crowd(cluster: Cluster) -> None:
    """Ask for a lot, for ever; some leave early."""
    async with trio.open_nursery() as nursery:

        async def keep_asking(number: int) -> None:
            while True:
                with trio.move_on_after(0.02 if number % 2 else math.inf):
                    await cluster.client.complete(f"{number} and so on", max_tokens=30)

        for number in range(8):
            nursery.start_soon(keep_asking, number)


async def serve(start: str) -> None:
    """Open a cluster, and use it until something happens."""
    process = f'start = "{start}"'
    async with open_cluster(make_config(group(model="Paced", count=2, process=process))) as cluster:
        await crowd(cluster)


async def is_cancelled_at(moment: float, start: str) -> bool:
    """Cancel it after so many seconds; check that nothing is left."""
    with leak_check():
        with trio.move_on_after(moment) as scope:
            await serve(start)
        assert scope.cancelled_caught
        assert not descendants(os.getpid())
    return True


async def fails_at(moment: float, start: str) -> None:
    """Have its body raise after so many seconds; check what comes out, and that nothing is left."""
    boom = Boom()
    process = f'start = "{start}"'
    config = make_config(group(model="Paced", count=2, process=process))

    async def run() -> None:
        async with open_cluster(config) as cluster:
            with trio.move_on_after(moment):
                await crowd(cluster)
            raise boom

    with leak_check():
        with pytest.raises(Boom) as caught:
            await run()
        assert caught.value is boom
        assert not descendants(os.getpid())


@pytest.mark.parametrize("seed", range(3))
async def test_a_cancellation_at_any_moment_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    assert await is_cancelled_at(rng.uniform(0, LAST_S), "fork")


@pytest.mark.parametrize("seed", range(2))
async def test_what_the_body_raises_at_any_moment_comes_out_bare(seed: int) -> None:
    await fails_at(random.Random(seed).uniform(0, 0.1), "fork")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_a_hundred_moments(start: str) -> None:
    rng = random.Random(start)
    for _ in range(100):
        await is_cancelled_at(rng.uniform(0, LAST_S), start)
        await fails_at(rng.uniform(0, 0.1), start)


async def test_E09_a_request_cancelled_at_any_moment_costs_its_engine_nothing() -> None:
    rng = random.Random(5)
    async with open_processes(group(model="Paced", count=2)) as cluster:
        pids = descendants(os.getpid())
        async with trio.open_nursery() as nursery:

            async def ask_and_leave(number: int) -> None:
                for _ in range(20):
                    with trio.move_on_after(rng.uniform(0, 0.05)):
                        await cluster.client.complete(f"{number} and so on", ignore_eos=True)

            for number in range(10):
                nursery.start_soon(ask_and_leave, number)
        assert descendants(os.getpid()) == pids
        statistics = cluster.client.statistics()
        assert statistics.aborted > 100
