"""The HTTP server of dpkit alone, for `bench_http`: the routes of `starlette_server`, on it.

Tokens come from nowhere there and here, one checkpoint each. Prints its URL when it listens.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import trio

from dpkit.serve.http import serve_http
from dpkit.serve.listeners import open_listeners

if TYPE_CHECKING:
    from dpkit.serve.face import Request, Responder

JSON = ((b"content-type", b"application/json"),)
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
WHOLE = {
    "/v1/models": b'{"object": "list", "data": [{"id": "served"}]}',
    "/tokenize": json.dumps({"tokens": list(range(97, 123))}).encode(),
    "/health": b"",
}
_EVENT = (
    'data: {{"id":"cmpl-1","object":"text_completion","created":1,"model":"served","choices":'
    '[{{"index":0,"text":"{}","logprobs":null,"finish_reason":null}}]}}\n\n'
)
_USAGE = '"usage":{{"prompt_tokens":{},"completion_tokens":{},"total_tokens":0}}'
_LAST = 'data: {{"id":"cmpl-1","object":"text_completion","choices":[],{}}}\n\ndata: [DONE]\n\n'


def answer_nowait(request: Request, responder: Responder) -> bool:
    """Answer what is always the same."""
    if (body := WHOLE.get(request.path)) is not None:
        responder.respond(200, JSON, body)
    return body is not None


async def handle(request: Request, responder: Responder) -> None:
    """Answer the others."""
    asked = json.loads(request.body)
    responder.start(200, STREAM)
    for _ in range(asked["max_tokens"]):
        await trio.lowlevel.checkpoint()  # where an engine would be waited for
        responder.write(_EVENT.format("a").encode())
    usage = _USAGE.format(len(asked["prompt"]), asked["max_tokens"])
    responder.write(_LAST.format(usage).encode())
    responder.finish()


async def main() -> None:
    """Serve until the process ends."""
    listeners = await open_listeners("127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, handle, listeners, quick=answer_nowait))
        print(f"http://{listeners[0].address}", flush=True)


if __name__ == "__main__":
    trio.run(main)
