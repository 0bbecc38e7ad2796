"""Many requests at once, half of them left: nothing is lost, doubled, or told to the wrong one."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.errors import RequestRejected
from dpkit.names import Cause
from dpkit.nursery.events import EventKind
from dpkit.testing.history import History
from tests.clusters import is_idle, told
from tests.processes.lab import SUPERVISION, group, life_of, open_processes
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.link.zmq import WireConnection
    from dpkit.nursery.cluster import Cluster

CROWD = 2000
ROOM = f"admission.max_queued = {CROWD}"


def connections(cluster: Cluster) -> Iterator[WireConnection]:
    """The head's end of every engine."""
    for slot in cluster._slots:
        connection = life_of(cluster, slot.name)._connection
        assert connection is not None
        yield connection


async def test_E13_two_thousand_requests_at_once_are_answered_and_nobody_is_killed() -> None:
    supervision = SUPERVISION.replace('"10s"', '"500ms"')
    async with open_processes(group(count=2, supervision=supervision), settings=ROOM) as cluster:
        async with trio.open_nursery() as nursery:

            async def ask(number: int) -> None:
                text = f"{number} is my number" * (1 + number % 3)
                completion = await cluster.client.complete(text)
                assert completion.text == text

            for number in range(CROWD):
                nursery.start_soon(ask, number)
        statistics = cluster.client.statistics()
        assert statistics.causes == {Cause.STOP: CROWD}
        assert statistics.late_outputs == 0
        assert not told(cluster, EventKind.ENGINE_LOST, EventKind.ENGINE_STUCK)
        assert sum(each.totals.requests for each in cluster.statistics().engines) == CROWD


async def test_half_of_a_crowd_leaves_and_the_other_half_does_not_notice() -> None:
    rng, history = random.Random(3), History()
    async with open_processes(group(count=2), settings=ROOM) as cluster:
        async with trio.open_nursery() as nursery:

            async def ask(number: int) -> None:
                text = f"{number} is my number, and this goes on for a while"
                entry = await history.complete(cluster.client, text, request_id=f"{number}")
                assert entry.tokens == [*text.encode(), 256]

            async def leave(number: int, moment: float) -> None:
                with trio.move_on_after(moment):
                    await ask(number)

            for number in range(CROWD):
                if number % 2:
                    nursery.start_soon(ask, number)
                else:
                    nursery.start_soon(leave, number, rng.uniform(0, 0.5))
        await until(lambda: is_idle(cluster))
        history.check(cluster)
        statistics, causes = cluster.client.statistics(), cluster.client.statistics().causes
        assert sum(causes.values()) == statistics.started
        assert causes[Cause.CLIENT] > 0
        assert causes[Cause.STOP] >= CROWD / 2
        assert not any(connection._aborting for connection in connections(cluster))


async def test_late_outputs_are_counted_and_reach_nobody() -> None:
    async with open_processes(group(model="Paced")) as cluster:
        [connection] = connections(cluster)
        while not connection.late_outputs:
            async with cluster.client.generate("abcdef", ignore_eos=True, request_id="x") as stream:
                await stream.__anext__()
                await trio.sleep(0.004)  # about when the next token is on its way
        completion = await cluster.client.complete("zyx", request_id="x")
        assert completion.text == "zyx", "of the same name, and none of the other's tokens"


async def test_D10_an_id_that_comes_again_at_once_is_another_request() -> None:
    """On the wire ids are unique, so that an abort of the first cannot hit the second."""
    async with open_processes(group(model="Paced")) as cluster:
        for round_ in range(30):
            text = f"{round_} now"
            async with cluster.client.generate("something else", request_id="same") as stream:
                if round_ % 3:
                    await stream.__anext__()
            completion = await cluster.client.complete(text, request_id="same")
            assert completion.text == text
        assert cluster.client.statistics().causes == {Cause.CLIENT: 30, Cause.STOP: 30}


async def test_an_id_in_flight_is_refused_here_as_with_local_engines() -> None:
    async with (
        open_processes(group(model="Paced", count=2)) as cluster,
        cluster.client.generate("abc", request_id="same", ignore_eos=True),
    ):
        with pytest.raises(RequestRejected, match="in flight already"):
            await cluster.client.complete("abc", request_id="same")


async def test_what_an_engine_would_not_read_is_refused_and_costs_it_nothing() -> None:
    large: dict[str, dict[str, Any]] = {
        "x" * 3000: {},
        "x" * 1200: {"request_id": "y" * 1000},
        "x" * 1201: {"cache_salt": "y" * 1000},
    }
    async with open_processes(group(process='max_message = "2KiB"')) as cluster:
        async with cluster.client.generate("undisturbed" * 10) as stream:
            for prompt, options in large.items():
                with pytest.raises(RequestRejected, match=r"engines\.process\.max_message"):
                    await cluster.client.complete(prompt, **options)
            assert (await stream.read_all()).text == "undisturbed" * 10
        assert not told(cluster, EventKind.ENGINE_LOST)


@pytest.mark.slow
async def test_what_the_config_lets_an_engine_read_it_reads() -> None:
    async with open_processes(group(process='max_message = "128MiB"')) as cluster:
        salt = "y" * (70 * 2**20)  # more than is read unless somebody says so
        assert (await cluster.client.complete("hello", cache_salt=salt)).text == "hello"


async def test_whatever_an_id_is_made_of_its_request_ends_once() -> None:
    async with open_processes(group()) as cluster:
        for request_id in ["\0", "ü" * 100, "a-0", "a", "a\nb"]:
            completion = await cluster.client.complete("hello", request_id=request_id)
            assert (completion.text, completion.request_id) == ("hello", request_id)
        with pytest.raises(RequestRejected):
            await cluster.client.complete("hello", request_id="\udc80")  # no message can carry it
        assert cluster.client.statistics().causes == {Cause.STOP: 5, Cause.REFUSED: 1}


async def test_J01_bad_requests_are_no_failure_of_the_engine() -> None:
    async with open_processes(group(count=2, more="kv.num_blocks = 8")) as cluster:
        for name in ("e-0", "e-1"):
            for _ in range(10):
                with pytest.raises(RequestRejected, match="cannot serve request"):
                    await cluster.client.complete("x" * 1000, engine=name)
        assert (await cluster.client.complete("hello", max_tokens=9)).text == "hello"
        assert cluster.statistics().health.ejections == 0
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_requests_of_sinks_go_over_the_wire_as_well() -> None:
    async with open_processes(group(count=2)) as cluster:
        heard: dict[str, list[int]] = {}
        ended = 0

        def sink(output: Any) -> None:
            nonlocal ended
            heard.setdefault(output.request_id, []).extend(output.token_ids)
            ended += output.finish_reason is not None

        for number in range(50):
            cluster.client.submit(f"{number} hello", sink=sink, request_id=f"{number}")
        await until(lambda: ended == 50)
        for name, tokens in heard.items():
            assert bytes(tokens[:-1]).decode() == f"{name} hello"


async def test_how_busy_a_process_is_reaches_the_coordinator() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(cluster.client.complete, f"{number} takes a while to say")
            await until(lambda: all(e.core.running for e in cluster.statistics().engines))
        statistics = cluster.statistics()
        assert statistics.fanin.received > 4
        assert all(each.core.steps > 10 for each in statistics.engines)
        assert all(each.core.peak_kv_usage > 0 for each in statistics.engines)
