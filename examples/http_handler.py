"""The HTTP server without a cluster: a handler of your own, a stream, and a client that leaves.

    python examples/http_handler.py

Needs the extra `serve`. The client here is a few lines on a bare socket; curl does as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.serve.face import Ending
from dpkit.serve.http import serve_http
from dpkit.serve.listeners import open_listeners

if TYPE_CHECKING:
    from dpkit.serve.face import Request, Responder

END = b"\r\n0\r\n\r\n"
EVENTS = [(b"content-type", b"text/event-stream")]


async def answer(request: Request, responder: Responder) -> None:
    """Count for as long as somebody listens."""
    if request.path != "/count":
        responder.respond(404, body=b"there is only /count\n")
        return
    responder.start(200, EVENTS)
    number = 0
    try:
        while number < int(request.query or 1000):
            responder.write(b"data: %d\n\n" % number)
            number += 1
            await trio.sleep(0.01)
            await responder.wait_drained()  # who reads slowly is sent less
    except trio.Cancelled:
        print(f"cancelled: {responder.ending}")
        if responder.ending is Ending.SHUTDOWN:
            responder.write(b"data: the server stops\n\n")
            responder.finish()
        raise
    responder.finish()


async def ask(port: int, target: str, *, until: bytes) -> bytes:
    """Ask, read until something comes, and leave."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        data = b""
        while until not in data and (more := await stream.receive_some()):
            data += more
    return data


async def main() -> None:
    """Serve, ask three times, and stop."""
    listeners = await open_listeners("127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, answer, listeners)
        port = int(server.addresses[0].rpartition(":")[2])
        whole = await ask(port, "/count?3", until=END)
        print(f"a whole answer: {whole.count(b'data:')} events")
        await ask(port, "/count", until=b"data: 5\n")
        nursery.start_soon(hear_the_end, port)
        await trio.sleep(0.1)
        server.stop(deadline=trio.current_time() + 0.1)


async def hear_the_end(port: int) -> None:
    """Be there when the server stops."""
    data = await ask(port, "/count", until=END)
    print("told:", next(line for line in data.split(b"\n") if b"stops" in line).decode())


if __name__ == "__main__":
    trio.run(main)
