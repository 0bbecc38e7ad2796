"""Groups that join are scaled, changed and left like any other, as far as their engines come."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from attrs import evolve

from dpkit.errors import ConfigError, EngineLost, ScalingFailed
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.leaks import Belongings
from tests.clusters import make_config, slot_of, told
from tests.joined.lab import (
    free_address,
    group,
    life_of,
    open_joined,
    open_living,
    open_puppet,
    open_two,
    serves,
)
from tests.waiting import until

QUICK = 'join_timeout = "300ms", dead_after = "10s", abort_timeout = "300ms"'
PATIENT = QUICK.replace('join_timeout = "300ms"', 'join_timeout = "1s"')
LOCAL = '[[engines]]\nname = "l"\nmodel = "echo"\n'


async def test_N01_a_group_grows_by_the_ranks_that_join_while_the_others_serve() -> None:
    address = free_address()
    async with (
        open_two(address) as (_, second),  # the second waits for its answer meanwhile
        open_joined(group(address)) as cluster,
    ):
        await cluster.scale("v", 2)
        assert serves(cluster, "v-1")
        second.begins = True
        async with cluster.client.generate("?", engine="v-1") as stream:
            await stream.__anext__()
            second.finish(second.requests[-1].request_id)
            await stream.read_all()


async def test_N03_a_rank_that_does_not_come_leaves_all_as_it_was() -> None:
    address = free_address()
    async with (
        open_puppet(address, 0) as first,
        open_puppet(address, 1) as late,
        open_living(first),
        open_joined(group(address, vllm=QUICK)) as cluster,
    ):
        with pytest.raises(
            ScalingFailed, match=r"engine v-1 did not come up: .* has not joined wi"
        ):
            await cluster.scale("v", 2)
        assert [each.name for each in cluster._slots] == ["v-0"]
        assert serves(cluster, "v-0")
        async with open_living(late):  # which is expected no more, and is again
            await trio.sleep(0.05)
            assert not late.addresses
            await cluster.scale("v", 2)
            assert serves(cluster, "v-1", 1)


async def test_N04_a_group_shrinks_after_its_last_engine_has_finished() -> None:
    address = free_address()
    async with (
        open_two(address) as (_, second),
        open_joined(group(address, count=2)) as cluster,
    ):
        second.begins = True
        slot = slot_of(cluster, "v-1")
        async with cluster.client.generate("?", engine="v-1") as stream:
            await stream.__anext__()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cluster.scale, "v", 1)
                await until(lambda: slot.state is EngineState.DRAINING)
                second.finish(second.requests[-1].request_id, 66)
                await stream.read_all()
        assert stream.text == "AB"
        assert [each.name for each in cluster._slots] == ["v-0"]


@pytest.mark.parametrize(
    ("count", "said"), [(0, r"between 1 and 1024, got 0"), (1, r"cluster\.min_ready is 2")]
)
async def test_N02_a_group_that_would_be_too_small_is_refused_before_anything_changes(
    count: int, said: str
) -> None:
    address = free_address()
    async with (
        open_two(address),
        open_joined(group(address, count=2), settings="[cluster]\nmin_ready = 2\n") as cluster,
    ):
        with pytest.raises(ConfigError, match=said):
            await cluster.scale("v", count)
        assert serves(cluster, "v-0")
        assert serves(cluster, "v-1")


async def test_N07_N11_one_that_leaves_gets_nothing_new_and_at_its_limit_lets_go() -> None:
    address = free_address()
    async with (
        open_two(address) as (first, second),
        open_joined(group(address, count=2)) as cluster,
    ):
        first.begins = True
        slot = slot_of(cluster, "v-1")
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with cluster.client.generate("?", engine="v-1") as stream:
                    with pytest.raises(EngineLost, match="v-1 was retired"):
                        await stream.read_all()

            nursery.start_soon(ask)
            await second.wait_for_request()
            second.token(second.requests[0].request_id, 65)
            limit = trio.current_time() + 0.3
            nursery.start_soon(partial(cluster.scale, "v", 1, deadline=limit))
            await until(lambda: slot.state is EngineState.DRAINING)
            for number in range(10):  # nobody waits, and nobody is sent there
                async with cluster.client.generate("?") as stream:
                    await stream.__anext__()
                    first.finish(first.requests[number].request_id)
                    await stream.read_all()
        assert len(second.requests) == 1
        await until(lambda: second.aborted)


async def test_a_new_config_may_add_a_group_that_joins_and_take_it_away() -> None:
    address = free_address()
    plain, more = make_config(LOCAL), make_config(LOCAL, group(address, vllm=PATIENT))
    async with open_cluster(plain) as cluster:
        with pytest.raises(ScalingFailed, match="v-0 did not come up"):
            await cluster.apply(more)
        assert cluster.config == plain
        # Whoever says HELLO just now says it to a listener that is about to go.
        await until(lambda: all(desk.closed.is_set() for desk in cluster._launchers._leaving))
        async with open_puppet(address) as puppet, open_living(puppet):
            await cluster.apply(more)
            assert serves(cluster, "v-0", 1)
            await cluster.apply(plain)
            assert [each.name for each in cluster._slots] == ["l-0"]
    async with open_puppet(address) as again, open_living(again), open_joined(group(address)):
        pass  # the address is free again


@pytest.mark.parametrize("change", ["settings", "kind"])
async def test_engines_that_joined_are_not_replaced(change: str) -> None:
    address = free_address()
    config = make_config(group(address), LOCAL)
    other = make_config(group(address, vllm=QUICK) if change == "settings" else LOCAL)
    if change == "kind":
        other = evolve(other, engines=[evolve(other.engines[0], name="v")])
    async with open_puppet(address) as puppet, open_living(puppet), open_cluster(config) as cluster:
        with pytest.raises(ConfigError, match=r"engines\.v: engines that join cannot be replaced"):
            await cluster.apply(other)
        assert serves(cluster, "v-0")


async def test_their_number_may_change_with_a_new_config() -> None:
    address = free_address()
    async with (
        open_two(address),
        open_cluster(make_config(group(address))) as cluster,
    ):
        await cluster.apply(make_config(group(address, count=2)))
        assert serves(cluster, "v-1")
        await cluster.apply(make_config(group(address)))
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_engines_that_restart_together_are_waited_for_together() -> None:
    """Ranks of a model whose engines cannot go on without one another."""
    address = free_address()
    together = 'strategy = "one_for_all", backoff = "1ms"'
    async with (
        open_two(address) as (first, _),
        open_joined(group(address, count=2, supervision=together), LOCAL) as cluster,
    ):
        first.die()
        await until(lambda: slot_of(cluster, "v-1").engine.epoch == 1)
        assert not serves(cluster, "v-1")
        async with (
            open_puppet(address, 0) as one,
            open_puppet(address, 1) as other,
            open_living(one, other),
        ):
            await until(lambda: serves(cluster, "v-0", 1) and serves(cluster, "v-1", 1))


async def test_N08_lives_that_come_and_go_leave_nothing_behind() -> None:
    address, seen = free_address(), list[Belongings]()
    async with open_joined(group(address, vllm='join_timeout = "200ms"'), LOCAL) as cluster:
        for epoch in range(20):
            async with open_puppet(address) as puppet, open_living(puppet):
                await until(lambda epoch=epoch: serves(cluster, "v-0", epoch))  # type: ignore[misc]
                puppet.die()
            await until(lambda: "has not said HELLO" in repr(life_of(cluster, "v-0")))
            await trio.testing.wait_all_tasks_blocked()
            seen.append(Belongings.now())

        def nothing_is_left() -> bool:  # libzmq's threads close what they had when they come to it
            now, first = Belongings.now(), seen[0]
            return now.tasks <= first.tasks and len(now.descriptors) <= len(first.descriptors)

        await until(nothing_is_left)
        assert slot_of(cluster, "v-0").restarts == 20
