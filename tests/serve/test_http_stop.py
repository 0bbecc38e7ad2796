"""How the HTTP server ends, and how many clients it takes: in phases, on a virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dpkit.serve.face import Ending
from dpkit.serve.http import serve_http
from dpkit.serve.limits import HttpLimits
from dpkit.testing.http import Client, open_server, render
from tests.serve.shop import SSE, Shop

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dpkit.serve.face import Request, Responder
    from dpkit.serve.http import HttpServer

LIMITS = HttpLimits()
LAST_WORDS = 1.0


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


async def started(nursery: trio.Nursery, shop: Shop) -> tuple[HttpServer, trio.Event]:
    """A server whose return is an event."""
    returned = trio.Event()

    async def serve(task_status: trio.TaskStatus[HttpServer]) -> None:
        await serve_http(shop.handle, (), observer=shop.answered.append, task_status=task_status)
        returned.set()

    return await nursery.start(serve), returned


async def test_with_nothing_to_do_it_ends_at_once(shop: Shop, clock: object) -> None:
    async with trio.open_nursery() as nursery:
        server, returned = await started(nursery, shop)
        fresh, used = Client.of(server), Client.of(server)
        assert (await used.request("GET", "/echo")).status == 200
        start = trio.current_time()
        server.stop(start + 100)
        assert await fresh.receive() == await used.receive() == b""
        await returned.wait()
        assert trio.current_time() == start


async def test_requests_under_way_are_finished(shop: Shop, clock: object) -> None:
    """In whichever state: being received, answered, streamed."""
    async with trio.open_nursery() as nursery:
        server, returned = await started(nursery, shop)
        receiving, waiting, streaming = (Client.of(server) for _ in range(3))
        request = render("POST", "/echo", b"hello")
        receiving.send(request[:-2])
        waiting.send(render("GET", "/wait"))
        streaming.send(render("GET", "/stream?5"))
        await trio.sleep(2)
        server.stop(trio.current_time() + 100)
        await trio.sleep(1)
        receiving.send(request[-2:])
        reply = await receiving.reply()
        assert (reply.body, reply.headers["connection"]) == (b"hello", "close")
        shop.gate.set()
        reply = await waiting.reply()
        assert (reply.body, reply.headers["connection"]) == (b"done", "close")
        reply = await streaming.reply()
        assert reply.is_complete
        answered_at = trio.current_time()
        assert await streaming.receive() == b""  # its head could not say so
        await returned.wait()
        assert trio.current_time() == answered_at, "it does not wait for clients to hang up"
    assert {each.ending for each in shop.answered} == {Ending.FINISHED}


async def test_who_connects_now_comes_too_late(shop: Shop, clock: object) -> None:
    async with trio.open_nursery() as nursery:
        server, returned = await started(nursery, shop)
        streaming = Client.of(server)
        streaming.send(render("GET", "/stream?5"))
        await trio.sleep(1)
        server.stop(trio.current_time() + 100)
        late = Client.of(server)
        with pytest.raises(ConnectionResetError):
            await late.receive()
        streaming.send(render("GET", "/echo"))
        assert (await streaming.reply()).is_complete
        streaming.close()
        await returned.wait()
    assert shop.seen == ["/stream"]


async def test_what_is_unfinished_at_the_deadline_is_cancelled(shop: Shop, clock: object) -> None:
    async with trio.open_nursery() as nursery:
        server, returned = await started(nursery, shop)
        receiving, waiting, streaming = (Client.of(server) for _ in range(3))
        receiving.send(render("POST", "/echo", b"hello")[:-2])
        waiting.send(render("GET", "/wait"))
        streaming.send(render("GET", "/stream?1000"))
        await trio.sleep(2)
        deadline = trio.current_time() + 10
        server.stop(deadline)
        reply = await waiting.reply()
        assert trio.current_time() == deadline
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert b"stopping" in reply.body
        assert (await receiving.reply()).status == 503
        reply = await streaming.reply()
        assert not reply.is_complete
        await returned.wait()
        assert trio.current_time() <= deadline + LAST_WORDS
    assert sorted(shop.cancelled) == [("/stream", deadline), ("/wait", deadline)]
    assert {each.ending for each in shop.answered if each.request} == {Ending.SHUTDOWN}


async def test_a_stream_that_is_cancelled_may_have_a_last_word(clock: object) -> None:
    async def handle(_request: Request, responder: Responder) -> None:
        responder.start(200, SSE, b"data: first\n\n")
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if responder.ending is Ending.SHUTDOWN:
                responder.write(b"data: stopping\n\n")
                responder.finish()
            raise

    async with open_server(handle) as server:
        client = Client.of(server)
        client.send(render("GET", "/"))
        await trio.sleep(1)
        server.stop(trio.current_time())
        reply = await client.reply()
        assert (reply.body, reply.is_complete) == (b"data: first\n\ndata: stopping\n\n", True)


async def test_the_second_stop_may_be_sooner_but_not_later(shop: Shop, clock: object) -> None:
    async with trio.open_nursery() as nursery:
        server, returned = await started(nursery, shop)
        client = Client.of(server)
        client.send(render("GET", "/wait"))
        await trio.sleep(1)
        server.stop(100)
        server.stop(1000)
        await trio.sleep(10)
        server.stop(50)
        assert (await client.reply()).status == 503
        assert trio.current_time() == 50
        client.close()
        await returned.wait()


async def test_nothing_a_client_does_holds_the_end_up(shop: Shop, clock: object) -> None:
    """One that reads nothing, and one whose handler tidies up for ever after its answer."""
    async with trio.open_nursery() as nursery:
        server, returned = await started(nursery, shop)
        stalled, tidied = Client.of(server, capacity=10), Client.of(server)
        stalled.send(render("GET", "/large?100000"))
        await tidied.request("POST", "/answer_and_tidy", b"x")
        server.stop(trio.current_time() + 5)
        await returned.wait()
        assert trio.current_time() <= 5 + LAST_WORDS
    assert sorted(shop.ended) == sorted(shop.seen)


@pytest.mark.parametrize("path", ["/wait", "/wait_midway", "/large?100000", "/answer_and_tidy"])
async def test_cancelled_from_outside_it_leaves_nothing(shop: Shop, path: str) -> None:
    clients = []
    async with trio.open_nursery() as nursery:
        server, _ = await started(nursery, shop)
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(5):
            clients.append(Client.of(server, capacity=500))
            clients[-1].send(render("POST", path, b"body"))
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living > before
        nursery.cancel_scope.cancel()
    assert all(each.transport.is_closed for each in clients)
    assert server.statistics().connections == 0
    assert server.statistics().bodies == 0
    assert len(shop.ended) == len(shop.answered) == 5


# How many.


async def test_the_longest_idle_gives_way(shop: Shop, clock: object) -> None:
    async with shop.serve(max_connections=3) as server:
        clients = [Client.of(server) for _ in range(3)]
        for each in (clients[1], clients[0], clients[2]):
            await trio.sleep(1)
            assert (await each.request("GET", "/echo")).status == 200
        late = Client.of(server)
        assert (await late.request("GET", "/echo")).status == 200
        assert await clients[1].receive() == b""
        assert (await clients[0].request("GET", "/echo")).status == 200
        assert server.statistics().connections == 3


async def test_busy_ones_do_not_give_way(shop: Shop, clock: object) -> None:
    async with shop.serve(max_connections=2) as server:
        busy = [Client.of(server) for _ in range(2)]
        for each in busy:
            each.send(render("GET", "/wait"))
        await trio.sleep(1)
        for _ in range(5):
            late = Client.of(server)
            late.send(render("POST", "/echo", b"x" * 1000))
            reply = await late.reply()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert reply.headers["connection"] == "close"
            late.close()
        await wait_all_tasks_blocked()
        assert server.statistics().connections == 2
        assert server.statistics().turned_away == 5
        shop.gate.set()
        for each in busy:
            assert (await each.reply()).status == 200
        await trio.sleep(1)
        assert (await Client.of(server).request("GET", "/echo")).status == 200


async def test_a_crowd_at_the_door_is_turned_away_and_costs_little(
    shop: Shop, clock: object
) -> None:
    async with shop.serve(max_connections=2) as server:
        busy = [Client.of(server) for _ in range(2)]
        for each in busy:
            each.send(render("GET", "/wait"))
        await trio.sleep(1)
        crowd = [Client.of(server) for _ in range(500)]
        assert server.statistics().connections <= 100
        assert sum(each.transport.was_reset for each in crowd) >= 400
        await trio.sleep(LIMITS.linger + LIMITS.tick + 1)
        assert server.statistics().connections == 2
        shop.gate.set()
        assert (await busy[0].reply()).status == 200
