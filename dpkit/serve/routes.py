"""Which path is answered by what, for whom; and what is said of everything else.

A `Router` is the handler of a server. What goes wrong in a route is told to its client here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from dpkit.serve import admin, generation, openai, status
from dpkit.serve.chunks import encode
from dpkit.serve.errors import ApiError, api_error
from dpkit.serve.heads import JSON
from dpkit.serve.openapi import document
from dpkit.serve.requests import ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.serve.face import Request, Responder
    from dpkit.serve.front import Front

    Run: TypeAlias = Callable[[Front, Request, Responder], Awaitable[None] | None]


class Access(StrEnum):
    """Who may use a route."""

    OPEN = "open"
    """Everybody: probes have no keys."""
    API = "api"
    """Who has an API key, if there are any."""
    ADMIN = "admin"
    """Who has an admin key, if there are any."""


@frozen
class Route:
    """One method of one path."""

    method: str
    path: str
    """A path that ends in a slash stands for all that begin with it."""
    run: Run
    access: Access = Access.API
    body: type | None = None
    """What its body is; None: nothing is read."""
    is_nowait: bool = False
    """Whether `run` has answered when it returns, without a wait: it is no async function."""


async def _metrics(front: Front, request: Request, responder: Responder) -> None:
    """Answer with what Prometheus collects."""
    if front.metrics is None:
        raise not_found(request)
    await front.metrics(request, responder)


API = (
    Route("POST", "/v1/completions", generation.complete, body=CompletionBody),
    Route("POST", "/v1/chat/completions", generation.chat, body=ChatBody),
    Route("GET", openai.MODELS, openai.models),
    Route("GET", f"{openai.MODELS}/", openai.model),
    Route("POST", "/tokenize", openai.tokenize, body=openai.TokenizeBody),
    Route("POST", "/detokenize", openai.detokenize, body=openai.DetokenizeBody),
    Route("GET", "/statistics", status.statistics),
    Route("GET", "/health", status.health, Access.OPEN, is_nowait=True),
    Route("GET", "/ready", status.ready, Access.OPEN, is_nowait=True),
    Route("GET", "/version", status.tell_version, Access.OPEN, is_nowait=True),
    Route("GET", "/metrics", _metrics, Access.OPEN),
)
ADMIN = (
    Route("POST", "/admin/drain", admin.drain, Access.ADMIN, admin.DrainBody),
    Route("POST", "/admin/scale", admin.scale, Access.ADMIN, admin.ScaleBody),
    Route("POST", "/admin/reload", admin.reload, Access.ADMIN, admin.ReloadBody),
)


class Router:
    """Answers requests by their routes.

    Args:
        front: What the routes share.
        routes: Those that there are.
    """

    def __init__(self, front: Front, routes: tuple[Route, ...]) -> None:
        self._front = front
        self._keys = {Access.API: front.api_keys, Access.ADMIN: front.admin_keys}
        self._routes: dict[str, dict[str, Route]] = {}
        self.routes = (*routes, Route("GET", "/openapi.json", self._describe, Access.OPEN))
        for route in self.routes:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._probes = {
            (route.method, route.path): route.run
            for route in self.routes
            if route.is_nowait and route.access is Access.OPEN
        }
        self._prefixes = tuple(path for path in self._routes if path.endswith("/"))

    async def __call__(self, request: Request, responder: Responder) -> None:
        """Answer a request."""
        try:
            route = self._find(request)
            if route.access is not Access.OPEN:
                self._keys[route.access].check(request)
            if (rest := route.run(self._front, request, responder)) is not None:
                await rest
        except Exception as error:
            if responder.status is not None:
                raise
            api_error(error, request.id).answer(responder)

    def answer_nowait(self, request: Request, responder: Responder) -> bool:
        """Answer a probe; False: it is none, or not a plain one."""
        run = self._probes.get((request.method, request.path))
        if run is not None:
            run(self._front, request, responder)
        return run is not None

    async def _describe(self, front: Front, request: Request, responder: Responder) -> None:  # noqa: ARG002
        """Answer with the OpenAPI document of all these routes."""
        responder.respond(200, (JSON,), encode(document(self.routes)))

    def name_of(self, path: str) -> str | None:
        """The path of the route that answers a path, for labels; None: there is none."""
        if path in self._routes:
            return path
        return next((name for name in self._prefixes if path.startswith(name)), None)

    def _find(self, request: Request) -> Route:
        if (name := self.name_of(request.path)) is None:
            raise not_found(request)
        methods = self._routes[name]
        wanted = "GET" if request.method == "HEAD" else request.method
        if (route := methods.get(wanted)) is None:
            allowed = [*methods, "HEAD"] if "GET" in methods else [*methods]
            allow = ", ".join(allowed)
            message = f"{request.path} takes {allow}, not {request.method}"
            raise ApiError(405, message, headers=[(b"allow", allow.encode())])
        return route


def not_found(request: Request) -> ApiError:
    """There is no such path here."""
    return ApiError(404, f"there is no {request.path[:200]!r} here", code="not_found")
