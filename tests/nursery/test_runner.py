"""A model that computes gets one thread for its engine's life; a simulated one gets none."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any, ClassVar

import pytest
import trio
import trio.testing

from dpkit.abc import Model
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ModelFailed
from dpkit.messages import Batch, BatchRow, SamplingParams, StepResult
from dpkit.nursery.runner import open_runner

ROW = BatchRow(
    request_id="r",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(),
    token_ids=(1, 2),
    start=0,
    block_ids=(0,),
    output_index=0,
)
BATCH = Batch(rows=(ROW,))
SIZES: dict[str, Any] = {"num_blocks": 4, "block_size": 16, "name": "e0"}


class Threaded(EchoModel):
    """Notes the thread of every call; steps wait for `go`."""

    inline: ClassVar[bool] = False

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.caches: list[Any] = []
        self.go = threading.Event()
        self.go.set()
        self.error: BaseException | None = None

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        self.threads.append(threading.current_thread())
        return (num_blocks, block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.threads.append(threading.current_thread())
        self.caches.append(cache)
        self.go.wait()
        if self.error is not None:
            raise self.error
        return super().execute(batch, cache)


async def test_all_steps_run_in_the_engines_one_thread_which_ends_with_it() -> None:
    model = Threaded()
    async with open_runner(model, **SIZES) as runner:
        results = [await runner.execute(BATCH) for _ in range(100)]
        (thread,) = set(model.threads)
        assert thread.name == "dpkit e0"
        assert thread is not threading.current_thread()
        assert thread.is_alive()
    assert not thread.is_alive()
    assert set(model.caches) == {(4, 16)}
    assert results == [StepResult(sampled=[1])] * 100


async def test_engines_do_not_wait_for_each_others_threads() -> None:
    slow, fast = Threaded(), Threaded()
    slow.go.clear()
    async with (
        open_runner(slow, **SIZES) as slow_runner,
        open_runner(fast, **SIZES) as fast_runner,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(slow_runner.execute, BATCH)
        await fast_runner.execute(BATCH)
        slow.go.set()


@pytest.mark.parametrize("error", [ValueError("boom"), MemoryError()], ids=repr)
async def test_what_a_step_raises_comes_out_unchanged(error: BaseException) -> None:
    model = Threaded()
    model.error = error
    async with open_runner(model, **SIZES) as runner:
        with pytest.raises(type(error)) as caught:
            await runner.execute(BATCH)
        assert caught.value is error
        model.error = None
        await runner.execute(BATCH)  # the thread has survived it
    assert not model.threads[0].is_alive()


def cancelled_by_hand() -> BaseException:
    """What asking Trio for a cancellation that nobody asked for looks like."""

    async def be_cancelled() -> BaseException:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as error:
                return error
        raise AssertionError

    return trio.run(be_cancelled)


ENDS_MORE_THAN_AN_ENGINE = [
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    cancelled_by_hand(),
    BaseExceptionGroup("several", [KeyboardInterrupt()]),
]


@pytest.mark.parametrize("error", ENDS_MORE_THAN_AN_ENGINE, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("inline", [False, True])
async def test_what_is_no_exception_becomes_one_at_the_models_edge(
    error: BaseException, inline: bool
) -> None:
    class Rough(EchoModel):
        spoils = ""

        def allocate(self, **_: Any) -> Any:
            if self.spoils == "allocate":
                raise error

        def execute(self, *_: Any, **__: Any) -> StepResult:
            raise error

    Rough.inline = inline
    model = Rough()
    async with open_runner(model, **SIZES) as runner:
        with pytest.raises(
            ModelFailed, match=rf"Rough.execute\(\) raised {type(error).__name__}"
        ) as e:
            await runner.execute(BATCH)
        assert e.value.__cause__ is error
    model.spoils = "allocate"
    with pytest.raises(ModelFailed, match=r"Rough.allocate\(\) raised"):
        await open_runner(model, **SIZES).__aenter__()


@pytest.mark.parametrize("duration_s", [-1.0, math.nan, math.inf, "1", None, True])
async def test_a_duration_that_is_none_is_told_before_it_is_slept(duration_s: Any) -> None:
    async with open_runner(Timed(duration_s), **SIZES) as runner:
        with pytest.raises(ModelFailed, match=r"Timed.execute\(\) must say a duration_s from 0 on"):
            await runner.execute(BATCH)


async def test_a_result_that_is_none_is_told() -> None:
    class Silent(EchoModel):
        def execute(self, *_: Any, **__: Any) -> Any:
            return None

    async with open_runner(Silent(), **SIZES) as runner:
        with pytest.raises(ModelFailed, match="must return a StepResult, not NoneType"):
            await runner.execute(BATCH)


async def test_what_allocating_raises_comes_out_unchanged_and_the_thread_ends() -> None:
    error = MemoryError()

    class Greedy(Threaded):
        def allocate(self, *, num_blocks: int, block_size: int) -> Any:
            super().allocate(num_blocks=num_blocks, block_size=block_size)
            raise error

    model = Greedy()
    with pytest.raises(MemoryError) as caught:
        await open_runner(model, **SIZES).__aenter__()
    assert caught.value is error
    assert not model.threads[0].is_alive()


async def test_a_cancelled_step_is_waited_for() -> None:
    model = Threaded()
    model.go.clear()
    finished = []
    async with open_runner(model, **SIZES) as runner, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def step() -> None:
            with trio.CancelScope() as scope:
                scope.cancel()
                finished.append(await runner.execute(BATCH))

        await trio.testing.wait_all_tasks_blocked(0.001)
        assert not finished
        model.go.set()
    assert len(finished) == 1
    assert not model.threads[0].is_alive()


class Timed(EchoModel):
    """Says that a step lasts."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=self.duration_s)


@pytest.mark.parametrize("duration_s", [0.0, 0.25])
async def test_an_inline_step_is_one_step_of_its_task_and_lasts_what_it_says(
    autojump_clock: object, duration_s: float
) -> None:
    task = trio.lowlevel.current_task()

    class Steps(trio.abc.Instrument):
        count = 0

        def after_task_step(self, stepped: trio.lowlevel.Task) -> None:
            self.count += stepped is task

    steps = Steps()
    started = trio.current_time()
    async with open_runner(Timed(duration_s), **SIZES) as runner:
        trio.lowlevel.add_instrument(steps)
        for _ in range(10):
            await runner.execute(BATCH)
        trio.lowlevel.remove_instrument(steps)
    assert steps.count == 10
    assert trio.current_time() == started + 10 * duration_s


async def test_inline_models_use_no_thread() -> None:
    before = set(threading.enumerate())
    async with open_runner(EchoModel(), **SIZES) as runner:
        await runner.execute(BATCH)
        assert set(threading.enumerate()) == before


def test_models_are_threaded_unless_they_say_otherwise() -> None:
    assert Model.inline is False
