"""Real engines in processes of their own, which the head did not start and cannot end."""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

import signal
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.errors import EngineLost
from dpkit.names import Cause
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.conformance import check_link
from tests.clusters import make_config, told
from tests.joined.lab import free_address, group, life_of, open_engine, open_joined, serves
from tests.processes.test_same import answers
from tests.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from dpkit.abc import EngineLink
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.inbox import Deliver

QUICK = 'dead_after = "300ms", abort_timeout = "5s", join_timeout = "15s"'
PACED = '[[engines]]\nmodel = "tests.processes.models:Paced"\ncount = 9\n'


@asynccontextmanager
async def open_engines(
    folder: Path, count: int = 2, toml: str = PACED, vllm: str = QUICK
) -> AsyncIterator[tuple[Cluster, Sequence[subprocess.Popen[bytes]], str]]:
    """A cluster of real engines, their processes, and where they join."""
    address = free_address()
    async with AsyncExitStack() as stack:
        opened = [open_engine(folder, address, rank, toml) for rank in range(count)]
        processes = [await stack.enter_async_context(each) for each in opened]
        config = group(address, count=count, vllm=vllm)
        yield await stack.enter_async_context(open_joined(config)), processes, address


async def test_what_they_say_is_what_local_engines_say(tmp_path: Path) -> None:
    local = '[[engines]]\nname = "v"\nmodel = "echo"\nkv.num_blocks = 200\n'
    async with open_cluster(parse_config(local, overrides=["cluster.seed=1"])) as cluster:
        expected = await answers(cluster.client, 24, at_once=True)
    address, toml = free_address(), local
    async with open_engine(tmp_path, address, 0, toml), open_joined(group(address)) as cluster:
        assert cluster.longest_prompt is None  # for it to say
        found = await answers(cluster.client, 24, at_once=True)
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple):  # a refusal, in words of its own
            assert one[0] is other[0]
        else:
            assert one == other


async def test_a_link_to_one_conforms(tmp_path: Path) -> None:
    address = free_address()

    @asynccontextmanager
    async def open_link(deliver: Deliver) -> AsyncIterator[EngineLink]:
        async with open_engine(tmp_path, address), open_cluster(make_config(group(address))) as c:
            yield life_of(c, "v-0").link(deliver)

    await check_link(open_link)


async def test_aborts_release_engines_that_nobody_here_can_kill(tmp_path: Path) -> None:
    async with open_engines(tmp_path) as (cluster, _, _):

        async def leave(number: int) -> None:
            options = {"max_tokens": 500, "ignore_eos": True}
            async with cluster.client.generate(f"{number}", **options) as stream:  # type: ignore[arg-type]
                await stream.__anext__()

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(leave, number)
        assert cluster.client.statistics().causes == {Cause.CLIENT: 40}
        await until(lambda: all(_held(cluster, f"v-{rank}") == 0 for rank in range(2)))


def _held(cluster: Cluster, name: str) -> int:
    core = life_of(cluster, name).statistics()
    return core.num_blocks - core.free_blocks


async def test_E01_one_that_is_killed_is_noticed_and_comes_back_when_it_is_restarted(
    tmp_path: Path,
) -> None:
    async with open_engines(tmp_path) as (cluster, processes, address):
        with pytest.raises(EngineLost, match="v-0 was lost while it held request"):
            async with cluster.client.generate("abcdefgh" * 20, engine="v-0") as stream:
                await stream.__anext__()
                processes[0].kill()
                await stream.read_all()
        assert (await cluster.client.complete("hello")).engine.name == "v-1"
        async with open_engine(tmp_path, address, 0, PACED):
            await until(lambda: serves(cluster, "v-0", 1))
            assert (await cluster.client.complete("again", engine="v-0")).text == "again"
        [lost] = told(cluster, EventKind.ENGINE_LOST, of="v-0")[:1]
        assert "dropped its connection" in lost.detail


async def test_F03_one_that_is_terminated_ends_its_requests_and_no_others(tmp_path: Path) -> None:
    async with open_engines(tmp_path) as (cluster, processes, _):
        ended: list[str] = []

        async def ask(number: int) -> None:
            prompt = f"{number} and some more words"
            try:
                completion = await cluster.client.complete(prompt)
            except EngineLost:
                ended.append("lost")
            else:
                assert completion.text == prompt
                ended.append("whole")

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, number)
            await until(lambda: cluster.statistics().engines[0].core.running)
            processes[0].terminate()
        assert len(ended) == 10
        assert 5 <= ended.count("whole") < 10, "those on the other one, at least"


