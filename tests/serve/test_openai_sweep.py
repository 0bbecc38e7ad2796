"""A client leaves, and a server is cancelled, at every step of a request, in several schedules."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.serve.front import Front
from dpkit.serve.routes import API, Router
from dpkit.testing.http import Client, open_server, render
from dpkit.testing.idle import check_idle
from dpkit.testing.sweep import sweep
from tests.nursery.lab import settle
from tests.serve.desk import COMPLETIONS, SLOW, open_desk

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster
    from dpkit.testing.mark import Mark

SEEDS = range(int(os.environ.get("DPKIT_TEST_SEEDS", "2")))
ASKED = [
    {"prompt": "abc", "stream": True},
    {"prompt": "abc"},
    {"prompt": ["ab", "c"], "n": 2, "stream": True, "logprobs": 0},
]


def _ask(client: Client, fields: dict[str, Any]) -> None:
    client.send(render("POST", COMPLETIONS, json.dumps(fields).encode()))


@pytest.mark.parametrize("leave", [Client.close, Client.reset])
@pytest.mark.parametrize("asked", ASKED, ids=["stream", "whole", "several"])
def test_a_client_may_leave_at_any_step(asked: dict[str, Any], leave: Any) -> None:
    config = parse_config(f"{SLOW}[admission]\nmax_inflight = 2\n")

    async def scenario(mark: Mark) -> Cluster:
        async with open_desk(config) as desk:
            neighbour, client = desk.client(), desk.client(capacity=400)
            _ask(neighbour, {"prompt": "neighbour", "stream": True})
            with mark.target():
                _ask(client, asked)
                try:
                    await client.reply()
                finally:
                    leave(client)
            assert (await neighbour.reply()).is_complete
            await settle()
        return desk.cluster

    assert sweep(scenario, seeds=SEEDS, check=check_idle).steps >= 2


@pytest.mark.parametrize("asked", ASKED, ids=["stream", "whole", "several"])
def test_a_server_may_be_cancelled_at_any_step(asked: dict[str, Any]) -> None:
    config = parse_config(SLOW)

    async def scenario(mark: Mark) -> Cluster:
        async with open_cluster(config) as cluster:
            front = Front()
            front.use(cluster)
            with mark.target():
                async with open_server(Router(front, API)) as server:
                    client = Client.of(server)
                    _ask(client, asked)
                    await client.reply()
                    await trio.sleep(0.05)
            await settle()
        return cluster

    assert sweep(scenario, seeds=SEEDS, check=check_idle).steps >= 4
