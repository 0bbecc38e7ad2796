"""`dpkit engine`: a process that serves one engine, and what its exit code says.

Real processes and real sockets: signals, exit codes and last words are theirs.
"""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.cli.main import main
from dpkit.wire.structs import FinishCode
from dpkit.wire.zsocket import open_context
from tests.link.lab import ask
from tests.link.owner import open_owner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from tests.link.owner import Frontend, Owner

INT, TERM = signal.SIGINT, signal.SIGTERM

SLOW = '[[engines]]\nname = "slow"\ncount = 2\nmodel = "cost:h100-8b"\n'
OWN = '[[engines]]\nname = "own"\nmodel = "engine_models:{}"\n'

MODELS = """
import time
from dpkit.engine.models.echo import EchoModel

class Hanging(EchoModel):
    inline = False
    def execute(self, batch, cache):
        time.sleep(1000)

class Broken(EchoModel):
    def execute(self, batch, cache):
        raise RuntimeError("the GPU fell off the bus")
"""


@pytest.fixture
async def owner() -> AsyncGenerator[Owner]:
    async with open_context() as context, open_owner(context) as opened:
        yield opened


@asynccontextmanager
async def open_engine(
    folder: Path, owner: Owner, toml: str, *args: str, stdin: int = subprocess.DEVNULL
) -> AsyncIterator[subprocess.Popen[str]]:
    """A process of its own; killed at the end of the block if it is still there."""
    (folder / "dpkit.toml").write_text(toml)
    (folder / "engine_models.py").write_text(MODELS)
    command = [
        *(sys.executable, "-m", "dpkit", "engine", "--config", str(folder / "dpkit.toml")),
        *("--rank", "0", "--handshake", owner.handshake.endpoint, *args),
    ]
    path = f"{folder}:{os.getcwd()}"  # noqa: PTH109
    with subprocess.Popen(  # noqa: ASYNC220 - it takes no time
        command,
        text=True,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a process; its exit code, and all that it said."""
    out, _ = await trio.to_thread.run_sync(partial(process.communicate, timeout=15))
    return process.returncode, out


async def busy(frontend: Frontend) -> None:
    """Give the engine something to do, and wait until it does it."""
    frontend.say(ask("a", max_tokens=10_000, ignore_eos=True))
    await frontend.counts(running=1, waiting=0)


async def test_F03_sigterm_aborts_what_is_under_way_and_is_a_good_end(tmp_path, owner) -> None:
    async with open_engine(tmp_path, owner, SLOW, "--local") as process:
        (told,) = await owner.welcome()
        assert told.instance_id == "slow-0"
        assert told.data_parallel_size == 2
        (frontend,) = owner.frontends
        await busy(frontend)
        process.send_signal(TERM)
        *_, last = await frontend.entries("a")
        assert last.finish_reason is FinishCode.ABORT
        assert await ended(process) == (0, "")


async def test_an_engine_that_waits_for_its_owner_says_so(tmp_path, owner) -> None:
    async with open_engine(tmp_path, owner, SLOW, "--local", "--set", "log.level=info") as process:
        await owner.welcome()
        process.send_signal(TERM)
        _, said = await ended(process)
    assert f"engine slow-0 says HELLO at {owner.handshake.endpoint}, and waits" in said


@pytest.mark.parametrize(("signum", "code"), [(INT, 130), (TERM, 0)])
async def test_F07_an_idle_engine_ends_without_a_word(tmp_path, owner, signum, code) -> None:
    async with open_engine(tmp_path, owner, SLOW) as process:
        await owner.welcome()
        process.send_signal(signum)
        assert await ended(process) == (code, "")


async def test_a_lifeline_ends_it_when_whoever_held_it_is_gone(tmp_path, owner) -> None:
    options = {"stdin": subprocess.PIPE}
    async with open_engine(tmp_path, owner, SLOW, "--lifeline", **options) as process:
        await owner.welcome()
        (frontend,) = owner.frontends
        await busy(frontend)
        assert process.stdin is not None
        process.stdin.write("anything at all\n")
        process.stdin.close()
        *_, last = await frontend.entries("a")
        assert last.finish_reason is FinishCode.ABORT
        process.stdin = None  # or `communicate` would use it
        assert await ended(process) == (0, "")


async def test_the_second_signal_ends_a_process_that_hangs(tmp_path, owner) -> None:
    async with open_engine(tmp_path, owner, OWN.format("Hanging")) as process:
        await owner.welcome()
        (frontend,) = owner.frontends
        frontend.say(ask("a"))
        await frontend.counts(running=0, waiting=1)
        process.send_signal(TERM)
        (entry,) = await frontend.entries("a")
        assert entry.finish_reason is FinishCode.ABORT
        process.send_signal(TERM)
        assert (await ended(process))[0] == 143


async def test_a_model_that_fails_is_a_bad_end_that_everybody_hears_of(tmp_path, owner) -> None:
    async with open_engine(tmp_path, owner, OWN.format("Broken")) as process:
        await owner.welcome()
        (frontend,) = owner.frontends
        frontend.say(ask("a"))
        *_, last = await frontend.last_word()
        assert last.outputs[0].error is not None
        assert last.outputs[0].error.code == "engine_lost"
        code, said = await ended(process)
        assert code == 1
        assert "Traceback" in said
        assert said.endswith("error: engine own-0 failed: RuntimeError: the GPU fell off the bus\n")


async def test_a_model_that_is_not_there_is_no_start(tmp_path, owner) -> None:
    async with open_engine(tmp_path, owner, OWN.format("Nothing")) as process:
        await owner.greet()
        code, said = await ended(process)
        assert code == 3
        assert said.startswith("error: loading model 'engine_models:Nothing': ")


async def test_a_rank_of_a_group_without_a_coordinator_is_no_start(tmp_path, owner) -> None:
    toml = SLOW + "[coordinator]\nwave_coordination = true\n"
    async with open_engine(tmp_path, owner, toml, "--rendezvous", "127.0.0.1:1") as process:
        await owner.greet()
        code, said = await ended(process)
        assert code == 3
        assert said.startswith("error: rank 0 is to step together with others, and INIT names no")


def test_an_address_that_is_none_is_no_start(tmp_path, capsys) -> None:
    (tmp_path / "dpkit.toml").write_text(SLOW)
    args = [
        "engine",
        "--config",
        str(tmp_path / "dpkit.toml"),
        "--rank",
        "1",
        "--handshake",
        "here",
    ]
    assert main(args) == 3
    assert capsys.readouterr().err.startswith("error: cannot connect to here: ")


def test_a_rank_beyond_the_config_is_a_mistake(tmp_path, capsys) -> None:
    assert _main(tmp_path, "--rank", "2", "--handshake", "here") == 2
    assert "there is no rank 2: the config has ranks 0 to 1" in capsys.readouterr().err


def test_how_long_it_waits_for_a_frontend_is_a_duration(tmp_path, capsys) -> None:
    options = ("--rank", "0", "--handshake", "tcp://127.0.0.1:1", "--redial", "soon")
    assert _main(tmp_path, *options) == 2
    assert "--redial: expected a duration such as" in capsys.readouterr().err


def _main(folder: Path, *args: str) -> int:
    path = folder / "dpkit.toml"
    path.write_text(SLOW)
    return main(["engine", "--config", str(path), *args])
