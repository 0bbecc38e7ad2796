"""A request that fits no engine there can be: refused where it is made, before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import RequestRejected
from dpkit.names import Cause, FinishReason
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.idle import check_idle
from tests.clusters import make_config, told
from tests.nursery.lab import Lab, Timed, settle
from tests.processes.lab import group, open_processes

if TYPE_CHECKING:
    from dpkit.messages import EngineOutput
    from dpkit.nursery.cluster import Cluster

SMALL = "kv = { num_blocks = 2, block_size = 4 }"
LARGE = "kv = { num_blocks = 4, block_size = 4 }"
SAYS = "cannot serve request: 5 prompt tokens and max_tokens = {} need room for {} tokens, {} more"


def check_refused(cluster: Cluster, count: int) -> None:
    """So many requests were refused, each with an end of its own, and no engine was charged."""
    statistics = cluster.client.statistics()
    assert statistics.causes == {Cause.REFUSED: count}
    assert statistics.started == count
    assert not any(ranks for picks in statistics.picks.values() for ranks in picks.values())
    ends = told(cluster, EventKind.REQUEST_ENDED)
    assert [(end.engine, end.reason) for end in ends] == [(None, FinishReason.ERROR)] * count
    check_idle(cluster)


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("policy", ["kv_pressure", "expected_ttft"])
async def test_it_is_refused_on_the_way_in_however_it_comes(
    autojump_clock: object, policy: str, clients: int
) -> None:
    lab = Lab([Timed()], blocks=2, settings=f"balancer.policy = '{policy}'")
    async with lab.open(clients=clients) as cluster:
        client = cluster.client
        got: list[EngineOutput] = []
        with pytest.raises(RequestRejected, match=SAYS.format(6, 10, 2)) as caught:
            await client.generate("hello", max_tokens=6, request_id="r").__aenter__()
        assert caught.value.request_id == "r"
        with pytest.raises(RequestRejected, match="2 more"):
            await client.complete("hello", max_tokens=6)
        with pytest.raises(RequestRejected, match="2 more"):
            client.submit("hello", max_tokens=6, sink=got.append)
        with pytest.raises(RequestRejected, match="2 more"):
            client.submit_many("hello", max_tokens=6, sinks=[got.append, got.append])
        assert trio.current_time() == 0
        await settle()
        assert got == []
        check_refused(cluster, 4)


async def test_nobody_waits_in_a_queue_to_hear_of_it(autojump_clock: object) -> None:
    settings = "admission = { max_inflight = 1, max_queued = 0 }"
    async with Lab([Timed()], blocks=2, settings=settings).open() as cluster:
        async with cluster.client.generate("hello", max_tokens=4):
            with pytest.raises(RequestRejected, match="2 more"):
                await cluster.client.complete("hello", max_tokens=6)
        await settle()
        check_idle(cluster)


async def test_of_engines_of_different_sizes_the_largest_counts() -> None:
    groups = [
        f"[[engines]]\nname = '{name}'\nmodel = 'echo'\n{size}\n"
        for name, size in (("small", SMALL), ("large", LARGE))
    ]
    async with open_cluster(make_config(*groups)) as cluster:
        fits = await cluster.client.complete("hello", max_tokens=12, engine="large-0")
        assert fits.text == "hello"
        with pytest.raises(RequestRejected, match=SAYS.format(13, 17, 1)):
            await cluster.client.complete("hello", max_tokens=13, engine="large-0")
        stream = cluster.client.generate("hello", max_tokens=12, engine="small-0")
        async with stream:  # it is for the engine to say
            with pytest.raises(RequestRejected, match=SAYS.format(12, 16, 8)):
                await stream.read_all()


async def test_a_new_config_says_anew_what_fits() -> None:
    small, large = (f"[[engines]]\nname = 'e'\nmodel = 'echo'\n{size}\n" for size in (SMALL, LARGE))
    async with open_cluster(make_config(small)) as cluster:
        with pytest.raises(RequestRejected, match="8 more"):
            await cluster.client.complete("hello", max_tokens=12)
        await cluster.apply(make_config(large))
        assert (await cluster.client.complete("hello", max_tokens=12)).text == "hello"


async def test_nothing_of_it_is_sent_to_an_engine_in_a_process() -> None:
    async with open_processes(group(more="kv.num_blocks = 8")) as cluster:
        with pytest.raises(RequestRejected, match=r"cannot serve request: .* more than the KV"):
            await cluster.client.complete("x" * 3_000_000)
        check_refused(cluster, 1)
