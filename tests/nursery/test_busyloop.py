"""What an engine tells the coordinator, and when: the publish rules, counted message by message."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import define, field

from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.echo import EchoModel
from dpkit.engine.publish import PublishGate
from dpkit.errors import EngineLost, InternalError, RequestRejected
from dpkit.messages import EngineId, EngineOutput, GenerateRequest, SamplingParams, StepResult
from dpkit.names import FinishReason
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.fanin import StatsFanIn
from dpkit.nursery.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.messages import Batch, EngineStats

STEP_S = 1.0
ENGINE = EngineId("e0")


class Timed(EchoModel):
    """Each step lasts a second; may fail at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps = 0
        self.fail_at = fail_at
        self.before_boom: Callable[[], None] = lambda: None

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.steps += 1
        if self.steps == self.fail_at:
            self.before_boom()
            raise ValueError("boom")
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=STEP_S)


@define
class Bench:
    """One engine, and all that comes out of it."""

    loop: BusyLoop
    published: list[tuple[float, int, int]] = field(factory=list)  # time, running, waiting
    stats: list[EngineStats] = field(factory=list)
    outputs: list[tuple[float, EngineOutput]] = field(factory=list)

    def submit(self, request_id: str, prompt: int = 4, max_tokens: int = 2) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        ask = GenerateRequest(
            request_id=request_id, prompt_token_ids=(7,) * prompt, sampling=sampling
        )
        self.loop.inbox.submit(ask, self.deliver)

    def abort(self, request_id: str) -> None:
        self.loop.inbox.abort(request_id, self.deliver)

    def deliver(self, engine: EngineId, output: EngineOutput) -> None:
        assert engine == ENGINE
        self.outputs.append((trio.current_time(), output))

    def publish(self, stats: EngineStats) -> None:
        self.stats.append(stats)
        self.published.append((trio.current_time(), stats.running, stats.waiting))

    @property
    def ends(self) -> list[tuple[float, str, FinishReason]]:
        return [
            (at, output.request_id, output.finish_reason)
            for at, output in self.outputs
            if output.finish_reason is not None
        ]


def _bench(
    *,
    publish: Callable[[EngineStats], None] | bool = True,
    delta: float = 1.0,
    model: Timed | None = None,
) -> Bench:
    model = model or Timed()
    limits = EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        block_size=4,
        num_blocks=25,
        prefix_cache=False,
    )

    def note(stats: EngineStats) -> None:
        bench.publish(stats)

    bench = Bench(
        BusyLoop(
            engine=ENGINE,
            index=0,
            model=model,
            core=EngineCore(model, limits=limits),
            inbox=Inbox(),
            publish=note if publish is True else publish or None,
            gate=PublishGate(delta),
        )
    )
    return bench


@asynccontextmanager
async def _running(bench: Bench) -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.run)
        await bench.loop.ready.wait()
        yield bench
        bench.loop.inbox.close()


async def test_an_idle_engine_publishes_nothing(autojump_clock: object) -> None:
    async with _running(_bench()) as bench:
        await trio.sleep(3600)
    assert bench.published == []


async def test_one_message_before_and_one_after_a_step_that_changes_counts(
    autojump_clock: object,
) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a", max_tokens=1)
    assert bench.published == [
        (0, 0, 1),  # drained, not yet scheduled: what a long step would have hidden
        (1, 0, 0),  # the step gave its one token
    ]


async def test_nothing_is_published_while_nothing_changes(autojump_clock: object) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a", max_tokens=20)
    assert bench.published == [(0, 0, 1), (1, 1, 0), (20, 0, 0)], "18 steps without a word"
    assert len(bench.outputs) == 20


async def test_a_request_that_comes_during_a_step_is_visible_before_the_next(
    autojump_clock: object,
) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a", max_tokens=4)
        await trio.sleep(1.5)
        bench.submit("b", max_tokens=1)
    # A step that begins takes b in and finishes it: one message before it, one after.
    assert bench.published == [(0, 0, 1), (1, 1, 0), (2, 1, 1), (3, 1, 0), (4, 0, 0)]


async def test_kv_that_grows_is_published_though_the_counts_stand_still(
    autojump_clock: object,
) -> None:
    async with _running(_bench(delta=0.08)) as bench:  # two blocks of 25
        bench.submit("a", prompt=4, max_tokens=30)
    times = [at for at, _, _ in bench.published]
    usage = list(zip(times, (stats.kv_cache_usage for stats in bench.stats), strict=True))
    # One block at first, then one more each fourth step.
    assert usage == [
        (0, 0.0),
        (1, pytest.approx(0.04)),
        (6, pytest.approx(0.12)),
        (14, pytest.approx(0.20)),
        (22, pytest.approx(0.28)),
        (30, 0.0),
    ]


async def test_with_publishing_off_nothing_is_published(autojump_clock: object) -> None:
    async with _running(_bench(publish=False)) as bench:
        bench.submit("a", max_tokens=20)
    assert bench.published == []
    assert len(bench.outputs) == 20


async def test_messages_are_numbered_and_stamped_with_their_step(autojump_clock: object) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a", max_tokens=3)
    assert [stats.seq for stats in bench.stats] == [1, 2, 3]
    assert [stats.step_counter for stats in bench.stats] == [0, 1, 3]
    assert {stats.engine for stats in bench.stats} == {ENGINE}


