"""A client that leaves, and a server that is cancelled, at every step and in many schedules."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.serve.http import serve_http
from dpkit.testing.http import Client, ReplyReader, render
from dpkit.testing.sweep import sweep
from tests.serve.shop import Shop

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.http import HttpServer
    from dpkit.testing.mark import Mark

SEEDS = range(2)
MORE_SEEDS = range(2, 40)
NEIGHBOURS = 3


class Run:
    """One server and its clients."""

    def __init__(self) -> None:
        self.shop = Shop()
        self.shop.gate.set()
        self.clients: list[Client] = []
        self.server: HttpServer | None = None
        self.complete = 0

    async def serve(self, task_status: trio.TaskStatus[HttpServer]) -> None:
        handler, observer = self.shop.handle, self.shop.answered.append
        await serve_http(handler, (), observer=observer, task_status=task_status)

    async def ask(self, server: HttpServer, leave: Callable[[Client], None]) -> None:
        """Ask for a stream, reading slowly, and for something short; leave in the end."""
        client = Client.of(server, capacity=200)
        self.clients.append(client)
        try:
            for path in ("/stream?3", "/echo", "/answer_and_tidy"):
                client.send(render("POST", path, b"prompt"))
                reader = ReplyReader()
                while not reader.is_complete and (data := await client.receive()):
                    reader.feed(data)
                    await trio.sleep(0.3)
                if not reader.is_complete:
                    return
            self.complete += 1
        finally:
            leave(client)

    def check(self) -> None:
        if self.server is None:
            return
        now = self.server.statistics()
        assert (now.connections, now.bodies, now.unsent) == (0, 0, 0)
        assert all(each.transport.is_closed for each in self.clients)
        assert sorted(self.shop.ended) == sorted(self.shop.seen), "every handler has ended"
        assert len(self.shop.answered) >= len(self.shop.seen), "each with a record"


seeds = pytest.mark.parametrize(
    "seeds", [SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.slow)], ids=["few", "many"]
)


@seeds
@pytest.mark.parametrize("leave", [Client.close, Client.reset, Client.end])
def test_a_client_may_leave_at_any_step(leave: Callable[[Client], None], seeds: range) -> None:
    async def scenario(mark: Mark) -> Run:
        run = Run()

        async def target(server: HttpServer) -> None:
            with mark.target():
                await run.ask(server, leave)

        async with trio.open_nursery() as nursery:
            run.server = await nursery.start(run.serve)
            async with trio.open_nursery() as asking:
                asking.start_soon(target, run.server)
                for _ in range(NEIGHBOURS):
                    asking.start_soon(partial(run.ask, run.server, Client.close))
            run.server.stop(trio.current_time() + 60)
        return run

    def check(run: Run) -> None:
        run.check()
        assert run.complete >= NEIGHBOURS, "nobody else notices"

    swept = sweep(scenario, seeds=seeds, check=check)
    assert swept.steps > 10


@seeds
def test_a_server_may_be_cancelled_at_any_step(seeds: range) -> None:
    async def scenario(mark: Mark) -> Run:
        run = Run()

        async def target(task_status: trio.TaskStatus[HttpServer]) -> None:
            with mark.target():
                await run.serve(task_status)

        async def ask() -> None:
            assert run.server is not None
            with suppress(ConnectionResetError):
                await run.ask(run.server, Client.close)

        async with trio.open_nursery() as nursery:
            try:
                run.server = await nursery.start(target)
            except RuntimeError:  # it was cancelled before it had started
                return run
            for _ in range(NEIGHBOURS):
                nursery.start_soon(ask)
            await trio.sleep(2)
            run.server.stop(trio.current_time() + 0.5)
        return run

    sweep(scenario, seeds=seeds, check=Run.check)
