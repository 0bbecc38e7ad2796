"""Calls into a thread that do not come back: nobody waits for them beyond the grace."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import DpkitError, EngineLost
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle
from dpkit.testing.wrapper import named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.config.schema import Config
    from dpkit.messages import Batch, StepResult


class Stubborn(EchoModel):
    """Runs in a thread; hangs or fails when a request's id, or its allocation, asks for it."""

    inline = False

    def __init__(self, *, in_allocate: bool = False) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self._in_allocate = in_allocate

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        if self._in_allocate:
            self.let_go.wait()
        return super().allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        ids = [row.request_id for row in batch.rows]
        if "hang" in ids:
            self.let_go.wait()
        if "crash" in ids:
            raise RuntimeError("boom")
        return super().execute(batch, cache)


@pytest.fixture
def stubborn() -> Iterator[Stubborn]:
    model = Stubborn()
    yield model
    release(model)


def release(model: Stubborn) -> None:
    """Let the hung threads end, so that the test leaves none behind."""
    model.let_go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dpkit "):
            thread.join()


def configure(name: str, strategy: str = "one_for_one") -> Config:
    return parse_config(f"""
        [[engines]]
        model = "{name}"
        count = 2
        supervision.strategy = "{strategy}"
        [cluster]
        grace = "300ms"
    """)


async def test_a_group_that_restarts_together_does_not_keep_the_cluster_from_closing(
    stubborn: Stubborn,
) -> None:
    with named(stubborn) as name, trio.fail_after(10):
        async with open_cluster(configure(name, "one_for_all")) as cluster:

            async def ask(request_id: str, engine: str, said: str) -> None:
                with pytest.raises(EngineLost, match=said):
                    await cluster.client.complete("hi", request_id=request_id, engine=engine)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "hang", "engine-0", "EngineLost: engine engine-0 was stopp")
                await trio.sleep(0.05)
                nursery.start_soon(ask, "crash", "engine-1", "RuntimeError: boom")
    check_idle(cluster)


async def test_a_start_that_hangs_can_be_cancelled() -> None:
    model = Stubborn(in_allocate=True)
    with named(model) as name, trio.fail_after(10):
        with trio.move_on_after(0.05) as scope:
            async with open_cluster(configure(name)):
                pytest.fail("engines whose allocation hangs are not ready")
        assert scope.cancelled_caught
    release(model)


@pytest.mark.parametrize("count", [2, 5])
async def test_deadlines_that_pass_together_each_end_their_own_request(
    autojump_clock: object, count: int
) -> None:
    """Also where the end of one makes room for the next, which is late as well."""
    config = parse_config(f"""
        [[engines]]
        model = "{__name__}:CrashesOnce"
        supervision.backoff = "1s"
        supervision.jitter = 0.0
        [admission]
        retries = 0
    """)
    CrashesOnce.crashed = False
    async with open_cluster(config) as cluster:
        with pytest.raises(EngineLost):
            await cluster.client.complete("first")
        ends = []

        async def ask() -> None:
            try:
                await cluster.client.complete("x" * 1000, timeout=3, max_tokens=1000)
            except DpkitError as error:
                ends.append((type(error).__name__, trio.current_time()))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(ask)
    assert ends == [("DeadlineExceeded", 3.0)] * count
    check_idle(cluster)


class CrashesOnce(EchoModel):
    """Fails in its first step, and takes for ever over all others."""

    crashed = False

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        if not CrashesOnce.crashed:
            CrashesOnce.crashed = True
            raise RuntimeError("boom")
        return evolve(super().execute(batch, cache), duration_s=60.0)
