"""A handler of a few paths that notes what becomes of its requests, served in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field

from dpkit.serve.limits import HttpLimits
from dpkit.testing.http import open_server

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from dpkit.serve.face import Request, Responder
    from dpkit.serve.http import HttpServer
    from dpkit.serve.site import Answered

SSE = [(b"content-type", b"text/event-stream")]


@define(eq=False)
class Shop:
    """The path of a request names the method that answers it."""

    answered: list[Answered] = field(factory=list)
    seen: list[str] = field(factory=list)
    """Paths of requests whose handlers were begun."""
    cancelled: list[tuple[str, float]] = field(factory=list)
    """Paths of requests whose handlers were cancelled, and when."""
    ended: list[str] = field(factory=list)
    """Paths of requests whose handlers have ended, in whichever way."""
    gate: trio.Event = field(factory=trio.Event)
    responder: Responder | None = None

    def serve(self, **limits: Any) -> AbstractAsyncContextManager[HttpServer]:
        """Serve in memory."""
        made = HttpLimits(**limits)
        return open_server(self.handle, limits=made, observer=self.answered.append)

    async def handle(self, request: Request, responder: Responder) -> None:
        self.seen.append(request.path)
        self.responder = responder
        try:
            await getattr(self, request.path.strip("/"))(request, responder)
        except trio.Cancelled:
            self.cancelled.append((request.path, trio.current_time()))
            raise
        finally:
            self.ended.append(request.path)

    async def echo(self, request: Request, responder: Responder) -> None:
        responder.respond(200, (), request.body)

    async def stream(self, request: Request, responder: Responder) -> None:
        """An event a second, as many as the query says."""
        responder.start(200, SSE)
        for number in range(int(request.query or 3)):
            responder.write(b"data: %d\n\n" % number)
            await trio.sleep(1)
        responder.finish()

    async def wait(self, _request: Request, responder: Responder) -> None:
        """A long time before the first byte."""
        await self.gate.wait()
        responder.respond(200, (), b"done")

    async def wait_midway(self, _request: Request, responder: Responder) -> None:
        """A long time after the first event."""
        responder.start(200, SSE, b"data: first\n\n")
        await self.gate.wait()
        responder.write(b"data: last\n\n")
        responder.finish()

    async def answer_and_tidy(self, request: Request, responder: Responder) -> None:
        """A long time after the answer."""
        responder.respond(200, (), request.body)
        await self.gate.wait()

    async def large(self, request: Request, responder: Responder) -> None:
        """As many bytes as the query says, in one piece."""
        responder.respond(200, (), bytes(int(request.query)))

    async def fail(self, _request: Request, _responder: Responder) -> None:
        raise KeyError("no such thing")

    async def fail_midway(self, _request: Request, responder: Responder) -> None:
        responder.start(200, SSE, b"data: first\n\n")
        raise KeyError("no such thing")

    async def forget(self, _request: Request, _responder: Responder) -> None:
        await trio.lowlevel.checkpoint()

    async def forget_midway(self, _request: Request, responder: Responder) -> None:
        responder.start(200, SSE, b"data: first\n\n")
        await trio.lowlevel.checkpoint()
