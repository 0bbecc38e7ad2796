"""HTTP/1.1 from the client's side, for many streams at once on Trio.

A connection that is free is used again; there is no limit to their number, as who asks decides how
many requests are under way. An answer is handed on in the pieces in which it comes, at once. Parses
with httptools: httpx2 took 1.7 times the processor time for each event of a stream, and a load
generator that is dearer than the server measures itself. Knows nothing of OpenAI's API.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import httptools
import trio

from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dpkit.bench.address import Address

_CHUNK = 65_536
_MOST_BODY = 2**24  # bytes of an answer that nobody takes piece by piece


class RequestBroken(DpkitError):  # noqa: N818 - reads as what happened
    """There is no whole answer: the connection could not be had, or ended, or it is no HTTP.

    Args:
        kind: `unreachable`, `connection lost` or `no HTTP`.
        message: More of it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Answer:
    """An answer that comes; httptools calls its `on_` methods.

    Args:
        on_piece: Called with what came at once of the body of an answer that is good (200), which
            may be several chunks. None: gather.
    """

    def __init__(self, on_piece: Callable[[bytes], None] | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        """What was gathered, and nobody took."""
        self.has_begun = False
        self.is_complete = False
        self.keeps_alive = False
        self._on_piece = on_piece
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take bytes of the connection.

        Raises:
            RequestBroken: they are no HTTP.
            What `on_piece` raises.
        """
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise RequestBroken("no HTTP", f"the answer is no HTTP: {error}") from error
        if self._on_piece is not None and self.status == 200:
            piece = bytes(self.body)
            self.body.clear()
            if piece:
                self._on_piece(piece)

    def end(self) -> None:
        """The connection has ended.

        Raises:
            RequestBroken: in the middle of the answer.
        """
        until_the_end = not {"content-length", "transfer-encoding"} & self.headers.keys()
        if self.status and until_the_end:
            self.is_complete = True
        if not self.is_complete:
            raise RequestBroken("connection lost", "the server closed the connection too early")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
        else:
            self.status = status
            self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        if len(self.body) < _MOST_BODY:
            self.body += piece

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.is_complete = self.status != 0


class HttpClient:
    """Connections to one server.

    Args:
        address: Of the server.
        headers: Of every request.

    Resource handling:
        `close` closes the connections that are free; those in use are their requests' to close.
    """

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self.address = address
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._free: list[trio.abc.Stream] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        on_piece: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """Send a request and wait for the end of its answer.

        One that a server drops with its idle connection, before any byte of an answer, is sent
        again on a connection of its own.

        Raises:
            RequestBroken: there is no whole answer.
            What `on_piece` raises; the connection is closed then, as it is on cancellation.
        """
        data = self._render(method, path, body)
        while self._free:
            answer = Answer(on_piece)
            try:
                return await self._exchange(self._free.pop(), data, answer)
            except RequestBroken:
                if answer.has_begun:
                    raise
        return await self._exchange(await self._connect(), data, Answer(on_piece))

    async def close(self) -> None:
        """Close what is free."""
        while self._free:
            await trio.aclose_forcefully(self._free.pop())

    def _render(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {self.address.prefix}{path} HTTP/1.1\r\nhost: {self.address.authority}\r\n",
            self._headers,
            "accept: */*\r\nuser-agent: dpkit-bench\r\n",
        ]
        if method == "POST":
            lines.append(f"content-type: application/json\r\ncontent-length: {len(body)}\r\n")
        return "".join((*lines, "\r\n")).encode("latin-1") + body

    async def _connect(self) -> trio.abc.Stream:
        try:
            return await self.address.connect()
        except (OSError, trio.BrokenResourceError) as error:
            why = error.__cause__ if isinstance(error, trio.BrokenResourceError) else error
            said = f"connecting to {self.address.url}: {why}"
            raise RequestBroken("unreachable", said) from error

    async def _exchange(self, stream: trio.abc.Stream, data: bytes, answer: Answer) -> Answer:
        try:
            with suppress(trio.BrokenResourceError):  # a refusal may come before all is sent
                await stream.send_all(data)
            while not answer.is_complete:
                if received := bytes(await stream.receive_some(_CHUNK)):
                    answer.feed(received)
                else:
                    answer.end()
        except trio.BrokenResourceError as error:
            raise RequestBroken("connection lost", f"the connection broke: {error}") from error
        finally:
            if answer.is_complete and answer.keeps_alive:
                self._free.append(stream)
            else:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                    await trio.aclose_forcefully(stream)
        return answer
