"""vLLM's real frontend over dpkit's engines and coordinator, all in processes of their own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from socket import create_server
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.wire.zsocket import open_context
from tests.link.coordination import open_client
from tests.peers.coordinator import open_command

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.wire.coordinator import CoordinatorAddresses
    from tests.peers.conftest import Serve
    from tests.peers.harness import Served

pytestmark = [pytest.mark.peer, pytest.mark.timeout(120)]

PACED = '[[engines]]\nname = "paced"\ncount = 2\nmodel = "cost:h100-8b"\n'

LOCKSTEP = """
[[engines]]
model = "echo"
count = 2

[coordinator]
wave_coordination = true
"""


def ask_many(served: Served) -> None:
    """32 completions at a time, all of which must come."""

    def ask(number: int) -> str:
        answer = served.complete(f"request {number}", max_tokens=20, ignore_eos=True)
        return str(answer["choices"][0]["finish_reason"])

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(64))) == ["length"] * 64


async def hear_busy(addresses: CoordinatorAddresses, work: trio.Event) -> set[int]:
    """Which engines a client of ours hears to be busy, until `work` is done and all are idle."""
    busy = set[int]()
    async with open_context() as context, open_client(context, addresses.front) as client:

        def all_idle() -> bool:
            busy.update(rank for rank, load in enumerate(client.loads) if load[0] + load[1])
            return work.is_set() and client.loads == ((0, 0, 0.0),) * 2

        await client.wait(all_idle)
    return busy


async def listen_to(served: Served, addresses: CoordinatorAddresses) -> set[int]:
    """Which engines a client of ours hears to be busy while the frontend asks for much."""
    busy, done = set[int](), trio.Event()

    async def listen() -> None:
        busy.update(await hear_busy(addresses, done))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.to_thread.run_sync(ask_many, served)
        done.set()
    return busy


def test_vllms_frontend_and_a_client_of_ours_hear_the_same_coordinator(
    serve: Serve, byte_model: Path, environment: dict[str, str]
) -> None:
    with (
        open_command(2, environment=os.environ | environment) as addresses,
        serve(PACED, byte_model, coordinator_at=addresses) as served,
    ):
        assert trio.run(listen_to, served, addresses) == {0, 1}
        assert served.get("/health")[0] == 200


def test_the_frontend_serves_on_while_the_coordinator_is_gone_and_when_it_is_back(
    serve: Serve, byte_model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    there = ("--bind", f"ipc://{tmp_path}")
    with ExitStack() as stack:
        with open_command(2, *there, environment=os.environ | environment) as addresses:
            served = stack.enter_context(serve(PACED, byte_model, coordinator_at=addresses))
            ask_many(served)
        ask_many(served)
        with open_command(2, *there, environment=os.environ | environment) as addresses:
            assert trio.run(listen_to, served, addresses) == {0, 1}
            assert served.get("/health")[0] == 200


async def hear_waves(served: Served, addresses: CoordinatorAddresses) -> list[tuple[int, bool]]:
    """What a client of ours hears of waves, while the frontend asks for one answer at a time."""
    async with open_context() as context, open_client(context, addresses.front) as client:
        await client.wait_heard()
        for wave in range(3):
            ask = partial(served.complete, f"wave {wave}", max_tokens=40)
            answer = await trio.to_thread.run_sync(ask)
            assert answer["choices"][0]["text"] == f"wave {wave}"

            def is_over(wave: int = wave) -> bool:
                last = client.heard[-1]
                return last.current_wave == wave + 1 and not last.engines_running

            await client.wait(is_over)
        return [
            (told.current_wave, told.engines_running) for told in client.heard if told.loads is None
        ]


def test_lockstep_engines_go_through_waves_which_the_frontend_is_told(
    serve: Serve, byte_model: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip("torch")
    with create_server(("127.0.0.1", 0)) as probe:
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        open_command(2, "--waves", environment=os.environ | environment) as addresses,
        serve(LOCKSTEP, byte_model, "--rendezvous", meet, coordinator_at=addresses) as served,
    ):
        waves = trio.run(hear_waves, served, addresses)
        assert waves == [(0, True), (1, False), (1, True), (2, False), (2, True), (3, False)]
        assert served.get("/health")[0] == 200
