"""The HTTP server on real sockets: TCP and Unix, clients that vanish, no descriptor left."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.serve.http import serve_http
from dpkit.serve.limits import HttpLimits
from dpkit.serve.listeners import Listener, ListenFailed, open_listeners
from dpkit.serve.transport import SocketTransport
from dpkit.serve.watch import Watch
from dpkit.testing.http import ReplyReader, render
from tests.serve.shop import SSE, Shop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dpkit.serve.face import Handler, Request, Responder
    from dpkit.serve.http import HttpServer
    from dpkit.testing.http import Reply

PATIENCE = 10.0


@pytest.fixture
def shop() -> Shop:
    return Shop()


@asynccontextmanager
async def listening(
    handler: Handler,
    address: str = "127.0.0.1:0",
    *,
    limits: HttpLimits | None = None,
    patience: float = PATIENCE,
) -> AsyncIterator[HttpServer]:
    listeners = await open_listeners(address)

    async def serve(task_status: trio.TaskStatus[HttpServer]) -> None:
        await serve_http(handler, listeners, limits=limits, task_status=task_status)

    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            yield await nursery.start(serve)
            nursery.cancel_scope.cancel()


async def connect(server: HttpServer, which: int = 0) -> trio.SocketStream:
    address = server.addresses[which]
    if address.startswith("unix:"):
        made = trio.socket.socket(trio.socket.AF_UNIX)
        await made.connect(address.removeprefix("unix:"))
        return trio.SocketStream(made)
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host.strip("[]"), int(port))


async def ask(stream: trio.SocketStream, data: bytes) -> Reply:
    await stream.send_all(data)
    return await reply_of(stream)


async def reply_of(stream: trio.SocketStream) -> Reply:
    reader = ReplyReader()
    while not reader.is_complete and (more := await stream.receive_some()):
        reader.feed(more)
    return reader.reply()


async def until_empty(server: HttpServer) -> None:
    """Wait, in real time, until it holds nothing of any client any more."""
    while server.statistics().connections:  # noqa: ASYNC110 - the kernel gives no event
        await trio.sleep(0.001)


def vanish(stream: trio.SocketStream) -> None:
    """Close with a reset."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0", ":0", "unix:"])
async def test_where_a_server_may_listen(shop: Shop, address: str, tmp_path: Path) -> None:
    if address == "unix:":
        address += str(tmp_path / "socket")
    async with listening(shop.handle, address) as server:
        assert len({each.rpartition(":")[2] for each in server.addresses}) == 1
        for which in range(len(server.addresses)):
            async with await connect(server, which) as stream:
                for body in (b"one", b"two"):
                    assert (await ask(stream, render("POST", "/echo", body))).body == body
    assert not os.listdir(tmp_path), "the path of a Unix socket is gone"  # noqa: PTH208


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("8000", "say HOST:PORT or unix:PATH"),
        ("127.0.0.1:http", "say HOST:PORT"),
        ("127.0.0.1:99999", "say HOST:PORT"),
        ("no.such.host.invalid:1", "no.such.host.invalid"),
        ("unix:/no/such/directory/s", "No such file or directory"),
        ("unix:" + "/x" * 100, "too long"),
        ("192.0.2.1:0", "Cannot assign requested address"),
    ],
)
async def test_where_it_may_not(address: str, hint: str) -> None:
    with pytest.raises(ListenFailed, match=hint):
        await open_listeners(address)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_place_that_is_taken_is_not_taken_over(kind: str, tmp_path: Path) -> None:
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket"
    first = await open_listeners(address)
    with pytest.raises(ListenFailed, match="choose another port"):
        await open_listeners(first[0].address)
    for each in first:
        each.close()
    for each in await open_listeners(first[0].address):
        each.close()


async def test_the_socket_of_a_dead_server_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    (mine,) = await open_listeners(f"unix:{path}")
    path.unlink()
    (other,) = await open_listeners(f"unix:{path}")
    mine.close()
    assert path.exists(), "that is another's now"
    other.close()
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(ListenFailed, match="in use"):
        await open_listeners(f"unix:{path}")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("way", ["FIN", "RST"])
@pytest.mark.parametrize("path", ["/wait", "/wait_midway", "/stream?99"])
async def test_a_client_that_leaves_ends_its_request(
    shop: Shop, kind: str, way: str, path: str, tmp_path: Path
) -> None:
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket"
    async with listening(shop.handle, address) as server:
        stream = await connect(server)
        await stream.send_all(render("POST", path, b"prompt"))
        while not shop.seen:  # noqa: ASYNC110 - it is on its way through the kernel
            await trio.sleep(0.001)
        if way == "FIN":
            await stream.aclose()
        else:
            vanish(stream)
        await until_empty(server)
        assert [where for where, _ in shop.cancelled] == [path.partition("?")[0]]
        assert server.statistics().bodies == 0


