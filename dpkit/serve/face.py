"""Between a server and what answers: a request, a place for the answer, and a handler of both.

A handler is an async function that is given a whole request and answers through a responder, whose
methods are synchronous: no answer ever waits for a socket. Knows nothing of sockets or of routes,
so the same handler serves over dpkit's own HTTP server and as an ASGI application.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import define, field, setters

if TYPE_CHECKING:
    from typing import TypeAlias

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names in lower case and values, in order; names may repeat."""


class Ending(StrEnum):
    """How the answer to a request ended."""

    FINISHED = "finished"
    """All of it was handed to the other side's kernel, or is about to be."""
    CLIENT_GONE = "client_gone"
    """The client closed or reset the connection before the answer was complete."""
    STALLED = "stalled"
    """The client stopped reading, and `send_timeout` passed or `max_unsent` was exceeded."""
    SHUTDOWN = "shutdown"
    """The server is stopping and its deadline has passed."""
    ERROR = "error"
    """It had begun, and ended with an event that says what went wrong."""
    FAILED = "failed"
    """The handler raised, or returned without having finished its answer."""


# Frozen by `on_setattr`, not by `frozen`, which makes one three times as dear: there is one of them
# for each request.
@define(kw_only=True, eq=False, on_setattr=setters.frozen)
class Request:
    """One request, complete with its body."""

    method: str
    path: str
    """Percent-decoded, without the query."""
    query: str = ""
    """As it came, without the question mark."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Names in lower case, in the order in which they came."""
    body: bytes = b""
    peer: str = ""
    """Who asks: ``10.0.0.7:51324``, or ``unix``."""
    id: str = field()
    """The client's ``X-Request-Id`` if it is printable and short, or else one of the server's."""
    target: bytes = b""
    """Path and query as they came."""
    http_version: str = "1.1"

    def header(self, name: str) -> str | None:
        """Value of a header, None if there is none; repeated ones are joined with commas.

        Args:
            name: In lower case.
        """
        wanted = name.encode("latin-1")
        values = [value for key, value in self.headers if key == wanted]
        return b", ".join(values).decode("latin-1") if values else None


class Responder(ABC):
    """Where the one answer to one request goes. For the task of its handler.

    Either `respond` once, or `start`, any number of `write`, and `finish`. None of them waits or
    raises for what the world does: after the client has gone they do nothing. RuntimeError and
    ValueError are bugs of the handler.

    The server adds Date, Server, X-Request-Id, Content-Length or Transfer-Encoding, and Connection;
    to a HEAD request it sends no body whatever is written.

    The handler runs under one cancel scope. It is cancelled when the client has gone, reads too
    slowly, or the server has to stop; `ending` says which. A stream that is cancelled by SHUTDOWN
    may still write a last event and `finish` on its way out; what is not finished then is cut off,
    so that no client takes it for complete.
    """

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Status that was sent, None before `respond` or `start`."""

    @property
    @abstractmethod
    def ending(self) -> Ending | None:
        """How the answer ended, None while it is under way."""

    @property
    @abstractmethod
    def congested(self) -> bool:
        """Whether the client has not yet taken what was written before.

        Writing on is possible, up to `max_unsent` bytes. Better: let what is to be said grow, and
        say it in one piece after `wait_drained` or from `when_drained`.
        """

    @abstractmethod
    def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Answer in one piece."""

    @abstractmethod
    def start(self, status: int, headers: Headers = (), first: bytes = b"") -> None:
        """Begin an answer that comes in pieces.

        Args:
            status: From 200 on.
            headers: A Content-Length among them is a promise; without, the body is chunked.
            first: A first piece of the body, which then travels with the head.
        """

    @abstractmethod
    def write(self, chunk: bytes) -> None:
        """Send a piece of the body, at once if the socket has room."""

    @abstractmethod
    def finish(self, ending: Ending = Ending.FINISHED) -> None:
        """End an answer that was started. The client may send its next request now.

        Args:
            ending: What logs and metrics call it, unless it was cancelled before.
        """

    @abstractmethod
    def when_drained(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, once, when `congested` turns false; at once if it is.

        It may write. It is not called after `finish`, nor after the client has gone.
        """

    @abstractmethod
    async def wait_drained(self) -> None:
        """Wait until `congested` is false, which it may be already; a checkpoint in any case."""


Handler: TypeAlias = Callable[[Request, Responder], Awaitable[None]]
"""Answers one request. What it raises becomes 500, or cuts off an answer that was started."""

Quick: TypeAlias = Callable[[Request, Responder], bool]
"""Answers a request in one piece, there and then; False: it is for the handler to answer. What it
raises becomes 500."""
