"""What is answered there and then: probes, at no turn of a task, whatever else a client does."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.serve.face import Ending
from dpkit.serve.limits import HttpLimits
from dpkit.testing.http import Client, MemoryTransport, open_server, render
from tests.serve.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.face import Request, Responder
    from dpkit.serve.http import HttpServer


class ShopWithPings(Shop):
    """Has `/ping` for the handler, too, as a router has its probes."""

    async def ping(self, request: Request, responder: Responder) -> None:
        await self.echo(request, responder)


@pytest.fixture
def shop() -> Shop:
    return ShopWithPings()


def answer_pings(request: Request, responder: Responder) -> bool:
    """The quick way, beside a handler."""
    if request.path == "/ping":
        responder.respond(200, (), request.body)
    elif request.path == "/slip":
        raise KeyError("no such thing")
    return request.path == "/ping"


async def test_what_can_be_answered_at_once_never_comes_to_the_handler(shop: Shop) -> None:
    async with open_server(shop.handle, quick=answer_pings, observer=shop.answered.append) as made:
        client = Client.of(made)
        for path in ("/ping", "/echo", "/ping"):
            reply = await client.request("POST", path, b"hello")
            assert (reply.status, reply.body, reply.is_complete) == (200, b"hello", True)
        assert made.statistics().answered == 3
        assert made.statistics().idle == 1
        assert made.statistics().bodies == 0, "their bytes are given back"
    assert shop.seen == ["/echo"]
    assert [each.ending for each in shop.answered] == [Ending.FINISHED] * 3


@pytest.mark.parametrize("second", ["/ping", "/echo"])
async def test_of_several_requests_in_one_segment_the_first_is_answered_and_ends_it(
    shop: Shop, second: str
) -> None:
    async with open_server(shop.handle, quick=answer_pings, observer=shop.answered.append) as made:
        client = Client.of(made)
        client.send(render("GET", "/ping") + render("POST", second, b"hello"))
        assert (await client.reply()).headers["connection"] == "close"
        assert await client.receive() == b""
        client.close()
        await gone(made)
        assert made.statistics().bodies == 0
    assert shop.seen == ["/ping"]
    assert len(shop.answered) == 1


@pytest.mark.parametrize("leaves", ["close", "reset"])
async def test_nothing_begins_for_a_client_that_has_left(shop: Shop, leaves: str) -> None:
    async with open_server(shop.handle, quick=answer_pings, observer=shop.answered.append) as made:
        client = Client.of(made)
        client.transport.incoming += render("GET", "/ping") + render("GET", "/wait")
        getattr(client, leaves)()
        await gone(made)
    assert "/wait" not in shop.seen


async def test_nothing_more_is_said_after_the_answer_to_who_wants_no_other(shop: Shop) -> None:
    async with open_server(shop.handle, quick=answer_pings, observer=shop.answered.append) as made:
        client = Client.of(made)
        client.send(render("GET", "/ping", headers=[(b"connection", b"close")]) + b"GET / HT")
        assert (await client.receive_all()).count(b"HTTP/1.1 ") == 1
        client.close()
        await gone(made)
    assert len(shop.answered) == 1


async def test_a_client_that_asks_and_never_reads_is_given_up(shop: Shop) -> None:
    limits = HttpLimits(max_unsent=10_000)
    async with open_server(shop.handle, quick=answer_pings, limits=limits) as made:
        client = Client.of(made, capacity=1000)
        with trio.fail_after(5):
            while made.statistics().connections:
                client.send(render("POST", "/ping", b"x" * 500))
                await trio.lowlevel.checkpoint()
                assert made.statistics().unsent < 11_000
        assert made.statistics().bodies == 0


async def test_a_probe_beside_an_answer_under_way_is_not_taken(shop: Shop) -> None:
    async with open_server(shop.handle, quick=answer_pings) as made:
        client = Client.of(made)
        client.send(render("GET", "/wait") + render("GET", "/ping"))
        shop.gate.set()
        reply = await client.reply()
        assert (reply.body, reply.headers["connection"]) == (b"done", "close")


async def test_who_closes_after_a_probe_is_let_go(shop: Shop) -> None:
    async with open_server(shop.handle, quick=answer_pings) as made:
        client = Client.of(made)
        reply = await client.request("GET", "/ping", headers=[(b"connection", b"close")])
        assert reply.headers["connection"] == "close"
        assert await client.receive() == b""
        client.close()
        await gone(made)


async def gone(server: HttpServer) -> None:
    with trio.fail_after(5):
        while server.statistics().connections:
            await trio.lowlevel.checkpoint()


async def test_a_quick_answer_that_raises_is_a_500_and_no_more(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_server(shop.handle, quick=answer_pings, observer=shop.answered.append) as made:
        client, other = Client.of(made), Client.of(made)
        assert (await other.request("GET", "/ping")).status == 200
        reply = await client.request("POST", "/slip", b"hello")
        assert (reply.status, reply.headers["connection"]) == (500, "close")
        assert (await other.request("GET", "/ping")).status == 200
        assert made.statistics().bodies == 0
    assert [each.ending for each in shop.answered][1] is Ending.FAILED
    assert "the handler failed" in caplog.text


async def test_a_quick_answer_that_says_nothing_is_a_500(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_server(shop.handle, quick=lambda *_: True) as made:
        assert (await Client.of(made).request("GET", "/ping")).status == 500
    assert "returned without having finished" in caplog.text


class Unwatched(MemoryTransport):
    """Tells nobody that something has come."""

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Do nothing."""


async def test_what_came_with_the_connection_waits_for_nobody_to_tell_of_it(shop: Shop) -> None:
    async with open_server(shop.handle, quick=answer_pings) as made:
        transport = Unwatched()
        transport.incoming += render("GET", "/ping")
        made.connect(transport)
        with trio.fail_after(5):
            assert (await Client(transport).receive()).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_keeps_nothing_of_the_request_before() -> None:
    kept: list[weakref.ref[Request]] = []

    async def answer(request: Request, responder: Responder) -> None:
        kept.append(weakref.ref(request))
        responder.respond(200, (), b"")

    gc.disable()
    try:
        async with open_server(answer) as made:
            client = Client.of(made)
            for _ in range(2):
                assert (await client.request("POST", "/", b"x" * 1000)).status == 200
            await trio.testing.wait_all_tasks_blocked()
            assert made.statistics().idle == 1
            assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


async def test_one_too_many_that_leaves_at_once_is_no_fault(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_server(shop.handle, limits=HttpLimits(max_connections=1)) as made:
        first = Client.of(made)
        first.send(render("GET", "/wait"))
        await trio.testing.wait_all_tasks_blocked()
        Client.of(made).reset()
        await trio.testing.wait_all_tasks_blocked()
        shop.gate.set()
        assert (await first.reply()).status == 200
    assert "fault" not in caplog.text
