"""The audit holds each book against the next, at any moment, and names what differs."""

from __future__ import annotations

import random

import trio

import dpkit
from dpkit.messages import EngineId, GenerateRequest
from dpkit.testing.idle import check_idle
from tests.nursery.lab import loop_of

CONFIG = dpkit.parse_config("""
    [[engines]]
    model = "cost:h100-8b"
    count = 2
    kv.num_blocks = 40
""")


async def test_no_moment_of_a_busy_cluster_has_a_contradiction(autojump_clock) -> None:
    rng = random.Random(0)
    async with dpkit.open_cluster(CONFIG, clients=2) as cluster:

        async def ask(client: dpkit.Client) -> None:
            await trio.sleep(rng.random())
            with trio.move_on_after(rng.choice([0.01, 0.1, 9])):
                await client.complete("hello " * rng.randrange(1, 20), max_tokens=60)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(ask, cluster.clients[number % 2])
            for _ in range(1500):
                assert cluster.audit() == ()
                await trio.sleep(0.001)
        check_idle(cluster)


async def test_a_request_that_its_engine_forgot_is_named(autojump_clock) -> None:
    async with dpkit.open_cluster(CONFIG) as cluster:
        async with cluster.client.generate("hi", request_id="a"):
            await trio.sleep(0.001)
            slot = cluster._slots[0]
            delivery = loop_of(slot)._deliver.pop("a")
            forgotten, miscounted = cluster.audit()
            assert forgotten == "a is charged to engine-0, which lost it"
            assert miscounted == "engine-0 took 0 requests, its scheduler has 1"
            loop_of(slot)._deliver["a"] = delivery
        await trio.sleep(1)
        assert cluster.audit() == ()


async def test_a_request_that_nobody_is_charged_for_is_named(autojump_clock) -> None:
    async with dpkit.open_cluster(CONFIG) as cluster:
        ghost = GenerateRequest(request_id="ghost", prompt_token_ids=(1,))
        inbox = loop_of(cluster._slots[1]).inbox
        inbox.submit(ghost, cluster._flights[0].deliver)
        assert cluster.audit() == ("ghost is on engine-1, charged to nobody",)
        inbox.abort("ghost", cluster._flights[0].deliver)
        assert cluster.audit() == ()


async def test_counts_that_went_wrong_on_their_way_are_named(autojump_clock) -> None:
    async with dpkit.open_cluster(CONFIG) as cluster:
        async with cluster.client.generate("hi", max_tokens=500):
            await trio.sleep(0.5)
            assert cluster.audit() == ()
            cluster._rules._loads[0] = (7, 7, 0.5)
            [problem] = cluster.audit()
            assert problem.startswith("engine-0 told the coordinator (0, 1, ")
            assert problem.endswith("which says (7, 7, 0.5)")
        await trio.sleep(1)
        assert cluster.audit() == (), "the next stats set it right"
        slot = cluster._slots[0]
        loop_of(slot)._gate.counts = (2, 0)
        assert cluster.audit() == ("engine-0 published 2 requests, its scheduler has 0",)
        assert slot.engine == EngineId("engine-0")