async def test_a_stalled_reader_is_noticed_before_the_kernel_has_taken_megabytes(
    shop: Shop,
) -> None:
    written = 0
    responders: list[Responder] = []

    async def handle(_request: Request, responder: Responder) -> None:
        nonlocal written
        responders.append(responder)
        responder.start(200, SSE)
        while not responder.congested:
            responder.write(b"x" * 1000)
            written += 1000
            await trio.lowlevel.checkpoint()
        await responder.wait_drained()
        responder.finish()

    async with listening(handle) as server:
        made = trio.socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.addresses[0].rpartition(":")
        await made.connect((host, int(port)))
        async with trio.SocketStream(made) as stream:
            await stream.send_all(render("GET", "/"))
            while not (responders and responders[0].congested):  # noqa: ASYNC110
                await trio.sleep(0.001)
            assert written < 512 * 1024
            reply = await reply_of(stream)
            assert (len(reply.body), reply.is_complete) == (written, True)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_large_answer_arrives_whole(shop: Shop, kind: str, tmp_path: Path) -> None:
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket"
    async with listening(shop.handle, address) as server, await connect(server) as stream:
        reply = await ask(stream, render("GET", "/large?20000000"))
        assert (len(reply.body), reply.is_complete) == (20_000_000, True)
        assert (await ask(stream, render("GET", "/echo"))).status == 200


async def test_a_client_that_sends_too_much_can_read_why(shop: Shop) -> None:
    limits = HttpLimits(max_body=1000, linger=0.5)

    async def send(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # it stops listening in the end
            await stream.send_all(render("POST", "/echo", b"x" * 8_000_000))

    async with (
        listening(shop.handle, limits=limits) as server,
        await connect(server) as stream,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(send, stream)
        reply = await reply_of(stream)
        assert (reply.status, reply.is_complete) == (413, True)


async def test_the_kernel_is_told_to_look_for_dead_hosts_and_not_to_buffer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        raw, _ = server.accept()
    raw.setblocking(False)
    watch = Watch()
    transport = SocketTransport(raw, "peer", watch, patience=30.0)
    assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    client.close()
    transport.close()
    transport.close()
    with pytest.raises(OSError, match="closed here"):
        await transport.wait_writable()
    watch.close()
    watch.close()


# Out of descriptors.


class NoneLeft(socket.socket):
    """A listening socket of a process that has no descriptor left, for a while."""

    tried: list[float]

    def accept(self) -> tuple[socket.socket, Any]:
        self.tried.append(trio.current_time())
        if len(self.tried) <= 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_out_of_descriptors_it_tries_ten_times_a_second(
    shop: Shop, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    raw = NoneLeft(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    raw.tried = []
    raw.bind(("127.0.0.1", 0))
    raw.listen()
    async with trio.open_nursery() as nursery:
        listeners = [Listener(raw=raw, address="here")]
        await nursery.start(serve_http, shop.handle, listeners)
        stream = await trio.open_tcp_stream(*raw.getsockname())
        async with stream:
            await stream.send_all(render("GET", "/echo"))
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        nursery.cancel_scope.cancel()
    pauses = [later - earlier for earlier, later in pairwise(raw.tried[:6])]
    assert pauses == pytest.approx([0.1] * 5)
    assert caplog.text.count("Too many open files") == 1


CHILD = """
import resource, sys, trio
from dpkit.serve.http import serve_http
from dpkit.serve.listeners import open_listeners

async def answer(request, responder):
    responder.start(200)
    try:
        while request.path == "/stream":
            responder.write(b"event")
            await trio.sleep(0.02)
    finally:
        if request.path != "/stream":
            responder.finish()

async def main():
    listeners = await open_listeners("127.0.0.1:0")
    print(listeners[0].address, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    with trio.move_on_after(30):
        await serve_http(answer, listeners)

trio.run(main)
"""


async def test_out_of_descriptors_what_is_under_way_goes_on() -> None:
    child = await trio.lowlevel.open_process(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    streams: list[trio.SocketStream] = []
    try:
        with trio.fail_after(PATIENCE):
            host, _, port = (await child.stdout.receive_some()).decode().strip().rpartition(":")
            streams += [await trio.open_tcp_stream(host, int(port)) for _ in range(40)]
            for each in streams:
                await each.send_all(render("GET", "/stream"))
            assert b"cannot accept" in await child.stderr.receive_some()
            seen = b""
            while seen.count(b"event") < 5:
                seen += await streams[0].receive_some()
            for each in streams:
                await each.aclose()
            late = await trio.open_tcp_stream(host, int(port))
            async with late:
                assert (await ask(late, render("GET", "/"))).status == 200
    finally:
        for each in streams:
            each.socket.close()
        child.kill()
        await child.wait()
        await child.stdout.aclose()
        await child.stderr.aclose()


# Many.


@pytest.mark.slow
async def test_many_idle_connections_cost_the_busy_ones_nothing(shop: Shop) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    streams: list[trio.SocketStream] = []
    try:
        async with listening(shop.handle, limits=HttpLimits(), patience=100) as server:
            for _ in range(1500):
                streams.append(await connect(server))
                assert (await ask(streams[-1], render("GET", "/echo"))).status == 200
            assert server.statistics().idle >= 1499
            times = []
            for each in streams[:1500:5]:
                start = time.perf_counter()
                assert (await ask(each, render("GET", "/echo"))).status == 200
                times.append(time.perf_counter() - start)
                await trio.sleep(0.001)
            times.sort()
            print(f"p50 {times[150] * 1e3:.2f} ms, p99 {times[297] * 1e3:.2f} ms")
            assert times[297] <= 0.1
            for each in streams:
                await each.aclose()
            await until_empty(server)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
