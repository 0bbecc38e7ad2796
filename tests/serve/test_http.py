"""The HTTP server, over connections in memory: what clients are told."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dpkit.serve.face import Ending
from dpkit.testing.http import Client, ReplyReader, open_server, render
from tests.serve.shop import SSE, Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.face import Request, Responder
    from dpkit.serve.site import Answered


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def test_a_client_may_ask_again_and_again(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        for number in range(20):
            reply = await client.request("POST", "/echo", b"%d" % number)
            assert (reply.status, reply.body, reply.is_complete) == (200, b"%d" % number, True)
            assert "connection" not in reply.headers
        assert server.statistics().accepted == 1
        assert server.statistics().answered == 20


async def test_every_answer_says_when_and_by_whom(shop: Shop) -> None:
    async with shop.serve() as server:
        reply = await Client.of(server).request("POST", "/echo", b"hello")
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", reply.headers["date"])
    assert reply.headers["server"] == "dpkit"
    assert reply.headers["content-length"] == "5"
    assert reply.headers["x-request-id"].startswith("req-")


async def test_a_clients_request_id_is_kept_if_it_is_fit_to_be(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        for given, kept in ((b"abc-1", True), (b"a b", False), (b"", False), (b"x" * 129, False)):
            reply = await client.request("GET", "/echo", headers=[(b"X-Request-ID", given)])
            assert (reply.headers["x-request-id"] == given.decode()) is kept
    ids = [each.request.id for each in shop.answered if each.request]
    assert len(set(ids)) == 4


async def test_head_is_answered_without_a_body(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        reply = await client.request("HEAD", "/large?1000")
        assert (reply.status, reply.headers["content-length"], reply.body) == (200, "1000", b"")
        reply = await client.request("HEAD", "/forget_midway")
        assert reply.body == b""
        await wait_all_tasks_blocked()
        assert not client.transport.outgoing


async def test_a_stream_is_sent_event_by_event(shop: Shop, autojump_clock: object) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/stream?3"))
        start = trio.current_time()
        head, _, first = (await client.receive()).partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert b"content-length" not in head
        assert first == b"9\r\ndata: 0\n\n\r\n"
        pieces = [(await client.receive(), trio.current_time() - start) for _ in range(3)]
        assert pieces == [
            (b"9\r\ndata: 1\n\n\r\n", 1.0),
            (b"9\r\ndata: 2\n\n\r\n", 2.0),
            (b"0\r\n\r\n", 3.0),
        ]
        reply = await client.request("POST", "/echo", b"and again")
        assert reply.body == b"and again"


async def test_http_1_0_gets_no_chunks(shop: Shop, autojump_clock: object) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(b"GET /stream?2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await client.receive_all()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"connection: close" in head
        assert body == b"data: 0\n\ndata: 1\n\n"


@pytest.mark.parametrize(
    ("line", "answer", "stays"),
    [
        ("GET /echo HTTP/1.0\r\n", "connection: close", False),
        ("GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n", "connection: keep-alive", True),
        ("GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", "connection: close", False),
    ],
)
async def test_who_keeps_the_connection(shop: Shop, line: str, answer: str, stays: bool) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(f"{line}\r\n".encode())
        assert answer in (await client.receive()).decode()
        await wait_all_tasks_blocked()
        assert client.transport.is_outgoing_over is not stays


async def test_a_client_that_waits_for_it_is_told_to_send_its_body(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n")
        client.send(b"Content-Length: 5\r\n\r\n")
        assert await client.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hello")
        reply = await client.reply()
        assert (reply.status, reply.body) == (200, b"hello")


async def test_another_protocol_is_not_changed_to(shop: Shop) -> None:
    """As Java's HTTP client asks for HTTP/2 with its first request."""
    async with shop.serve() as server:
        client = Client.of(server)
        upgrade = [(b"Connection", b"Upgrade, HTTP2-Settings"), (b"Upgrade", b"h2c")]
        for body in (b"hello", b"", b"again"):
            reply = await client.request("POST", "/echo", body, headers=upgrade)
            assert (reply.status, reply.body) == (200, body)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /echo HTTP/1.1\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2000\r\n\r\n", 413),
        (b"GET /" + b"x" * 2000, 431),
        (b"BREW / HTTP/1.1\r\n", 501),
        (b"\x16\x03\x01\x02\x00", 400),
    ],
)
async def test_a_refusal_is_an_error_in_json_and_the_end(
    shop: Shop, data: bytes, status: int
) -> None:
    async with shop.serve(max_head=1000, max_body=1000) as server:
        client = Client.of(server)
        client.send(data)
        reply = await client.reply()
        assert reply.status == status
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["connection"] == "close"
        assert json.loads(reply.body)["error"].keys() == {"message", "type", "param", "code"}
        assert await client.receive() == b""
        client.send(b"what is sent now is dropped, and destroys nothing")
        client.close()
        await wait_all_tasks_blocked()
        assert server.statistics().connections == 0
    assert [(each.request, each.status) for each in shop.answered] == [(None, status)]
    assert not shop.seen


