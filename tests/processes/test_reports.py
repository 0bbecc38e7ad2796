"""Reports on processes and their wire that no other page of these tests speaks of."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import os

import pytest
import trio

from dpkit.errors import EngineLost
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.processes import descendants
from tests.clusters import make_config, slot_of, told
from tests.processes.lab import group, kill, life_of, open_processes, wait_back
from tests.waiting import until


async def test_G01_twenty_clusters_that_start_at_once_do_not_clash() -> None:
    ready, addresses = 0, set()
    all_ready = trio.Event()

    async def start(number: int) -> None:
        nonlocal ready
        transport = "tcp" if number % 2 else "ipc"
        config = make_config(group(process=f'transport = "{transport}"'))
        async with open_cluster(config) as cluster:
            connection = life_of(cluster, "e-0")._connection
            assert connection is not None
            addresses.add(connection._socket.endpoint)
            ready += 1
            if ready == 20:
                all_ready.set()
            await all_ready.wait()
            assert (await cluster.client.complete("hello")).text == "hello"

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(start, number)
    assert len(addresses) == 20
    assert not descendants(os.getpid())


async def test_E02_the_host_of_a_killed_engine_gets_an_event_and_no_exception() -> None:
    async with trio.open_nursery() as host:
        went_on = trio.Event()

        @host.start_soon
        async def rollout() -> None:
            async with open_processes(group(count=2)) as cluster:
                kill(cluster, "e-0")
                await wait_back(cluster, "e-0", 1)
                assert (await cluster.client.complete("hello")).text == "hello"
                [lost] = told(cluster, EventKind.ENGINE_LOST)
                assert "SIGKILL" in lost.detail
            went_on.set()

    assert went_on.is_set()


async def test_J02_J03_an_engine_that_dies_again_and_again_is_left_out_and_then_healed() -> None:
    settings = 'balancer = { eject_after = 2, eject_for = "300ms" }'
    async with open_processes(group(model="Obedient", count=2), settings=settings) as cluster:
        for _ in range(2):
            epoch = slot_of(cluster, "e-0").engine.epoch
            with pytest.raises(EngineLost):
                await cluster.client.complete("EXIT:at once", engine="e-0")
            await wait_back(cluster, "e-0", epoch + 1)
        assert cluster.statistics().health.ejected == 1
        for number in range(6):
            completion = await cluster.client.complete(f"{number}")
            assert completion.engine.name == "e-1", "nothing goes there meanwhile"
        await until(lambda: cluster.statistics().health.on_probation == 1)
        assert (await cluster.client.complete("a probe", engine="e-0")).text == "a probe"
        await until(lambda: cluster.statistics().health.serving == 2)


async def test_C04_C05_a_late_end_is_not_booked_on_the_next_life() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        async with trio.open_nursery() as nursery:

            async def ask(number: int) -> None:
                await cluster.client.complete(f"{number} hello hello", engine="e-0", resume=True)

            async def lose(number: int) -> None:
                with pytest.raises(EngineLost):
                    await ask(number)

            for number in range(5):
                nursery.start_soon(lose, number)
            engine = slot_of(cluster, "e-0").engine
            await until(lambda: len(list(cluster._flights[0].placed_on(engine))) == 5)
            kill(cluster, "e-0")
        await wait_back(cluster, "e-0", 1)
        assert cluster.audit() == ()
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
        assert not any(cluster.client.statistics().inflight.values())
