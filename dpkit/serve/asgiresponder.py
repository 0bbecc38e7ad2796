"""The answer to one request of an ASGI server: what is written waits here until it was sent.

A handler's methods are synchronous and ASGI's ``send`` is not, so a task carries one to the other,
in as large pieces as there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from dpkit.serve.face import Ending, Headers, Responder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.config.server import ServerConfig


class CutOff(Exception):  # noqa: N818 - reads as what happened
    """An answer ended before it was complete; the server must show that to the client."""


class AsgiResponder(Responder):
    """As `Responder` says.

    Args:
        send: ASGI's.
        request_id: Of the request.
        head: Whether the request is HEAD, which is answered without a body.
        settings: Limits of what may wait, and for how long.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], Awaitable[None]],
        request_id: str,
        *,
        head: bool,
        settings: ServerConfig,
    ) -> None:
        self.scope = trio.CancelScope()
        """The handler's."""
        self._send = send
        self._request_id = request_id.encode("ascii")
        self._silent = head
        self._settings = settings
        self.body_sent = 0
        """Bytes that the server took."""
        self._status: int | None = None
        self._ending: Ending | None = None
        self._start: dict[str, Any] | None = None
        self._body = bytearray()
        self._finished = False
        self._said_all = False
        self._sending = False
        self._sent = trio.Event()
        self._news = trio.lowlevel.ParkingLot()
        self._drained = trio.lowlevel.ParkingLot()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def status(self) -> int | None:
        """As `Responder` says."""
        return self._status

    @property
    def ending(self) -> Ending | None:
        """As `Responder` says."""
        return self._ending

    @property
    def congested(self) -> bool:
        """As `Responder` says."""
        return self._sending

    def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """As `Responder` says."""
        self.start(status, (*headers, (b"content-length", b"%d" % len(body))), body)
        self.finish()

    def start(self, status: int, headers: Headers = (), first: bytes = b"") -> None:
        """As `Responder` says."""
        if self._status is not None:
            raise RuntimeError(f"the request was answered with {self._status} already")
        self._status = status
        headers = [*headers, (b"x-request-id", self._request_id)]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self._add(first)

    def write(self, chunk: bytes) -> None:
        """As `Responder` says."""
        if self._status is None or self._finished:
            raise RuntimeError("the answer was not started, or is finished")
        self._add(chunk)
        if len(self._body) > self._settings.max_unsent and self._sending:
            self.cancel(Ending.STALLED)

    def _add(self, chunk: bytes) -> None:
        if not self._silent and self._ending is None:
            self._body += chunk
        self._news.unpark()

    def finish(self, ending: Ending = Ending.FINISHED) -> None:
        """As `Responder` says."""
        if self._status is None or self._finished:
            raise RuntimeError("the answer was not started, or is finished")
        self._finished = True
        if self._ending is None:
            self._ending = ending
        self._news.unpark()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """As `Responder` says."""
        if self._sending:
            self._callbacks.append(callback)
        elif self._ending is None:
            callback()

    async def wait_drained(self) -> None:
        """As `Responder` says."""
        await trio.lowlevel.checkpoint()
        while self._sending and self._ending is None:
            await self._drained.park()

    # The other half, for the application.

    def cancel(self, ending: Ending) -> None:
        """Cancel the handler, unless the answer is complete."""
        if self._ending is None:
            self._ending = ending
            self._body.clear()
            self._callbacks.clear()
            self._drained.unpark_all()
            self.scope.cancel()
        self._sent.set()

    def check_complete(self) -> None:
        """Raise if the client must be shown that its answer is not complete.

        Raises:
            CutOff: it is there, and has half of it.
        """
        if not self._finished and self._ending is not Ending.CLIENT_GONE:
            raise CutOff(f"request {self._request_id.decode()} ended as {self._ending}")

    async def wait_sent(self) -> None:
        """Wait until the answer is with the server, or never will be."""
        if self._finished:
            await self._sent.wait()

    async def pump(self) -> None:
        """Send whatever is written; a service task."""
        try:
            while True:
                while not (self._start or self._body or self._finished):
                    await self._news.park()
                await self.flush()
                if self._said_all:
                    return
        finally:
            self._sent.set()

    async def flush(self) -> None:
        """Send what is there now."""
        with trio.move_on_after(self._settings.send_timeout) as patience:
            try:
                await self._send_now()
            except OSError:  # what ASGI's `send` raises when there is nobody, from 2.4 on
                self.cancel(Ending.CLIENT_GONE)
        if patience.cancelled_caught:
            self.cancel(Ending.STALLED)
            return
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self._drained.unpark_all()

    async def _send_now(self) -> None:
        self._sending = True
        try:
            if (start := self._start) is not None:
                self._start = None
                await self._send(start)
            body, self._body = bytes(self._body), bytearray()
            more = not self._finished
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            self._said_all = not more
            self.body_sent += len(body)
        finally:
            self._sending = False
