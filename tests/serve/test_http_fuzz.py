"""Damaged requests by the thousand, over connections in memory: no crash, no leak, no lie."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest
from trio.testing import wait_all_tasks_blocked

from dpkit.testing.http import Client, open_server
from tests.serve.mauled import CORPUS, LIMITS, maul

if TYPE_CHECKING:
    from dpkit.serve.face import Request, Responder
    from dpkit.serve.http import HttpServer

_BATCH = 100
_STATUSES = {b"200", b"100", b"400", b"413", b"417", b"431", b"501", b"505"}


async def answer(request: Request, responder: Responder) -> None:
    """Be sure of what came, and answer in one of the ways there are."""
    assert request.path.startswith("/") or request.path == "*"
    assert len(request.body) <= LIMITS.max_body
    assert all(b"\n" not in value and b"\0" not in value for _, value in request.headers)
    if request.method == "POST":
        responder.start(200, (), request.body)
        responder.finish()
    else:
        responder.respond(200, (), request.body)


def throw(server: HttpServer, rng: random.Random) -> Client:
    """Connect, send something damaged, and stay, leave, or vanish."""
    client = Client.of(server)
    data = maul(rng.choice(CORPUS), rng)
    cut = rng.randrange(len(data) + 1)
    client.send(data[:cut])
    client.send(data[cut:])
    return client


def statuses(data: bytes) -> set[bytes]:
    """Of all answers in it."""
    return set(re.findall(rb"HTTP/1\.1 (\d\d\d) ", data))


async def fuzz(count: int, seed: int) -> None:
    rng = random.Random(seed)
    async with open_server(answer, limits=LIMITS) as server:
        for _ in range(count // _BATCH):
            clients = [throw(server, rng) for _ in range(_BATCH)]
            await wait_all_tasks_blocked()
            for client in clients:
                assert statuses(bytes(client.transport.outgoing)) <= _STATUSES
                rng.choice([Client.close, Client.reset, Client.end])(client)
            await wait_all_tasks_blocked()
            now = server.statistics()
            assert (now.connections, now.bodies, now.unsent) == (0, 0, 0)
        assert (await Client.of(server).request("GET", "/")).status == 200


async def test_damaged_requests_harm_nobody() -> None:
    await fuzz(2000, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
async def test_damaged_requests_harm_nobody_ever(seed: int) -> None:
    await fuzz(10_000, seed)
