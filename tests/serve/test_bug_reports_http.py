"""What users of the peers report, where HTTP alone has to answer for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.serve.face import Ending
from dpkit.serve.http import serve_http
from dpkit.serve.listeners import open_listeners
from dpkit.testing.http import Client, open_server, render
from tests.serve.shop import SSE, Shop

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dpkit.serve.face import Request, Responder

STREAMS = 20

CLIENT = """
import socket, sys, time
made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
made.sendall(b"POST %s HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" % sys.argv[2].encode())
time.sleep(60)
"""


@pytest.mark.parametrize("path", ["/wait", "/wait_midway"])
async def test_D14_a_client_killed_without_a_word_ends_its_request(path: str) -> None:  # noqa: N802
    shop = Shop()
    (listener,) = await open_listeners("127.0.0.1:0")
    port = listener.address.rpartition(":")[2]
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_http, shop.handle, [listener])
            child = await trio.lowlevel.open_process([sys.executable, "-c", CLIENT, port, path])
            while not shop.seen:  # noqa: ASYNC110 - it starts in its own time
                await trio.sleep(0.005)
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
            while not shop.cancelled:  # noqa: ASYNC110
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()


async def say_goodbye(_request: Request, responder: Responder) -> None:
    """Stream until cancelled, and say why."""
    responder.start(200, SSE, b"data: token\n\n")
    try:
        await trio.sleep_forever()
    except trio.Cancelled:
        if responder.ending is Ending.SHUTDOWN:
            responder.write(b'data: {"error": "aborted: shutdown"}\n\n')
            responder.finish()
        raise


async def test_F03_every_stream_is_told_that_the_server_ends(autojump_clock: MockClock) -> None:  # noqa: N802
    async with open_server(say_goodbye) as server:
        clients = [Client.of(server) for _ in range(STREAMS)]
        for each in clients:
            each.send(render("GET", "/"))
        await trio.sleep(1)
        deadline = trio.current_time() + 5
        server.stop(deadline)
        for each in clients:
            reply = await each.reply()
            assert reply.is_complete
            assert b"aborted: shutdown" in reply.body
        assert trio.current_time() == deadline


async def test_F11_closing_is_bounded_and_a_second_signal_wins(autojump_clock: MockClock) -> None:  # noqa: N802
    """A stream whose engine hangs, and a client that reads nothing and never hangs up."""
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, Shop().handle, ())
        hung, deaf = Client.of(server), Client.of(server, capacity=0)
        hung.send(render("GET", "/wait_midway"))
        deaf.send(render("GET", "/wait_midway"))
        await trio.sleep(1)
        server.stop(trio.current_time() + 1000)
        await trio.sleep(1)
        server.stop(trio.current_time())
        stopped_at = trio.current_time()
        while server.statistics().connections:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert trio.current_time() - stopped_at <= 1.1


async def test_K09_what_is_too_much_is_refused_at_once(autojump_clock: MockClock) -> None:  # noqa: N802
    shop = Shop()
    async with shop.serve(max_connections=50) as server:
        for _ in range(50):
            Client.of(server).send(render("GET", "/wait"))
        await trio.sleep(1)
        start = trio.current_time()
        for _ in range(50):
            reply = await Client.of(server).request("GET", "/echo")
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert trio.current_time() == start


def test_F07_F10_a_server_in_a_program_leaves_signals_and_output_alone() -> None:  # noqa: N802
    program = """
import signal, trio
from dpkit.serve.http import serve_http
from dpkit.serve.listeners import open_listeners
async def main():
    before = [signal.getsignal(each) for each in range(1, 32)]
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, None, await open_listeners("127.0.0.1:0"))
        assert [signal.getsignal(each) for each in range(1, 32)] == before
        server.stop(trio.current_time())
trio.run(main)
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], check=True, capture_output=True, timeout=20
    )
    assert (ended.stdout, ended.stderr) == (b"", b"")
