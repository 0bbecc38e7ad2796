"""Slow clients and silent ones, on a virtual clock: they have what the limits say, and no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

from dpkit.serve.face import Ending
from dpkit.serve.limits import HttpLimits
from dpkit.testing.http import Client, Reply, ReplyReader, open_server, render
from tests.serve.shop import SSE, Shop

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dpkit.serve.face import Handler, Request, Responder
    from dpkit.serve.http import HttpServer
    from dpkit.serve.site import Answered

LIMITS = HttpLimits()
TICK = LIMITS.tick


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


# Slow readers.


async def count_waiting(_request: Request, responder: Responder) -> None:
    """Say what there is to say whenever there is room."""
    responder.start(200, SSE)
    start = said = trio.current_time()
    while said < start + 100:
        await trio.sleep(1)
        await responder.wait_drained()
        now = trio.current_time()
        responder.write(b"." * int(now - said))
        said = now
    responder.finish()


async def count_called_back(_request: Request, responder: Responder) -> None:
    """The same without a task that waits for room."""
    responder.start(200, SSE)
    unsaid = 0

    def say() -> None:
        nonlocal unsaid
        responder.write(b"." * unsaid)
        unsaid = 0

    for _ in range(100):
        await trio.sleep(1)
        unsaid += 1
        if not responder.congested:
            say()
        elif unsaid == 1:
            responder.when_drained(say)
    while unsaid:
        await responder.wait_drained()
        await trio.lowlevel.checkpoint()
    responder.finish()


async def read_slowly(client: Client, pause: float) -> tuple[Reply, list[int]]:
    """Read a whole answer; also returns the sizes of its pieces."""
    reader, pieces = ReplyReader(), []
    while not reader.is_complete and (data := await client.receive()):
        reader.feed(data)
        pieces.append(data.count(b"."))
        await trio.sleep(pause)
    return reader.reply(), pieces


@pytest.mark.parametrize("handler", [count_waiting, count_called_back])
async def test_a_slow_reader_gets_larger_pieces(handler: Handler, clock: object) -> None:
    async with open_server(handler) as server:
        client = Client.of(server, capacity=8)
        client.send(render("GET", "/"))
        reply, pieces = await read_slowly(client, pause=5)
        assert reply.is_complete
        assert reply.body.count(b".") >= 100
        assert max(pieces) > 1
        quick = Client.of(server)
        quick.send(render("GET", "/"))
        reply, pieces = await read_slowly(quick, pause=0)
        assert reply.body == b"." * 100
        assert max(pieces) == 1


async def test_a_slow_reader_is_waited_for_as_long_as_it_reads_at_all(
    shop: Shop, clock: object
) -> None:
    async with shop.serve() as server:
        client = Client.of(server, capacity=10_000)
        client.send(render("GET", "/large?100000"))
        reply, _ = await read_slowly(client, pause=LIMITS.send_timeout - 1)
        assert (len(reply.body), reply.is_complete) == (100_000, True)


@pytest.mark.parametrize("path", ["/stream?1000", "/large?100000"])
async def test_a_client_that_reads_nothing_is_cut_off(shop: Shop, path: str, clock: object) -> None:
    """Behind a proxy that stalls, it looks like this: open, and nothing is taken."""
    async with shop.serve() as server:
        client = Client.of(server, capacity=1000)
        client.send(render("GET", path))
        await trio.lowlevel.checkpoint()
        while not server.statistics().unsent:  # noqa: ASYNC110 - a test may poll
            await trio.sleep(1)
        start = trio.current_time()
        while server.statistics().connections:  # noqa: ASYNC110
            await trio.sleep(TICK / 4)
        assert -1 <= trio.current_time() - start - LIMITS.send_timeout <= 2 * TICK
        assert client.transport.was_reset
        assert server.statistics().unsent == 0
    (answered,) = shop.answered
    if path == "/stream?1000":
        assert (answered.status, answered.ending) == (499, Ending.STALLED)
        assert shop.cancelled
    else:
        assert answered.ending is Ending.FINISHED  # it was all said, if not all sent


async def test_a_handler_that_heeds_nothing_fills_what_it_may_and_no_more(
    clock: object,
) -> None:
    endings = []

    async def handle(_request: Request, responder: Responder) -> None:
        responder.start(200, SSE)
        try:
            while True:
                responder.write(b"x" * 1000)
                await trio.sleep(0.001)
        finally:
            endings.append((responder.ending, trio.current_time()))

    async with open_server(handle, limits=HttpLimits(max_unsent=10_000)) as server:
        client = Client.of(server, capacity=1000)
        client.send(render("GET", "/"))
        most = 0
        while not endings:
            await trio.sleep(0.0005)
            most = max(most, server.statistics().unsent)
        assert 10_000 < most <= 12_000
        assert endings[0][0] is Ending.STALLED
        assert server.statistics().connections == 0


async def test_neighbours_of_a_stalled_reader_notice_nothing(shop: Shop, clock: object) -> None:
    async def arrivals(server: HttpServer) -> list[float]:
        client = Client.of(server)
        start = trio.current_time()
        client.send(render("GET", "/stream?50"))
        times = []
        while data := await client.receive():
            times.append(trio.current_time() - start)
            if data.endswith(b"0\r\n\r\n"):
                break
        return times

    async with shop.serve() as server:
        alone = await arrivals(server)
        stalled = Client.of(server, capacity=0)
        stalled.send(render("GET", "/stream?1000"))
        assert await arrivals(server) == alone


async def test_a_callback_that_fails_ends_its_request_alone(clock: object) -> None:
    async def handle(_request: Request, responder: Responder) -> None:
        responder.start(200, SSE, b"first")
        responder.when_drained(lambda: responder.start(200))
        await trio.sleep(1000)

    answered: list[Answered] = []
    async with open_server(handle, observer=answered.append) as server:
        client = Client.of(server, capacity=10)
        client.send(render("GET", "/"))
        reply = await client.reply()
        assert (reply.body, reply.is_complete) == (b"first", False)
    assert [each.ending for each in answered] == [Ending.FAILED]


async def test_what_a_handler_would_say_later_is_not_said_after_the_end(
    clock: object,
) -> None:
    async def handle(_request: Request, responder: Responder) -> None:
        responder.start(200, SSE, b"first")
        responder.when_drained(lambda: responder.write(b"too late"))
        assert responder.congested
        responder.finish()

    async with open_server(handle) as server:
        client = Client.of(server, capacity=10)
        client.send(render("GET", "/"))
        reply = await client.reply()
        assert (reply.body, reply.is_complete) == (b"first", True)


# Silent clients.


@pytest.mark.parametrize("asked", [0, 3])
async def test_an_idle_connection_is_closed_in_time(shop: Shop, asked: int, clock: object) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        for _ in range(asked):
            await client.request("GET", "/echo")
            await trio.sleep(LIMITS.idle_timeout - 2)
        start = trio.current_time() - (LIMITS.idle_timeout - 2 if asked else 0)
        await client.receive_all()
        assert 0 <= trio.current_time() - start - LIMITS.idle_timeout <= TICK
        await wait_all_tasks_blocked()
        assert server.statistics().connections == 0


async def test_an_answer_may_take_as_long_as_it_likes(shop: Shop, clock: object) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/wait"))
        await trio.sleep(5000)
        shop.gate.set()
        assert (await client.reply()).status == 200


@pytest.mark.parametrize(
    "data",
    [render("GET", "/echo"), render("POST", "/echo", b"x" * 1000)],
    ids=["head", "body"],
)
async def test_a_request_that_drips_in_is_refused_in_time(
    shop: Shop, data: bytes, clock: object
) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        start = trio.current_time()
        for byte in data:
            if client.transport.outgoing:
                break
            client.send(bytes([byte]))
            await trio.sleep(5 if b"GET" in data else 0.5)
        reply = await client.reply()
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["type"]) == (408, "invalid_request_error")
        assert 0 <= trio.current_time() - start - LIMITS.receive_timeout <= TICK + 5
        client.close()
        await trio.sleep(1)
        assert (server.statistics().connections, server.statistics().bodies) == (0, 0)
    assert not shop.seen


@pytest.mark.parametrize("chatty", [True, False])
async def test_a_client_that_will_not_hang_up_is_hung_up_on(
    shop: Shop, clock: object, *, chatty: bool
) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        reply = await client.request("GET", "/echo", headers=[(b"connection", b"close")])
        assert reply.status == 200
        start = trio.current_time()
        while server.statistics().connections:
            if chatty:
                client.send(b"and another thing")
            await trio.sleep(0.1)
        assert 0 <= trio.current_time() - start - LIMITS.linger <= TICK + 0.2
