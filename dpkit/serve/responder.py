"""The answer to one request of an HTTP connection: framing, and what happens when nobody reads.

Knows nothing of tasks: it writes to an `Outgoing`, and tells its connection by callbacks.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from attrs import define

from dpkit.serve.face import Ending, Headers, Responder
from dpkit.serve.heads import has_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.face import Request
    from dpkit.serve.heads import HeadWriter
    from dpkit.serve.outgoing import Outgoing

_log = logging.getLogger(__name__)

_LAST_CHUNK = b"0\r\n\r\n"


@define(kw_only=True, eq=False, repr=False)
class HttpResponder(Responder):
    """As `Responder` says; made by a connection, one for each request."""

    request: Request
    keep_alive: bool
    """Whether another request may follow on this connection; counts until the head is sent."""
    max_unsent: int
    outgoing: Outgoing
    heads: HeadWriter
    on_finished: Callable[[], None]
    """Called when the answer is complete: the client may send its next request now."""
    on_stalled: Callable[[], None]
    """Called when the client reads too slowly for what is written; cancels the handler."""
    on_failed: Callable[[], None]
    """Called when a callback of the handler has raised; cancels the handler."""
    body_sent: int = 0
    """Bytes of the body that were written so far, without framing."""
    finished: bool = False
    _status: int | None = None
    _ending: Ending | None = None
    _chunked: bool = False
    _promised: int | None = None
    _silent: bool = False

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
        return self.outgoing.unsent > 0

    def end(self, ending: Ending) -> None:
        """Note how the answer ends, unless it has ended already."""
        if self._ending is None:
            self._ending = ending

    def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """As `Responder` says."""
        if self._status is not None:
            raise RuntimeError(f"the request was answered with {self._status} already")
        silent = self.request.method == "HEAD" or not has_body(status)
        if body and not has_body(status):
            raise ValueError(f"an answer with status {status} has no body")
        lines = [self._own_lines()]
        if has_body(status) and _length(headers) is None:
            lines.append(b"content-length: %d\r\n" % len(body))
        elif not silent and _length(headers) != len(body):
            raise ValueError("Content-Length is not the body's")
        head = self.heads.write(status, headers, b"".join(lines))
        self._status = status
        self.body_sent = 0 if silent else len(body)
        self.outgoing.send(head if silent else head + body)
        self._complete()

    def start(self, status: int, headers: Headers = (), first: bytes = b"") -> None:
        """As `Responder` says."""
        if self._status is not None:
            raise RuntimeError(f"the request was answered with {self._status} already")
        own = self._frame(status, headers) + self._own_lines()
        head = self.heads.write(status, headers, own)
        if first:
            head += self._framed(first)
        self._status = status
        self.outgoing.send(head)

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
        self._check_started()
        if not chunk:
            return  # in chunked framing it would be the end
        if self.outgoing.unsent > self.max_unsent:
            self.on_stalled()
        elif framed := self._framed(chunk):
            self.outgoing.send(framed)

    def _framed(self, chunk: bytes) -> bytes:
        if self._silent:
            return b""
        size = len(chunk)
        if self._promised is not None and self.body_sent + size > self._promised:
            raise ValueError(f"the body is longer than its Content-Length, {self._promised}")
        self.body_sent += size
        return b"%x\r\n%b\r\n" % (size, chunk) if self._chunked else chunk

    def finish(self) -> None:
        """As `Responder` says."""
        self._check_started()
        if not self._silent:
            if self._promised is not None and self.body_sent < self._promised:
                raise ValueError(f"the body is shorter than its Content-Length, {self._promised}")
            if self._chunked:
                self.outgoing.send(_LAST_CHUNK)
        self._complete()

    def _check_started(self) -> None:
        if self._status is None:
            raise RuntimeError("the answer was not started: call start, or respond")
        if self.finished:
            raise RuntimeError("the answer is finished: nothing can be added")

    def _complete(self) -> None:
        self.finished = True
        self.end(Ending.FINISHED)
        self.on_finished()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """As `Responder` says."""
        self.outgoing.when_drained(partial(self._call, callback))

    def _call(self, callback: Callable[[], None]) -> None:
        if self.finished:
            return
        try:
            callback()
        except Exception:  # noqa: BLE001 - the handler's, but in a task of the connection's
            _log.exception("%s: what the handler would do next failed", self.request.id)
            self.on_failed()

    async def wait_drained(self) -> None:
        """As `Responder` says."""
        await self.outgoing.wait_drained()


def _length(headers: Headers) -> int | None:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return None
