"""`dpkit coordinator`: what it prints, whom it serves, and what its exit code says."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import frozen
from click.testing import CliRunner

from dpkit.cli.coordinator import command
from dpkit.cli.main import main
from dpkit.wire.codec import CoordinatorReady
from dpkit.wire.coordinator import CoordinatorAddresses
from dpkit.wire.structs import StartWave
from dpkit.wire.zsocket import open_context
from tests.link.coordination import open_client, open_engine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dpkit.wire.zsocket import Context


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


@frozen
class Served:
    """A coordinator in a process of its own."""

    process: subprocess.Popen[str]
    addresses: CoordinatorAddresses

    async def ended(self) -> tuple[int, str, str]:
        """Wait for its end: its exit code, and what else it said."""
        wait = partial(self.process.communicate, timeout=15)
        out, err = await trio.to_thread.run_sync(wait)
        return self.process.returncode, out, err


@asynccontextmanager
async def open_process(*args: str) -> AsyncIterator[Served]:
    """Have one up; killed at the end of the block if it is still there."""
    with subprocess.Popen(  # noqa: ASYNC220 - it takes no time
        [sys.executable, "-m", "dpkit", "coordinator", *args],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},  # noqa: PTH109
    ) as process:
        try:
            assert process.stdout is not None
            line = await trio.to_thread.run_sync(process.stdout.readline)
            yield Served(process, CoordinatorAddresses(**json.loads(line)))
        finally:
            process.kill()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_F07_it_serves_whom_it_told_its_addresses_and_ends_without_a_word(
    context, signum, code
) -> None:
    async with open_process("--engines", "2", "--interval", "10ms", "--waves") as served:
        async with (
            open_engine(context, served.addresses, 0) as first,
            open_engine(context, served.addresses, 1) as second,
            open_client(context, served.addresses.front) as client,
        ):
            assert await first.hear() == CoordinatorReady()
            second.tell(3, 1, 0.5)
            await client.wait_loads((0, 0, 0.0), (3, 1, 0.5))
            second.start_wave(0)
            assert await first.hear() == StartWave(0, 1)
        served.process.send_signal(signum)
        assert await served.ended() == (code, "", "")


async def test_a_lifeline_ends_it_when_whoever_held_it_is_gone() -> None:
    async with open_process("--engines", "1", "--lifeline") as served:
        assert await served.ended() == (0, "", ""), "its standard input is closed by asking"


def test_G02_an_address_that_is_taken_is_named_and_the_exit_code_is_3(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["coordinator", "--engines", "1", "--bind", address]) == 3
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: cannot listen at {address}: Address already in use")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "0"], "0 is not in the range"),
        (["--engines", "65537"], "65537 is not in the range"),
        ([], "Missing option '--engines'"),
        (["--engines", "1", "--interval", "3"], 'expected a duration such as "100ms"'),
        (["--engines", "1", "--interval", "90s"], "90s is not between 1ms and 60s"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_listens(options, message) -> None:
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert message in result.output
