"""vLLM's own engines behind dpkit: started by vLLM's own command line, driven by dpkit's client.

All of vLLM's Python is real: engine core, scheduler, KV cache, sockets. Only the model is ours, as
there is no GPU: it says back what it was told (`vllm_echo`).
"""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

import os
import shlex
import signal
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.cli.joining import commands as start_commands
from dpkit.errors import EngineLost, RequestRejected
from dpkit.names import Cause
from dpkit.nursery.events import EventKind
from dpkit.testing.processes import descendants
from tests.clusters import make_config, told
from tests.joined.lab import free_address, group, life_of, open_joined, serves
from tests.peers import vllm_python
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from dpkit.nursery.cluster import Cluster

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.timeout(600), vllm_python.NEEDED]

PATIENCE_S = 240.0
VLLM = 'join_timeout = "240s", dead_after = "5s", abort_timeout = "20s"'
OPTIONS = (
    *("--distributed-executor-backend", "vllm_echo.EchoExecutor"),
    *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
)


def commands(address: str, model: Path, count: int) -> list[list[str]]:
    """What `dpkit explain` says how to start the engines: all of them, or one."""
    return start_commands_of(group(address, count=count, model=str(model)))


def start_commands_of(toml: str, settings: str = "") -> list[list[str]]:
    """Likewise, of any group."""
    (asked,) = make_config(toml, settings=settings).engines
    return [shlex.split(each) for each in start_commands("dpkit.toml", asked, 0)]


@asynccontextmanager
async def running(
    said: Sequence[str], folder: Path, step_s: float = 0.0
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Do as `explain` says, but for the model's executor; ended when the block is."""
    program, *rest = said
    assert program == "vllm"
    command = vllm_python.command("vllm_main.py", *rest, *OPTIONS)
    environment = os.environ | vllm_python.environment() | {"ECHO_STEP_S": str(step_s)}
    log = folder / f"vllm-{trio.current_time()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - it takes no time
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.wait)


async def ask(cluster: Cluster, prompt: str, **options: Any) -> None:
    """Have something said back."""
    assert (await cluster.client.complete(prompt, **options)).text == prompt


def settled(cluster: Cluster, count: int) -> bool:
    """Whether every engine has said that it has dropped what was aborted."""
    connections = [life_of(cluster, f"v-{rank}")._connection for rank in range(count)]
    return all(each is not None and each.is_idle for each in connections)


async def test_the_command_that_explain_says_starts_engines_that_serve(
    tmp_path: Path, byte_model: Path
) -> None:
    address = free_address()
    both, _ = commands(address, byte_model, 2)
    config = group(address, count=2, model=str(byte_model), vllm=VLLM)
    async with running(both, tmp_path, 0.002), open_joined(config) as cluster:
        limits = life_of(cluster, "v-0").limits
        assert (limits.max_model_len, limits.block_size, limits.num_blocks) == (2048, 16, 512)
        await all_sorts(cluster)
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(ask, cluster, f"{number} of two hundred")
        assert cluster.client.statistics().causes[Cause.STOP] >= 200
        shares = [each.totals.requests for each in cluster.statistics().engines]
        assert abs(shares[0] - shares[1]) < 20, "both did their part"
        await leave_many(cluster)


async def all_sorts(cluster: Cluster) -> None:
    """Ask for what takes a way of its own."""
    complete = cluster.client.complete
    assert (await complete("stop before this", stop="before")).text == "stop "
    assert (await complete("at a token", stop_token_ids=[ord("k")])).text == "at a tok"
    assert (await complete("over", max_tokens=7, ignore_eos=True)).text == "overove"
    assert (await complete("no end yet", min_tokens=30, max_tokens=40)).text == "no end yet"
    with_logprobs = await complete("abc", logprobs=2, prompt_logprobs=1, temperature=0.5)
    assert [each.token_id for each in with_logprobs.logprobs[:3]] == [*b"abc"]
    assert [each.token_id for each in with_logprobs.prompt_logprobs] == [*b"bc"]
    long = "a prompt of several chunks, " * 60
    assert (await complete(long, max_tokens=300)).text == long[:300]
    assert len(await cluster.client.complete_many("many", n=3, temperature=1.0)) == 3
    for bad in ({"temperature": 2.5}, {"max_tokens": 5000}, {"logit_bias": {9999: 1.0}}):
        with pytest.raises(RequestRejected):
            await complete("?", **bad)
    with pytest.raises(RequestRejected):
        await complete("x" * 3000)


