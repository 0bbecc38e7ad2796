"""A client that leaves, at any moment and in any way: its engine is free within a step."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit.names import Cause
from dpkit.serve.face import Ending
from dpkit.testing.http import Client, render
from dpkit.testing.idle import check_idle
from tests.nursery.lab import Lab, settle
from tests.serve.desk import COMPLETIONS, SLOW, events, open_desk, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

ENDLESS = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 5000}
CHUNKED = "max_num_seqs = 2, max_num_batched_tokens = 4"
"""A prompt of 200 tokens takes fifty steps."""


def _ask(client: Client, **fields: Any) -> None:
    client.send(render("POST", COMPLETIONS, json.dumps(ENDLESS | fields).encode()))


LEAVING = pytest.mark.parametrize("leave", [Client.close, Client.reset, Client.end])
STREAM = pytest.mark.parametrize("stream", [True, False])


@LEAVING
@STREAM
@pytest.mark.parametrize("after", [0.0, 0.05, 0.25, 2.05])
async def test_D03_D04_whoever_leaves_frees_its_engine_within_a_step(
    after: float, stream: bool, leave: Callable[[Client], None], autojump_clock: MockClock
) -> None:
    """Plain requests too; before the first token, in the midst of a step, after many."""
    async with open_desk(SLOW) as desk:
        client = desk.client()
        _ask(client, stream=stream)
        await trio.sleep(after)
        await trio.testing.wait_all_tasks_blocked()
        leave(client)
        await settle()
        check_idle(desk.cluster)
        assert desk.cluster.client.statistics().causes == {Cause.CLIENT: 1}
        [generated] = desk.generated
        assert generated.ending is Ending.CLIENT_GONE
        assert generated.finish_reasons == (None,)
        assert [answered.status for answered in desk.answered] == [499]


@LEAVING
@STREAM
async def test_D05_prefill_stops_at_the_next_chunk_and_the_next_request_runs(
    stream: bool, leave: Callable[[Client], None], autojump_clock: MockClock
) -> None:
    lab = Lab(scheduler=CHUNKED)
    with lab.config() as config:
        async with open_desk(config) as desk:
            client = desk.client()
            body = json.dumps(ENDLESS | {"prompt": "x" * 200, "stream": stream}).encode()
            client.send(render("POST", COMPLETIONS, body, [(b"x-data-parallel-rank", b"0")]))
            await trio.sleep(0.25)
            leave(client)
            await settle()
            check_idle(desk.cluster)
            asked = {"prompt": "ab", "max_tokens": 1}
            began_at = trio.current_time()
            reply = await desk.post(COMPLETIONS, asked, x_data_parallel_rank="0")
            assert reply.status == 200
            assert trio.current_time() - began_at <= 0.11
            first = {request_id for _, ids in lab.watched[0].steps[:3] for request_id in ids}
            later = {request_id for _, ids in lab.watched[0].steps[4:] for request_id in ids}
            assert first.isdisjoint(later)


@STREAM
async def test_D09_who_leaves_the_queue_is_never_scheduled(
    stream: bool, autojump_clock: MockClock
) -> None:
    lab = Lab(settings="[admission]\nmax_inflight = 1\n")
    with lab.config() as config:
        async with open_desk(config) as desk, trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(desk.ask, COMPLETIONS, prompt="abc", max_tokens=30, ignore_eos=True)
            )
            await trio.sleep(0.15)
            clients = [desk.client() for _ in range(20)]
            for client in clients:
                _ask(client, stream=stream, max_tokens=1)
            await trio.sleep(0.1)
            assert desk.cluster.client.statistics().queued == 20
            for client in clients[:15]:
                client.close()
            await trio.testing.wait_all_tasks_blocked()
            assert desk.cluster.client.statistics().queued == 5
            for client in clients[15:]:
                assert (await client.reply()).status == 200
        steps = [ids for watched in lab.watched for _, ids in watched.steps]
        assert len({request_id for ids in steps for request_id in ids}) == 6


async def test_D13_those_who_stay_are_not_disturbed_by_those_who_leave(
    autojump_clock: MockClock,
) -> None:
    async with open_desk(SLOW) as desk, trio.open_nursery() as nursery:
        clients = [desk.client() for _ in range(8)]
        times: list[float] = []

        async def stay(client: Client) -> None:
            reply = await client.reply()
            assert text_of(events(reply.body)) == "abcdefgh" * 3
            times.append(round(trio.current_time(), 6))

        for client in clients:
            _ask(client, stream=True, max_tokens=24)
        for client in clients[3:]:
            nursery.start_soon(stay, client)
        await trio.sleep(0.55)
        for client in clients[:3]:
            client.close()
        await settle()
        running = sum(each.core.running for each in desk.cluster.statistics().engines)
        assert running == 5
        nursery.cancel_scope.deadline = trio.current_time() + 60
    assert times == [2.4] * 5


async def test_D01_the_abort_reaches_the_engine_after_three_tokens(
    autojump_clock: MockClock,
) -> None:
    lab = Lab()
    with lab.config() as config:
        async with open_desk(config) as desk:
            client = desk.client()
            _ask(client, stream=True, max_tokens=200)
            read = b""
            while read.count(b"data: ") < 3:
                read += await client.receive()
            client.close()
            await trio.sleep(5)
            steps = [ids for watched in lab.watched for _, ids in watched.steps]
            assert len(steps) <= 4


async def test_D10_the_next_turn_of_a_conversation_is_not_touched_by_the_last(
    autojump_clock: MockClock,
) -> None:
    async with open_desk(SLOW) as desk:
        for _ in range(5):
            client = desk.client()
            client.send(
                render(
                    "POST",
                    COMPLETIONS,
                    json.dumps(ENDLESS | {"stream": True}).encode(),
                    [(b"x-request-id", b"turn")],
                )
            )
            await trio.sleep(0.25)
            client.close()
            reply = await desk.post(COMPLETIONS, {"prompt": "next"}, x_request_id="turn")
            assert json.loads(reply.body)["choices"][0]["text"] == "next"


async def test_D11_a_stream_that_nobody_reads_is_aborted_in_time(autojump_clock: MockClock) -> None:
    async with open_desk(f"{SLOW}[server]\nsend_timeout = '20s'\n") as desk:
        client = desk.client(capacity=1000)
        _ask(client, stream=True)
        await trio.sleep(15)
        assert desk.cluster.client.statistics().causes == {}
        await trio.sleep(15)
        check_idle(desk.cluster)
        [generated] = desk.generated
        assert generated.ending is Ending.STALLED


async def test_a_slow_reader_gets_larger_pieces_and_delays_nobody(
    autojump_clock: MockClock,
) -> None:
    async with open_desk(SLOW) as desk, trio.open_nursery() as nursery:
        slow, quick = desk.client(capacity=700), desk.client()
        _ask(slow, stream=True, max_tokens=64)
        _ask(quick, stream=True, max_tokens=64)

        async def read_all(client: Client) -> None:
            reply = await client.reply()
            assert round(trio.current_time(), 6) == 6.4
            assert text_of(events(reply.body)) == "abcdefgh" * 8

        nursery.start_soon(read_all, quick)
        await trio.sleep(6.5)
        assert desk.server.statistics().unsent < 1000
        reply = await slow.reply()
        said = events(reply.body)
        assert text_of(said) == "abcdefgh" * 8
        assert len(said) < 10
        assert desk.cluster.client.statistics().causes == {Cause.LENGTH: 2}


async def test_usage_and_logprobs_survive_a_slow_reader(autojump_clock: MockClock) -> None:
    async with open_desk(SLOW) as desk:
        slow = desk.client(capacity=700)
        options = {"include_usage": True}
        _ask(slow, stream=True, max_tokens=64, n=2, logprobs=0, stream_options=options)
        await trio.sleep(7)
        said = events((await slow.reply()).body)
        assert text_of(said, 0) == text_of(said, 1) == "abcdefgh" * 8
        assert said[-2]["usage"]["completion_tokens"] == 128
        for index in range(2):
            choices = [choice for event in said[:-1] for choice in event["choices"]]
            told = [choice["logprobs"] for choice in choices if choice["index"] == index]
            assert sum(len(each["tokens"]) for each in told) == 64
            offsets = [offset for each in told for offset in each["text_offset"]]
            assert offsets == [*range(64)]


async def test_what_fails_while_the_client_does_not_read_is_told_with_what_came_before(
    autojump_clock: MockClock,
) -> None:
    async with open_desk(SLOW) as desk:
        slow = desk.client(capacity=700)
        _ask(slow, stream=True, timeout=3.05)
        await trio.sleep(4)
        reply = await slow.reply()
        *said, last = events(reply.body)
        assert reply.is_complete
        assert text_of(said) == ("abcdefgh" * 9)[:30]
        assert last["error"]["code"] == "deadline_exceeded"


async def test_of_several_choices_all_are_aborted_when_their_client_leaves(
    autojump_clock: MockClock,
) -> None:
    async with open_desk(SLOW) as desk:
        for prompt in ["ab", ["a", "b", "c"]]:
            client = desk.client()
            _ask(client, prompt=prompt, n=4, stream=True)
            await trio.sleep(0.35)
            client.close()
            await settle()
            check_idle(desk.cluster)
        assert desk.cluster.client.statistics().causes == {Cause.CLIENT: 16}
