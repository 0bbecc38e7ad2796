"""The answer to one request of an HTTP connection: framing, and what happens when nobody reads.

Knows nothing of tasks: it writes to an `Outgoing`, and tells its connection by callbacks.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from attrs import define, field

from dpkit.logs import about
from dpkit.serve.face import Ending, Headers, Responder
from dpkit.serve.heads import has_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.face import Request
    from dpkit.serve.heads import HeadWriter
    from dpkit.serve.outgoing import Outgoing

_log = logging.getLogger(__name__)

_LAST_CHUNK = b"0\r\n\r\n"


class Line(Protocol):
    """What a responder needs of its connection."""

    outgoing: Outgoing
    heads: HeadWriter
    max_unsent: int

    def finished(self) -> None:
        """Be told that the answer is complete: the client may send its next request now."""

    def stalled(self) -> None:
        """Be told that the client reads too slowly for what is written; cancel the handler."""

    def failed(self) -> None:
        """Be told that a callback of the handler has raised; cancel the handler."""


@define(eq=False, repr=False)
class HttpResponder(Responder):
    """As `Responder` says; made by a connection, one for each request.

    Args:
        request: What is answered.
        keep_alive: Whether another request may follow; counts until the head is sent.
        line: To the client.
        began_at: When the request was complete, by Trio's clock.
    """

    request: Request
    keep_alive: bool
    line: Line
    began_at: float
    ended_at: float | None = field(default=None, init=False)
    """When the answer was complete."""
    body_sent: int = field(default=0, init=False)
    """Bytes of the body that were written so far, without framing."""
    is_finished: bool = field(default=False, init=False)
    _status: int | None = field(default=None, init=False)
    _ending: Ending | None = field(default=None, init=False)
    _chunked: bool = field(default=False, init=False)
    _promised: int | None = field(default=None, init=False)
    _silent: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        state = self._ending or ("open" if self._status is None else "started")
        return f"<HttpResponder of {self.request.id}: {state}, {self.body_sent} bytes>"

    @property
    def status(self) -> int | None:
        """As `Responder` says."""
        return self._status

    @property
    def ending(self) -> Ending | None:
        """As `Responder` says."""
        return self._ending

    @property
    def shows_cut(self) -> bool:
        """Whether the client can tell by the framing that an answer ended too early."""
        return self._chunked or self._promised is not None

    @property
    def congested(self) -> bool:
        """As `Responder` says."""
        return self.line.outgoing.unsent > 0

    def end(self, ending: Ending) -> None:
        """Note how the answer ends, unless it has ended already."""
        if self._ending is None:
            self._ending = ending

    def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """As `Responder` says."""
        if self._status is not None:
            raise RuntimeError(f"the request was answered with {self._status} already")
        if not has_body(status):
            self._respond_bare(status, headers, body)
            return
        own = self._own_lines()
        promised = _length(headers) if headers else None
        if promised is None:
            own = b"%bcontent-length: %d\r\n" % (own, len(body))
        elif promised != len(body) and self.request.method != "HEAD":
            raise ValueError("Content-Length is not the body's")
        head = self.line.heads.write(status, headers, own)
        self._status = status
        if self.request.method != "HEAD":
            self.body_sent = len(body)
            head += body
        self.line.outgoing.send(head)
        self._complete()

    def _respond_bare(self, status: int, headers: Headers, body: bytes) -> None:
        if body:
            raise ValueError(f"an answer with status {status} has no body")
        head = self.line.heads.write(status, headers, self._own_lines())
        self._status = status
        self.line.outgoing.send(head)
        self._complete()

    def start(self, status: int, headers: Headers = (), first: bytes = b"") -> None:
        """As `Responder` says."""
        if self._status is not None:
            raise RuntimeError(f"the request was answered with {self._status} already")
        own = self._frame(status, headers) + self._own_lines()
        head = self.line.heads.write(status, headers, own)
        if first:
            head += self._framed(first)
        self._status = status
        self.line.outgoing.send(head)

    def _frame(self, status: int, headers: Headers) -> bytes:
        """Choose how the client knows the body's end; before `_own_lines`, which may depend."""
        self._silent = self.request.method == "HEAD" or not has_body(status)
        if not has_body(status):
            return b""
        if (promised := _length(headers)) is not None:
            self._promised = promised
            return b""
        if self.request.http_version == "1.0":
            self.keep_alive = False  # HTTP/1.0 knows no chunks: the end is the connection's
            return b""
        self._chunked = True
        return b"transfer-encoding: chunked\r\n"

    def _own_lines(self) -> bytes:
        line = b"x-request-id: %b\r\n" % self.request.id.encode("ascii")
        if not self.keep_alive:
            return line + b"connection: close\r\n"
        if self.request.http_version == "1.0":
            return line + b"connection: keep-alive\r\n"
        return line

    def write(self, chunk: bytes) -> None:
        """As `Responder` says."""
        if self._status is None or self.is_finished:
            raise self._misused()
        if not chunk:
            return  # in chunked framing it would be the end
        outgoing = self.line.outgoing
        if outgoing.unsent > self.line.max_unsent:
            self.line.stalled()
        elif self._chunked and not self._silent:
            size = len(chunk)
            self.body_sent += size
            outgoing.send(b"%x\r\n%b\r\n" % (size, chunk))
        elif framed := self._framed(chunk):
            outgoing.send(framed)

    def _framed(self, chunk: bytes) -> bytes:
        if self._silent:
            return b""
        size = len(chunk)
        if self._promised is not None and self.body_sent + size > self._promised:
            raise ValueError(f"the body is longer than its Content-Length, {self._promised}")
        self.body_sent += size
        return b"%x\r\n%b\r\n" % (size, chunk) if self._chunked else chunk

    def finish(self, ending: Ending = Ending.FINISHED) -> None:
        """As `Responder` says."""
        if self._status is None or self.is_finished:
            raise self._misused()
        if not self._silent:
            if self._promised is not None and self.body_sent < self._promised:
                raise ValueError(f"the body is shorter than its Content-Length, {self._promised}")
            if self._chunked:
                self.line.outgoing.send(_LAST_CHUNK)
        self._complete(ending)

    def _misused(self) -> RuntimeError:
        if self._status is None:
            return RuntimeError("the answer was not started: call start, or respond")
        return RuntimeError("the answer is finished: nothing can be added")

    def _complete(self, ending: Ending = Ending.FINISHED) -> None:
        self.is_finished = True
        self.end(ending)
        self.line.finished()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """As `Responder` says."""
        self.line.outgoing.when_drained(partial(self._call, callback))

    def _call(self, callback: Callable[[], None]) -> None:
        if self.is_finished:
            return
        try:
            callback()
        except Exception:  # noqa: BLE001 - the handler's, but in a task of the connection's
            request_id = self.request.id
            _log.exception(
                "%s: what the handler would do next failed",
                request_id,
                extra=about(request_id=request_id),
            )
            self.line.failed()

    async def wait_drained(self) -> None:
        """As `Responder` says."""
        await self.line.outgoing.wait_drained()


def _length(headers: Headers) -> int | None:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None