async def test_E03_one_that_is_stopped_is_given_up_and_its_requests_go_elsewhere(
    tmp_path: Path,
) -> None:
    async with open_engines(tmp_path) as (cluster, processes, _):
        processes[0].send_signal(signal.SIGSTOP)
        try:
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(partial(cluster.client.complete, f"{number}", max_tokens=9))
            [lost] = told(cluster, EventKind.ENGINE_LOST)
            assert "v-0 is silent" in lost.detail
        finally:
            processes[0].send_signal(signal.SIGCONT)
        assert cluster.client.statistics().causes == {Cause.STOP: 6}


async def test_one_that_was_given_up_and_goes_on_reaches_nobody(tmp_path: Path) -> None:
    """It is told to drop what it has, and is not heard; its rank is free for who begins anew."""
    async with open_engines(tmp_path, 1) as (cluster, processes, address):
        with pytest.raises(EngineLost):
            async with cluster.client.generate("abcdefgh" * 9) as stream:
                await stream.__anext__()
                processes[0].send_signal(signal.SIGSTOP)
                await stream.read_all()
        text = stream.text
        processes[0].send_signal(signal.SIGCONT)
        async with open_engine(tmp_path, address, 0, PACED):
            await until(lambda: serves(cluster, "v-0", 1))
            assert (await cluster.client.complete("again")).text == "again"
        assert stream.text == text


async def test_the_head_leaves_and_the_engine_lives_on(tmp_path: Path) -> None:
    address = free_address()
    options = {"max_tokens": 600, "ignore_eos": True}
    async with open_engine(tmp_path, address) as process:
        async with (
            open_joined(group(address)) as cluster,
            cluster.client.generate("abc" * 99, **options) as stream,  # type: ignore[arg-type]
        ):
            await stream.__anext__()
        await trio.sleep(0.1)
        assert process.poll() is None, "it is not ours to end"


async def test_one_file_serves_the_head_and_the_engines_of_its_groups(tmp_path: Path) -> None:
    """Ranks of `dpkit engine` count all engines of a config; on the wire, each group's own do."""
    one, two = free_address(), free_address()
    config = group(one, count=1), group(two, name="w", count=2)
    toml = "\n".join(config)
    async with (
        open_engine(tmp_path, one, 0, toml),
        open_engine(tmp_path, two, 1, toml),
        open_engine(tmp_path, two, 2, toml),
        open_joined(*config) as cluster,
    ):
        for name in ("v-0", "w-0", "w-1"):
            assert (await cluster.client.complete("hello", engine=name)).text == "hello"


REDIAL = "--redial", "100ms"


async def test_E15_engines_say_hello_again_to_a_head_that_was_restarted(tmp_path: Path) -> None:
    """With the model that they have loaded, and what the former head had asked is dropped."""
    address = free_address()
    options = {"max_tokens": 9999, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        engines = [open_engine(tmp_path, address, rank, PACED, *REDIAL) for rank in range(2)]
        processes = [await stack.enter_async_context(each) for each in engines]
        with trio.CancelScope() as head:
            async with (
                open_cluster(make_config(group(address, count=2))) as cluster,
                cluster.client.generate("for nobody", **options) as stream,  # type: ignore[arg-type]
            ):
                await stream.__anext__()
                head.cancel()
                await trio.sleep_forever()
        async with open_joined(group(address, count=2, vllm=QUICK)) as cluster:
            for rank in range(2):
                assert (await cluster.client.complete("hello", engine=f"v-{rank}")).text == "hello"
        assert all(process.poll() is None for process in processes)


async def test_one_that_hung_and_goes_on_says_hello_again_by_itself(tmp_path: Path) -> None:
    address = free_address()
    async with (
        open_engine(tmp_path, address, 0, PACED, *REDIAL) as process,
        open_joined(group(address, vllm=QUICK)) as cluster,
    ):
        process.send_signal(signal.SIGSTOP)
        await until(lambda: told(cluster, EventKind.ENGINE_LOST))
        process.send_signal(signal.SIGCONT)
        await until(lambda: serves(cluster, "v-0", 1))
        assert (await cluster.client.complete("hello")).text == "hello"


async def test_one_that_nobody_answers_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Here listens somebody who does not even speak its language."""
    async with trio.SocketListener(_listening()) as listener:
        address = "tcp://{}:{}".format(*listener.socket.getsockname())
        engine = open_engine(tmp_path, address, 0, PACED, *REDIAL)
        async with engine as process, await listener.accept():
            process.terminate()
            assert await trio.to_thread.run_sync(process.wait) == 0


def _listening() -> trio.socket.SocketType:
    listening = trio.socket.from_stdlib_socket(socket.create_server(("127.0.0.1", 0)))
    listening.listen()
    return listening
