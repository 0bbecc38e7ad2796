"""The yardstick of `bench_http`: OpenAI's stream as a Starlette application has it, on uvicorn.

Its tokens come from nowhere, and its events are put together as cheaply as can be: text spliced
into a template. Prints its URL when it listens.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

_EVENT = (
    'data: {{"id":"cmpl-1","object":"text_completion","created":1,"model":"served","choices":'
    '[{{"index":0,"text":"{}","logprobs":null,"finish_reason":null}}]}}\n\n'
)
_USAGE = '"usage":{{"prompt_tokens":{},"completion_tokens":{},"total_tokens":0}}'
_LAST = 'data: {{"id":"cmpl-1","object":"text_completion","choices":[],{}}}\n\ndata: [DONE]\n\n'


async def models(_: Request) -> Response:
    """The one that there is."""
    return JSONResponse({"object": "list", "data": [{"id": "served"}]})


async def tokenize(_: Request) -> Response:
    """Some tokens."""
    return JSONResponse({"tokens": list(range(97, 123))})


async def health(_: Request) -> Response:
    """All is well."""
    return Response()


async def completions(request: Request) -> Response:
    """A stream of as many tokens as are asked for."""
    asked = json.loads(await request.body())

    async def events() -> AsyncIterator[str]:
        for _ in range(asked["max_tokens"]):
            await asyncio.sleep(0)  # where an engine would be waited for
            yield _EVENT.format("a")
        yield _LAST.format(_USAGE.format(len(asked["prompt"]), asked["max_tokens"]))

    return StreamingResponse(events(), media_type="text/event-stream")


def main() -> None:
    """Serve until told to stop."""
    routes = [
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/health", health),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        Starlette(routes=routes), loop="uvloop", http="httptools", log_level="error"
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
