"""One life of an engine in a process, by itself: how it ends, and in which words."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.engine.limits import EngineLimits
from dpkit.engine.publish import PublishGate
from dpkit.errors import DpkitError, EngineLost, InternalError, LaunchFailed, WireError
from dpkit.messages import EngineId, GenerateRequest
from dpkit.nursery import hosts
from dpkit.nursery.hosts import EngineHost, ModelHost
from dpkit.nursery.remote import RemoteLife
from tests.clusters import make_config
from tests.processes.lab import group
from tests.processes.rogue import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.messages import EngineOutput, EngineStats

LIMITS = EngineLimits(max_num_seqs=2, max_num_batched_tokens=64, block_size=4, num_blocks=64)


def make_host() -> ModelHost:
    """A model that nobody has loaded yet."""
    process = f'max_message = "{MOST_BYTES}B", start_timeout = "15s"'
    [of] = make_config(group(process=process)).engines
    host = ModelHost(of)
    host.serve(of)
    return host


def make_life(
    model: ModelHost,
    name: str = "good-0",
    publish: Callable[[EngineStats], None] | None = None,
    on_lost: Callable[[Exception], None] = lambda _: None,
) -> RemoteLife:
    """A life that has not begun."""
    return RemoteLife(
        engine=EngineId(name),
        rank=0,
        host=EngineHost(
            group=model._group, model=model, limits=LIMITS, threads=1, kv_publish_delta=0.1
        ),
        publish=publish,
        gate=PublishGate(0.1),
        on_lost=on_lost,
    )


@asynccontextmanager
async def begun(life: RemoteLife, raised: list[DpkitError]) -> AsyncIterator[None]:
    """Have a life serve, and end by itself after the block; notes what it raises."""
    model = life._host.model

    async def run() -> None:
        try:
            await life.run()
        except DpkitError as error:
            raised.append(error)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(model.run)
            nursery.start_soon(run)
            await life.ready.wait()
            yield
            await life.ended.wait()
            model.stop()


def ask(life: RemoteLife, deliver: Callable[[EngineId, EngineOutput], None]) -> None:
    """Submit a request."""
    life.link(deliver).submit(GenerateRequest(request_id="r", prompt_token_ids=(97, 98)))


async def test_a_model_that_is_let_go_before_it_is_loaded_says_so() -> None:
    host = make_host()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        host.stop()
        with pytest.raises(LaunchFailed, match=r"^model 'echo' was let go before it was loaded$"):
            await host.launcher()


async def test_a_life_that_is_stopped_tells_so_before_it_is_over() -> None:
    told: list[Exception] = []
    life = make_life(make_host(), on_lost=told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.run)
        await trio.testing.wait_all_tasks_blocked()  # for its model, which nobody loads
        assert not told
        nursery.cancel_scope.cancel()
    assert told == [life.cause]
    assert str(life.cause) == "engine good-0 was stopped"
    assert isinstance(life.cause, EngineLost)
    assert life.ended.is_set()


async def test_what_breaks_down_on_this_side_is_a_bug_of_ours() -> None:
    def publish(_: EngineStats) -> None:
        raise ValueError("nonsense")

    raised: list[DpkitError] = []
    got: list[EngineOutput] = []
    life = make_life(make_host(), publish=publish)
    async with begun(life, raised):
        ask(life, lambda _, output: got.append(output))
    [error] = raised
    assert isinstance(error, InternalError)
    assert str(error) == "engine good-0 broke down: ValueError: nonsense"
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(got[-1].error, EngineLost)


async def test_an_engine_that_drops_its_connection_is_told_what_may_be_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "WORK", "tests.processes.rogue:work")
    raised: list[DpkitError] = []
    life = make_life(make_host(), "gone-0")
    async with begun(life, raised):
        ask(life, lambda _, __: None)
    [error] = raised
    assert isinstance(error, WireError)
    assert str(error) == (
        "engine gone-0 dropped its connection, or was dropped for a message of more than 65,536 "
        "bytes (engines.process.max_message)"
    )