@pytest.mark.parametrize("ordered", [False, True], ids=["independent", "lockstep"])
async def test_independent_and_lockstep_engines_publish_alike(
    autojump_clock: object, *, ordered: bool
) -> None:
    """The bug of vLLM's issue 48808 was that only the lockstep loop published."""
    fanin = StatsFanIn(ordered=ordered)
    received: list[tuple[int, int]] = []
    bench = _bench(publish=fanin.publish)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def receive() -> None:
            while True:
                await fanin.wait_pending()
                received.extend((stats.running, stats.waiting) for stats in fanin.receive_nowait())

        async with _running(bench):
            bench.submit("a", max_tokens=4)
            await trio.sleep(1.5)
            bench.submit("b", max_tokens=1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert received == [(0, 1), (1, 0), (1, 1), (1, 0), (0, 0)]
    assert fanin.statistics().received == 5


async def test_an_abort_during_a_step_frees_at_the_next_drain(autojump_clock: object) -> None:
    async with _running(_bench()) as bench:
        core = bench.loop.core
        bench.submit("a", max_tokens=10)
        bench.submit("b", max_tokens=10)
        await trio.sleep(1.5)
        bench.abort("a")
        assert core.get_request_counts() == (2, 0), "the step in flight is not touched"
        await trio.sleep(0.49)
        assert core.get_request_counts() == (2, 0)
        await trio.sleep(0.02)
        assert core.get_request_counts() == (1, 0)
        core.check()
    assert bench.ends == [(10, "b", FinishReason.LENGTH)]
    assert core.statistics().free_blocks == 25


async def test_a_request_aborted_before_the_engine_saw_it_costs_nothing(
    autojump_clock: object,
) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a")
        bench.abort("a")
    assert not bench.outputs
    assert not bench.published
    assert bench.loop.core.statistics().steps == 0


async def test_refusals_are_delivered_without_a_step(autojump_clock: object) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a", prompt=99, max_tokens=9)
    ((at, output),) = bench.outputs
    assert at == 0
    assert isinstance(output.error, RequestRejected)
    assert "7 more than the KV cache's 100 (25 blocks)" in str(output.error)
    assert bench.published == []


async def test_two_clients_with_one_id_do_not_get_each_others_outputs(
    autojump_clock: object,
) -> None:
    other: list[EngineOutput] = []
    async with _running(_bench()) as bench:
        bench.submit("a", max_tokens=4)
        await trio.sleep(0.5)
        ask = GenerateRequest(request_id="a", prompt_token_ids=(1,))
        bench.loop.inbox.submit(ask, lambda _, output: other.append(output))
    (refused,) = other
    assert isinstance(refused.error, RequestRejected)
    assert [output.token_ids for _, output in bench.outputs] == [(7,)] * 4


async def test_a_closed_inbox_ends_the_loop_when_all_is_done(autojump_clock: object) -> None:
    async with _running(_bench()) as bench:
        bench.submit("a", max_tokens=5)
        bench.loop.inbox.close()
        assert not bench.loop.ended.is_set()
        await bench.loop.ended.wait()
        assert trio.current_time() == 5
    assert bench.ends == [(5, "a", FinishReason.LENGTH)]


async def test_a_step_that_raises_ends_all_requests_with_the_cause(autojump_clock: object) -> None:
    model = Timed(fail_at=3)
    bench = _bench(model=model)
    for request_id in ("running", "too", "waiting"):
        bench.submit(request_id, max_tokens=9)
    model.before_boom = lambda: bench.submit("queued")
    with pytest.raises(ValueError, match="boom") as caught:
        await bench.loop.run()
    assert caught.value.__notes__ == ["in engine e0, step 3"]
    lost = [(output.request_id, output.error) for _, output in bench.outputs if output.error]
    assert [request_id for request_id, _ in lost] == ["running", "too", "waiting", "queued"]
    for _, error in lost:
        assert isinstance(error, EngineLost)
        assert error.__cause__ is caught.value
        assert error.engine == ENGINE
    assert bench.loop.inbox.closed


async def test_a_request_that_was_aborted_during_the_last_step_is_told_nothing(
    autojump_clock: object,
) -> None:
    model = Timed(fail_at=2)
    bench = _bench(model=model)
    bench.submit("left", max_tokens=10)
    bench.submit("stays", max_tokens=10)
    model.before_boom = lambda: bench.abort("left")
    with pytest.raises(ValueError, match="boom"):
        await bench.loop.run()
    assert [output.request_id for _, output in bench.outputs if output.error] == ["stays"]


async def test_a_loop_that_is_stopped_tells_its_requests_so(autojump_clock: object) -> None:
    bench = _bench()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.run)
        await bench.loop.ready.wait()
        bench.submit("a")
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    assert isinstance(bench.loop.cause, EngineLost)
    assert str(bench.loop.cause) == f"engine {ENGINE} was stopped"
    assert "while it held request a: " in str(bench.outputs[-1][1].error)
    assert str(bench.outputs[-1][1].error).endswith(f"engine {ENGINE} was stopped")


async def test_an_engine_that_loses_blocks_stops_loudly(autojump_clock: object) -> None:
    bench = _bench()
    bench.loop.core._scheduler.pool._refs[24] = 1
    with pytest.raises(InternalError, match="0 blocks have holders"):
        await bench.loop.run()


async def test_a_step_is_one_step_of_the_loops_task(autojump_clock: object) -> None:
    """Inline engines take turns with everything else on the thread, once a step, never more."""
    bench = _bench()

    class Steps(trio.abc.Instrument):
        count = 0

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += "BusyLoop.run" in task.name

    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    async with _running(bench):
        await trio.testing.wait_all_tasks_blocked()
        idle, steps.count = steps.count, 0
        bench.submit("a", max_tokens=20)
        await trio.sleep(30)
        assert steps.count == 21, "20 steps of the model, and the wake-up before them"
    assert idle == 1
    trio.lowlevel.remove_instrument(steps)