async def test_when_bodies_take_all_the_room_others_are_to_come_back(shop: Shop) -> None:
    async with shop.serve(max_bodies=10) as server:
        first, second = Client.of(server), Client.of(server)
        first.send(render("POST", "/wait", b"x" * 8))
        await wait_all_tasks_blocked()
        assert server.statistics().bodies == 8
        reply = await second.request("POST", "/echo", b"x" * 8)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        shop.gate.set()
        assert (await first.reply()).status == 200
        await wait_all_tasks_blocked()
        assert server.statistics().bodies == 0
        assert (await Client.of(server).request("POST", "/echo", b"x" * 8)).status == 200


@pytest.mark.parametrize("path", ["/fail", "/forget"])
async def test_a_handler_that_fails_before_it_answers_is_a_500(shop: Shop, path: str) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        reply = await client.request("GET", path)
        assert reply.status == 500
        assert b"KeyError" not in reply.body
        assert reply.headers["x-request-id"]
        assert await client.receive() == b""
        assert (await Client.of(server).request("GET", "/echo")).status == 200
    assert [(each.status, each.ending) for each in shop.answered] == [
        (500, Ending.FAILED),
        (200, Ending.FINISHED),
    ]


@pytest.mark.parametrize("path", ["/fail_midway", "/forget_midway"])
async def test_what_is_cut_off_never_looks_complete(shop: Shop, path: str) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        reply = await client.request("GET", path)
        assert (reply.status, reply.body) == (200, b"data: first\n\n")
        assert not reply.is_complete
        old = Client.of(server)
        old.send(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        await wait_all_tasks_blocked()
        with pytest.raises(ConnectionResetError):  # the end of the stream would be the body's
            await old.receive_all()


async def test_an_observer_that_fails_harms_nobody() -> None:
    def fail(_: Answered) -> None:
        raise KeyError("no such thing")

    async with open_server(Shop().handle, observer=fail) as server:
        client = Client.of(server)
        assert (await client.request("GET", "/echo")).status == 200
        assert (await client.request("GET", "/echo")).status == 200


# A request before the answer to the last one.


@pytest.mark.parametrize("together", [True, False], ids=["in one segment", "one after another"])
async def test_a_request_too_early_is_politely_not_taken(shop: Shop, *, together: bool) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/wait"))
        if not together:
            await wait_all_tasks_blocked()
        client.send(render("GET", "/echo"))
        await wait_all_tasks_blocked()
        shop.gate.set()
        reply = await client.reply()
        assert (reply.status, reply.body) == (200, b"done")
        assert reply.headers["connection"] == "close"
        assert await client.receive() == b""
    assert shop.seen == ["/wait"]


async def test_a_request_in_the_midst_of_a_stream_does_not_cut_it(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/wait_midway"))
        await wait_all_tasks_blocked()
        client.send(render("POST", "/echo", b"x" * 100_000))
        await wait_all_tasks_blocked()
        shop.gate.set()
        reply = await client.reply()
        assert reply.is_complete
        assert reply.body == b"data: first\n\ndata: last\n\n"
        assert await client.receive() == b""
    assert shop.seen == ["/wait_midway"]


async def test_an_empty_line_too_many_is_no_request(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        client.send(render("GET", "/wait") + b"\r\n")
        await wait_all_tasks_blocked()
        client.send(b"\r\n")
        await wait_all_tasks_blocked()
        shop.gate.set()
        assert "connection" not in (await client.reply()).headers
        assert (await client.request("GET", "/echo")).status == 200


async def test_a_client_need_not_wait_for_what_follows_its_answer(shop: Shop) -> None:
    async with shop.serve() as server:
        client = Client.of(server)
        assert (await client.request("POST", "/answer_and_tidy", b"one")).body == b"one"
        client.send(render("POST", "/answer_and_tidy", b"two"))
        await wait_all_tasks_blocked()
        assert shop.seen == ["/answer_and_tidy"], "one handler at a time"
        shop.gate.set()
        assert (await client.reply()).body == b"two"
        assert (await client.request("POST", "/echo", b"three")).body == b"three"


# What handlers may do.


async def served_once(use: Callable[[Responder], None]) -> ReplyReader:
    async def handle(request: Request, responder: Responder) -> None:
        await trio.lowlevel.checkpoint()
        use(responder)

    async with open_server(handle) as server:
        client, reader = Client.of(server), ReplyReader()
        client.send(render("GET", "/"))
        while not reader.is_complete and (data := await client.receive()):
            reader.feed(data)
    return reader


async def test_an_empty_piece_is_not_the_end() -> None:
    def use(responder: Responder) -> None:
        responder.start(200, SSE, b"")
        for piece in (b"", b"a", b"", b"b"):
            responder.write(piece)
        responder.finish()

    reply = (await served_once(use)).reply()
    assert (reply.body, reply.is_complete) == (b"ab", True)


async def test_a_promised_length_is_kept() -> None:
    def use(responder: Responder) -> None:
        responder.start(200, [(b"content-length", b"4")], b"ab")
        with pytest.raises(ValueError, match="shorter"):
            responder.finish()
        with pytest.raises(ValueError, match="longer"):
            responder.write(b"cde")
        responder.write(b"cd")
        responder.finish()

    reply = (await served_once(use)).reply()
    assert (reply.body, reply.headers["content-length"]) == (b"abcd", "4")
    assert "transfer-encoding" not in reply.headers


@pytest.mark.parametrize("status", [204, 304])
async def test_some_answers_have_no_body(status: int) -> None:
    def use(responder: Responder) -> None:
        with pytest.raises(ValueError, match="no body"):
            responder.respond(status, (), b"x")
        responder.respond(status)

    reply = (await served_once(use)).reply()
    assert (reply.status, "content-length" in reply.headers) == (status, False)


@pytest.mark.parametrize(
    "header",
    [
        (b"x-one", b"a\r\nset-cookie: b"),
        (b"x-one\r\nset-cookie", b"b"),
        (b"x-one", b"a\nb"),
        (b"x-one", b"a\rb"),
        (b"x-one", b"a\0b"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"close"),
        (b"date", b"today"),
    ],
)
async def test_a_header_cannot_smuggle_another(header: tuple[bytes, bytes]) -> None:
    def use(responder: Responder) -> None:
        with pytest.raises(ValueError, match=r"line break|for the server"):
            responder.start(200, [header])
        with pytest.raises(ValueError, match=r"line break|for the server"):
            responder.respond(200, [header])
        responder.respond(200, [(b"x-two", b"2")])

    assert (await served_once(use)).reply().headers["x-two"] == "2"


async def test_what_makes_no_sense_is_said_to_be_a_bug() -> None:
    def use(responder: Responder) -> None:
        for too_early in (lambda: responder.write(b"x"), responder.finish):
            with pytest.raises(RuntimeError, match="not started"):
                too_early()
        with pytest.raises(ValueError, match="Content-Length"):
            responder.respond(200, [(b"content-length", b"1")], b"xx")
        assert (responder.status, responder.ending, responder.congested) == (None, None, False)
        responder.start(201)
        for twice in (lambda: responder.start(200), lambda: responder.respond(200)):
            with pytest.raises(RuntimeError, match="answered with 201 already"):
                twice()
        responder.finish()
        assert (responder.status, responder.ending) == (201, Ending.FINISHED)
        for too_late in (lambda: responder.write(b"x"), responder.finish):
            with pytest.raises(RuntimeError, match="finished"):
                too_late()

    reply = (await served_once(use)).reply()
    assert (reply.status, reply.body, reply.is_complete) == (201, b"", True)
