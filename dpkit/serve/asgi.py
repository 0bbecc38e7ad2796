"""The same routes as an ASGI application, to be mounted in somebody else's server or framework.

The server must run on Trio, in the same run as the cluster: anycorn or hypercorn with their Trio
workers. It sees the client, so a disconnect is what its ``receive`` says; a middleware that keeps
that to itself has answers generated for clients that have gone. dpkit's own server
(`dpkit.serve.service`) needs nobody for that, and costs a quarter.

Speaks ASGI 3, as of HTTP specification 2.3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from dpkit.logs import REQUEST_ID
from dpkit.serve.asgiresponder import AsgiResponder
from dpkit.serve.errors import ApiError
from dpkit.serve.face import Ending, Request
from dpkit.serve.front import Front
from dpkit.serve.routes import ADMIN, API, Router
from dpkit.serve.site import CLIENT_CLOSED, Answered

if TYPE_CHECKING:
    from dpkit.config.server import ServerConfig
    from dpkit.nursery.cluster import Cluster
    from dpkit.serve.face import Handler
    from dpkit.serve.front import Reload

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_GOOD_ID = re.compile(rb"[!-~]{1,128}")


class _Gone(Exception):  # noqa: N818 - nobody sees it
    """The client left before its request was complete."""


class AsgiApp:
    """An ASGI application that serves a cluster.

    Args:
        cluster: It must outlive the server.
        settings: Names, keys and limits of bodies and of time; None: what the cluster's config
            says, or the defaults. Where to listen is the server's affair.
        reload: As for `serve_http`.
        metrics: As for `serve_http`.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        settings: ServerConfig | None = None,
        reload: Reload | None = None,
        metrics: Handler | None = None,
    ) -> None:
        self.front = Front(settings or cluster.config.server, reload=reload, metrics=metrics)
        self.front.use(cluster)
        self._router = Router(self.front, API + ADMIN if self.front.admin_keys else API)
        self._prefix = os.urandom(6).hex()
        self._numbers = count()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        settings = self.front.settings
        request_id = self._id_of(scope["headers"])
        REQUEST_ID.set(request_id)
        responder = AsgiResponder(
            send, request_id, head=scope["method"] == "HEAD", settings=settings
        )
        try:
            request = await self._read(scope, receive, request_id)
        except _Gone:
            return
        except ApiError as error:
            error.answer(responder)
            await responder.flush()
            self._tell(None, scope, responder, trio.current_time())
            return
        began_at = trio.current_time()
        try:
            await self._serve(request, receive, responder)
        finally:
            self._tell(request, scope, responder, began_at)
        responder.check_complete()

    async def _serve(self, request: Request, receive: Receive, responder: AsgiResponder) -> None:
        failure: Exception | None = None  # raised outside the nursery, which would wrap it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, receive, responder)
            nursery.start_soon(responder.pump)
            try:
                with responder.scope:
                    await self._router(request, responder)
                await responder.wait_sent()
            except Exception as error:  # noqa: BLE001 - raised below
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _tell(
        self, request: Request | None, scope: Message, responder: AsgiResponder, began_at: float
    ) -> None:
        """Have observers know of an answer that has ended."""
        ending, status = responder.ending or Ending.FAILED, responder.status or 500
        if ending is Ending.CLIENT_GONE:
            status = CLIENT_CLOSED
        answered = Answered(
            request=request,
            peer=_peer(scope),
            status=status,
            ending=ending,
            body_sent=responder.body_sent,
            seconds=trio.current_time() - began_at,
        )
        self.front.tell_answered(answered)

    async def _read(self, scope: Message, receive: Receive, request_id: str) -> Request:
        most, body = self.front.settings.max_body, bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            if len(body) > most:
                raise ApiError(413, f"the body is larger than {most} bytes", code="too_large")
            if not message.get("more_body", False):
                break
        # A framework that mounts us keeps the whole path, and says how much of it is its own.
        path: str = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        return Request(
            method=scope["method"],
            path=path,
            query=scope.get("query_string", b"").decode("latin-1"),
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body=bytes(body),
            peer=_peer(scope),
            id=request_id,
            target=scope.get("raw_path") or path.encode(),
            http_version=scope.get("http_version", "1.1"),
        )

    def _id_of(self, headers: Any) -> str:
        for name, value in headers:
            if name == b"x-request-id" and _GOOD_ID.fullmatch(bytes(value)):
                return bytes(value).decode("ascii")
        return f"req-{self._prefix}-{next(self._numbers):x}"


def _peer(scope: Message) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "unknown"


async def _live(receive: Receive, send: Send) -> None:
    """The cluster is up before there is an app, so there is nothing to start or to stop."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return


async def _watch(receive: Receive, responder: AsgiResponder) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    responder.cancel(Ending.CLIENT_GONE)
