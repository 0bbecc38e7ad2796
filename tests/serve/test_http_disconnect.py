"""A client that leaves: whenever it does and however, what was done for it ends, and only that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dpkit.serve.face import Ending
from dpkit.testing.http import Client, render
from tests.serve.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.http import HttpServer

WAYS = [Client.close, Client.reset, Client.end]
NAMES = ["FIN", "RST", "half-close"]
leaves = pytest.mark.parametrize("leave", WAYS, ids=NAMES)


@pytest.fixture
def shop() -> Shop:
    return Shop()


def is_as_new(server: HttpServer) -> bool:
    """Whether it holds nothing of any client."""
    now = server.statistics()
    return (now.connections, now.unsent, now.bodies) == (0, 0, 0)


@leaves
@pytest.mark.parametrize("path", ["/wait", "/wait_midway", "/stream?9"])
async def test_a_handler_is_cancelled_at_once(
    shop: Shop, leave: Callable[[Client], None], path: str, autojump_clock: object
) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("POST", path, b"prompt"))
        await trio.sleep(1.5)
        assert server.statistics().answering == 1
        leave(client)
        left_at = trio.current_time()
        await wait_all_tasks_blocked()
        assert shop.cancelled == [(path.partition("?")[0], left_at)]
        assert is_as_new(server)
        assert client.transport.is_closed
    (answered,) = shop.answered
    assert (answered.status, answered.ending) == (499, Ending.CLIENT_GONE)
    assert answered.seconds == 1.5


@leaves
async def test_for_a_client_that_has_left_nothing_is_begun(
    shop: Shop, leave: Callable[[Client], None]
) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("POST", "/wait", b"prompt"))
        leave(client)
        await wait_all_tasks_blocked()
        assert is_as_new(server)
    # Whether the handler had begun is a race; if so, it was cancelled.
    assert shop.ended == shop.seen
    assert {each.ending for each in shop.answered} <= {Ending.CLIENT_GONE}


@leaves
async def test_what_follows_an_answer_is_not_cancelled(
    shop: Shop, leave: Callable[[Client], None]
) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        assert (await client.request("POST", "/answer_and_tidy", b"x")).status == 200
        leave(client)
        await wait_all_tasks_blocked()
        assert not shop.ended
        shop.gate.set()
        await wait_all_tasks_blocked()
        assert is_as_new(server)
    assert (shop.ended, shop.cancelled) == (["/answer_and_tidy"], [])
    assert [each.ending for each in shop.answered] == [Ending.FINISHED]


async def test_a_request_that_waited_for_such_a_handler_is_never_begun(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        await client.request("POST", "/answer_and_tidy", b"x")
        client.send(render("POST", "/echo", b"prompt"))
        await wait_all_tasks_blocked()
        client.close()
        await wait_all_tasks_blocked()
        shop.gate.set()
        await wait_all_tasks_blocked()
        assert is_as_new(server)
    assert shop.seen == ["/answer_and_tidy"]
    assert [each.ending for each in shop.answered] == [Ending.FINISHED, Ending.CLIENT_GONE]


async def test_a_writer_learns_of_it_before_the_reader_does(shop: Shop) -> None:
    """The failed write ends the request, and is no error of the handler's."""
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/wait_midway"))
        await wait_all_tasks_blocked()
        client.transport.client_ended = BrokenPipeError  # no end of stream: nobody wakes the reader
        shop.gate.set()
        await wait_all_tasks_blocked()
        assert is_as_new(server)
    assert [each.ending for each in shop.answered] == [Ending.CLIENT_GONE]


async def test_a_handler_may_write_on_to_nobody(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/wait_midway"))
        await wait_all_tasks_blocked()
        responder = shop.responder
        assert responder is not None
        client.reset()
        await wait_all_tasks_blocked()
        called: list[bool] = []
        responder.when_drained(lambda: called.append(True))
        responder.write(b"x" * 1_000_000)
        await responder.wait_drained()
        responder.finish()
        assert (responder.ending, responder.congested, called) == (Ending.CLIENT_GONE, False, [])


async def test_others_do_not_notice(shop: Shop, autojump_clock: object) -> None:
    async with shop.serve() as server:
        others = [Client.of(server) for _ in range(5)]
        for each in others:
            each.send(render("GET", "/stream?4"))
        for leave in (Client.close, Client.reset):
            one = Client.of(server)
            one.send(render("GET", "/stream?4"))
            await trio.sleep(0.5)
            leave(one)
        for each in others:
            assert (await each.reply()).body.count(b"data:") == 4
    assert len(shop.cancelled) == 2


REQUEST = render("POST", "/echo", b"x" * 20, [(b"x-request-id", b"1")])
CHUNKED = REQUEST.replace(b"content-length: 20", b"transfer-encoding: chunked").replace(
    b"x" * 20, b"a\r\n" + b"x" * 10 + b"\r\n0\r\n\r\n"
)


@leaves
@pytest.mark.parametrize("data", [REQUEST, CHUNKED], ids=["length", "chunks"])
async def test_a_client_may_leave_after_any_byte_of_its_request(
    shop: Shop, data: bytes, leave: Callable[[Client], None]
) -> None:
    async with shop.serve() as server:
        for count in range(len(data)):
            client = Client.of(server)
            client.send(data[:count])
            if count % 3:
                await wait_all_tasks_blocked()
            leave(client)
        await wait_all_tasks_blocked()
        assert is_as_new(server)
        assert (await Client.of(server).request("GET", "/echo")).status == 200
    assert shop.seen == ["/echo"]


@leaves
@pytest.mark.parametrize("path", ["/wait_midway", "/wait", "/fail_midway"])
async def test_a_client_may_leave_after_any_byte_of_its_answer(
    shop: Shop, path: str, leave: Callable[[Client], None]
) -> None:
    async with shop.serve() as server:
        probe = Client.of(server)
        shop.gate.set()
        probe.send(render("GET", path, headers=[(b"connection", b"close")]))
        length = len(await probe.receive_all())
        probe.close()
        for count in range(length):
            client = Client.of(server, capacity=count)  # its kernel takes so many
            client.send(render("GET", path))
            await wait_all_tasks_blocked()
            leave(client)
        await wait_all_tasks_blocked()
        assert is_as_new(server)
    assert len(shop.ended) == len(shop.seen) == len(shop.answered) == length + 1
