"""An HTTP server without a network: for tests of handlers, on a virtual clock and at every byte.

A client here is synchronous where the real world would be asynchronous: what it sends, and that it
has gone, is there at once, and nothing happens until the test waits. Knows nothing of what is
served. `open_server` owns the server; clients need not be closed::

    async with open_server(handler) as server:
        reply = await Client.of(server).request("GET", "/health")
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httptools
import trio
from attrs import define, field

from dpkit.serve.http import HttpServer, serve_http
from dpkit.serve.transport import CHUNK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.serve.face import Handler, Headers, Quick
    from dpkit.serve.limits import HttpLimits
    from dpkit.serve.site import Observer


@asynccontextmanager
async def open_server(
    handler: Handler,
    *,
    quick: Quick | None = None,
    limits: HttpLimits | None = None,
    observer: Observer | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve without listening anywhere; use `Client.of`.

    Resource handling:
        Leaving the block stops the server at once: what is under way is cancelled.
    """

    async def serve(task_status: trio.TaskStatus[HttpServer]) -> None:
        await serve_http(
            handler, (), quick=quick, limits=limits, observer=observer, task_status=task_status
        )

    async with trio.open_nursery() as nursery:
        yield await nursery.start(serve)
        nursery.cancel_scope.cancel()


class MemoryTransport:
    """The server's end of a connection in memory; see `Transport` for what each method does.

    Args:
        peer: As in `Transport`.
        capacity: Bytes that may be sent before the client reads.
    """

    def __init__(self, peer: str = "memory", capacity: int = CHUNK) -> None:
        self.peer = peer
        self.capacity = capacity
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.client_ended: type[OSError] | None = None
        """What a client that has gone does to who sends; the end of its stream comes first."""
        self.is_incoming_over = False
        self.is_outgoing_over = False
        self.is_closed = False
        self.was_reset = False
        self._news = trio.lowlevel.ParkingLot()
        self._on_ready: Callable[[], None] | None = None

    def attach(self, on_ready: Callable[[], None]) -> None:
        """As `Transport` says.

        Raises:
            ValueError: it is closed, as a socket's descriptor is gone then.
        """
        if self.is_closed:
            raise ValueError("a closed transport cannot be attached")
        self._on_ready = on_ready
        self.notify()

    def notify(self) -> None:
        """Have the server take what has come."""
        while self._on_ready is not None and not self.is_closed and self._has_news():
            self._on_ready()

    def _has_news(self) -> bool:
        return bool(self.incoming) or self.is_incoming_over or self.client_ended is not None

    def receive_nowait(self) -> bytes:
        """As `Transport` says."""
        self._check(receiving=True)
        if not self.incoming and not self.is_incoming_over:
            raise BlockingIOError
        data = bytes(self.incoming[:CHUNK])
        del self.incoming[:CHUNK]
        return data

    def send_nowait(self, data: bytes | bytearray) -> int:
        """As `Transport` says."""
        self._check()
        taken = data[: self.capacity - len(self.outgoing)]
        if not taken:
            raise BlockingIOError
        self.outgoing += taken
        self.tell()
        return len(taken)

    async def wait_writable(self) -> None:
        """As `Transport` says."""
        await trio.lowlevel.checkpoint()
        while len(self.outgoing) >= self.capacity and self.client_ended is None:
            self._check()
            await self._news.park()

    def shut_down(self) -> None:
        """As `Transport` says."""
        self._check()
        self.is_outgoing_over = True
        self.tell()

    def close(self, *, reset: bool = False) -> None:
        """As `Transport` says. What the client has not read stays readable, but for a reset."""
        if not self.is_closed:
            self.is_closed = self.is_outgoing_over = True
            self.was_reset = reset or bool(self.incoming)
            self.tell()

    def tell(self) -> None:
        """Wake whoever waits at either end."""
        self._news.unpark_all()

    async def wait_news(self) -> None:
        """Wait until the other end does something."""
        await self._news.park()

    def _check(self, *, receiving: bool = False) -> None:
        if self.is_closed:
            raise OSError("closed here")
        ended = self.client_ended
        if ended is not None and not (receiving and ended is BrokenPipeError):
            raise ended("the client has gone")


@define(kw_only=True)
class Reply:
    """An answer, as its client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool
    """False if the connection ended before the answer did."""


@define
class Client:
    """A client in memory."""

    transport: MemoryTransport
    _left: bytes = field(default=b"", init=False)

    @classmethod
    def of(cls, server: HttpServer, *, capacity: int = CHUNK) -> Client:
        """Connect to a server."""
        transport = MemoryTransport(capacity=capacity)
        server.connect(transport)
        return cls(transport)

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.transport.incoming += data
        self.transport.notify()

    def end(self) -> None:
        """Send no more; go on reading."""
        self.transport.is_incoming_over = True
        self.transport.tell()
        self.transport.notify()

    def close(self) -> None:
        """Be gone as by ``close()``: the server reads the end, and fails if it writes."""
        self.transport.client_ended = BrokenPipeError
        self.end()

    def reset(self) -> None:
        """Be gone as by RST: the server fails, whatever it does, and what was sent is lost."""
        self.transport.client_ended = ConnectionResetError
        self.transport.incoming.clear()
        self.end()

    async def receive(self) -> bytes:
        """Wait for bytes; empty at the end.

        Raises:
            ConnectionResetError: the server has reset the connection.
        """
        transport = self.transport
        while not transport.outgoing or transport.was_reset:
            if transport.was_reset:
                raise ConnectionResetError("the server has reset the connection")
            if transport.is_outgoing_over:
                return b""
            await transport.wait_news()
        data = bytes(transport.outgoing)
        transport.outgoing.clear()
        transport.tell()
        return data

    async def receive_all(self) -> bytes:
        """Wait for the end; all bytes until then."""
        data = b""
        while more := await self.receive():
            data += more
        return data

    async def request(
        self, method: str, target: str, body: bytes = b"", headers: Headers = ()
    ) -> Reply:
        """Send a request and wait for its answer."""
        self.send(render(method, target, body, headers))
        return await self.reply(head_only=method == "HEAD")

    async def reply(self, *, head_only: bool = False) -> Reply:
        """Wait for one answer."""
        reader = ReplyReader(head_only=head_only)
        while not reader.is_complete and (data := await self.receive()):
            reader.feed(data)
        return reader.reply()


def render(method: str, target: str, body: bytes = b"", headers: Headers = ()) -> bytes:
    """Write a request as a client would."""
    lines = [b"host: test", *(b"%b: %b" % each for each in headers)]
    if body:
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join((f"{method} {target} HTTP/1.1".encode(), *lines))
    return head + b"\r\n\r\n" + body


class ReplyReader:
    """Parses one answer.

    Args:
        head_only: It answers a HEAD request.
    """

    def __init__(self, *, head_only: bool = False) -> None:
        self.is_complete = False
        self._head_only = head_only
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._status = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take bytes of the connection."""
        self._parser.feed_data(data)

    def reply(self) -> Reply:
        """What has come."""
        return Reply(
            status=self._status,
            headers=self._headers,
            body=bytes(self._body),
            is_complete=self.is_complete,
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._status = self._parser.get_status_code()
        if self._status < 200:
            self._headers.clear()
        elif self._head_only:
            self.is_complete = True

    def on_body(self, part: bytes) -> None:
        """Called by the parser."""
        self._body += part

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._status >= 200:
            self.is_complete = True