async def leave_many(cluster: Cluster) -> None:
    """Hang up in the middle, and see that engines drop what nobody wants, and say so."""

    async def leave(number: int) -> None:
        options = {"max_tokens": 1500, "ignore_eos": True}
        async with cluster.client.generate(f"{number}", **options) as stream:  # type: ignore[arg-type]
            await stream.__anext__()

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(leave, number)
    await until(lambda: settled(cluster, 2), limit=5)
    lives = [life_of(cluster, f"v-{rank}") for rank in range(2)]
    assert sum(life.statistics().requests_aborted for life in lives) >= 40
    assert not any(life._connection.unacknowledged for life in lives)  # type: ignore[union-attr]


async def test_E01_engines_die_hang_and_end_each_for_itself_and_join_again(
    tmp_path: Path, byte_model: Path
) -> None:
    address = free_address()
    _, single = commands(address, byte_model, 2)
    first, second = ([str(rank) if word == "RANK" else word for word in single] for rank in (0, 1))
    config = group(address, count=2, model=str(byte_model), vllm=VLLM)
    async with (
        running(first, tmp_path, 0.02) as one,
        running(second, tmp_path, 0.02) as other,
        open_joined(config) as cluster,
    ):
        await kill_the_first(cluster, one)
        async with running(first, tmp_path, 0.02) as one_again:
            await until(lambda: serves(cluster, "v-0", 1), limit=PATIENCE_S)
            await ask(cluster, "again", engine="v-0")
            await terminate_the_second(cluster, other)
            await hang_the_first(cluster, one_again)


def signal_engines(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signal the engines that vLLM's command has started."""
    for pid in descendants(process.pid):
        os.kill(pid, signum)


async def kill_the_first(cluster: Cluster, process: subprocess.Popen[bytes]) -> None:
    """What it had is lost; the other one serves on."""
    with pytest.raises(EngineLost, match="v-0 was lost while it held request"):
        async with cluster.client.generate("goes on and on " * 9, engine="v-0") as stream:
            await stream.__anext__()
            signal_engines(process, signal.SIGKILL)
            await stream.read_all()
    await ask(cluster, "meanwhile", engine="v-1")


async def terminate_the_second(cluster: Cluster, process: subprocess.Popen[bytes]) -> None:
    """It gives back what it has; each request ends once, and what was not begun goes elsewhere."""
    ended: list[str] = []

    async def try_it(number: int) -> None:
        try:
            await ask(cluster, f"{number} and some more words")
        except EngineLost:
            ended.append("lost")
        else:
            ended.append("whole")

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(try_it, number)
        await until(lambda: cluster.statistics().engines[1].core.running)
        signal_engines(process, signal.SIGTERM)
    assert len(ended) == 10
    assert 0 < ended.count("whole") < 10
    [lost] = told(cluster, EventKind.ENGINE_LOST, of="v-1")
    assert "is shutting down, by no order from here" in lost.detail


async def hang_the_first(cluster: Cluster, process: subprocess.Popen[bytes]) -> None:
    """It says nothing any more, not even to a question."""
    signal_engines(process, signal.SIGSTOP)
    try:
        with pytest.raises(EngineLost, match=r"was lost while it held request .* is silent"):
            await cluster.client.complete("anybody there", engine="v-0")
    finally:
        signal_engines(process, signal.SIGCONT)
