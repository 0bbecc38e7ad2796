"""Servers to put load on: a served cluster, and one that says what it is told to."""

from __future__ import annotations

import socket
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.serve.service import serve_http
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from dpkit.nursery.cluster import Cluster

SERVER = "[server]\nlisten = '127.0.0.1:0'\n"
ECHO = f"[[engines]]\nname = 'e'\nmodel = 'echo'\ncount = 2\n{SERVER}"

MODELS = b'{"object": "list", "data": [{"id": "m"}]}'


@asynccontextmanager
async def served(toml: str = ECHO) -> AsyncIterator[tuple[Cluster, str]]:
    """A cluster and its URL; at the end nothing is left of any request."""
    async with open_cluster(parse_config(toml)) as cluster:
        async with trio.open_nursery() as nursery:
            service = await nursery.start(serve_http, cluster)
            address = service.addresses[0]
            yield cluster, address if address.startswith("unix:") else f"http://{address}"
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            while not _is_idle(cluster):  # noqa: ASYNC110 - nobody tells
                await trio.sleep(0.001)
        check_idle(cluster)


def _is_idle(cluster: Cluster) -> bool:
    """Engines drop what was aborted before their next step, which is not far."""
    statistics = cluster.statistics()
    cores = [each.core for each in statistics.engines]
    under_way = any(client.requests for client in statistics.clients)
    return not under_way and not any(core.running or core.waiting for core in cores)


def hang_up(path: str, before: int) -> None:
    """Be a server that says nothing."""


def good(body: bytes, *, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """A whole answer."""
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


@asynccontextmanager
async def scripted(
    answer: Callable[[str, int], bytes | None], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A server that answers each request with bytes; None: it hangs up; its URL.

    Args:
        answer: Of the path, and of how many requests came before on this connection.
        tls: Over that.
    """

    async def serve(stream: trio.abc.Stream) -> None:
        received, count = b"", 0
        while True:
            while b"\r\n\r\n" not in received:
                if not (data := await stream.receive_some()):
                    return
                received += bytes(data)
            head, _, received = received.partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            lengths = [int(each[15:]) for each in lines if each.startswith(b"content-length:")]
            while len(received) < sum(lengths):
                received += bytes(await stream.receive_some())
            received = received[sum(lengths) :]
            sent = answer(head.split()[1].decode(), count)
            if sent is None:
                return
            if sent == b"reset here":
                assert isinstance(stream, trio.SocketStream)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            await stream.send_all(sent)
            if b"HTTP/1.1 200 until-the-end" in sent or b"cut here" in sent:
                return
            count += 1

    async def handle(stream: trio.abc.Stream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                await serve(stream)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        if tls is None:
            await nursery.start(trio.serve_listeners, handle, listeners)
        else:
            secure = [trio.SSLListener(each, tls, https_compatible=True) for each in listeners]
            await nursery.start(trio.serve_listeners, handle, secure)
        yield f"http://127.0.0.1:{port}" if tls is None else f"https://localhost:{port}"
        nursery.cancel_scope.cancel()
