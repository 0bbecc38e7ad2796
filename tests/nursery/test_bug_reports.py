"""What users of other data-parallel layers reported; each test bears the report's number.

C: in-flight accounting drifts. D: cancellation. O: the async substrate. Those about restarts, HTTP
and several processes are elsewhere.
"""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.health import Health
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.config.schema import BalancerConfig
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import EngineLost, RequestRejected
from dpkit.messages import EngineId, EngineOutput, GenerateRequest, SamplingParams, StepResult
from dpkit.names import Cause, FinishReason
from dpkit.nursery.client import Client
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.nursery.events import EventLog
from dpkit.nursery.flight import Limits
from dpkit.nursery.flights import Flights
from dpkit.nursery.membership import Membership
from dpkit.testing.idle import check_idle
from dpkit.text.bytes import ByteTokenizer
from tests.nursery.lab import loop_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.config.schema import Config
    from dpkit.engine.core import EngineCore
    from dpkit.messages import Batch
    from dpkit.nursery.stream import OutputStream

STEP_S = 0.1


class Timed(EchoModel):
    """Each step lasts 100 ms; notes which requests were in it, and with how many tokens."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.steps.append({row.request_id: len(row.token_ids) for row in batch.rows})
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=STEP_S)


class Glacial(EchoModel):
    """Each step lasts six hours."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        sampled = super().execute(batch, cache).sampled
        return StepResult(sampled=sampled, duration_s=6 * 3600)


@pytest.fixture
def timed(make_config: Callable[..., Config]) -> Callable[..., Config]:
    def make(*overrides: str, count: int = 1) -> Config:
        return make_config(f"{__name__}:Timed", *overrides, count=count)

    return make


def _steps(cluster: Cluster) -> list[dict[str, int]]:
    model = loop_of(cluster._slots[0])._model
    assert isinstance(model, Timed)
    return model.steps


def _core(cluster: Cluster) -> EngineCore:
    return loop_of(cluster._slots[0]).core


def _inflight(cluster: Cluster) -> list[int]:
    """By engine, zeros included."""
    held = cluster.client.statistics().inflight
    return [held.get(each.engine, 0) for each in cluster.statistics().engines]


async def _settle() -> None:
    """Let every engine take its next step."""
    await trio.sleep(STEP_S)
    await trio.testing.wait_all_tasks_blocked()


LONG = SamplingParams(max_tokens=100, ignore_eos=True)


async def test_C01_cancelled_requests_leave_no_phantom_counts(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    rng = random.Random(1)
    ended = 0

    async def ask(cluster: Cluster, *, leaves: bool) -> None:
        nonlocal ended
        # At once, before a first token, in mid-stream: any time within two seconds.
        with trio.move_on_after(rng.choice((0, 0.05, 0.1, 2 * rng.random())) if leaves else 1e9):
            await cluster.client.complete("hello", max_tokens=20, ignore_eos=True)
        ended += 1

    async with open_cluster(timed(count=4)) as cluster:
        async with trio.open_nursery() as nursery:
            for number in range(400):
                nursery.start_soon(lambda leaves: ask(cluster, leaves=leaves), number % 2 == 0)
                if number % 20 == 0:
                    await trio.sleep(0.05)
        assert ended == 400
        assert _inflight(cluster) == [0, 0, 0, 0]
        await _settle()
        check_idle(cluster)
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(cluster.client.complete, "hello", LONG)
            await _settle()
            assert _inflight(cluster) == [10, 10, 10, 10], "and what comes then is spread evenly"
            nursery.cancel_scope.cancel()


async def test_C02_looking_never_touches_the_accounting(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed(count=2)) as cluster, trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(cluster.client.complete, "hello", LONG)
        await _settle()
        for _ in range(50):
            await trio.sleep(0.1)
            assert cluster.audit() == ()
            assert _inflight(cluster) == [3, 3]


async def test_C06_a_client_side_timeout_is_counted_out_within_a_step(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        for _ in range(50):
            with trio.move_on_after(1.0) as scope:
                await cluster.client.complete("hello", LONG)
            assert scope.cancelled_caught
            assert _inflight(cluster) == [0]
            await _settle()
            check_idle(cluster)


async def test_C07_picks_at_the_same_instant_see_each_other(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed(count=4)) as cluster, trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(cluster.client.complete, "hello", LONG)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == 0
        assert _inflight(cluster) == [25, 25, 25, 25]
        nursery.cancel_scope.cancel()


async def test_C08_a_request_that_was_never_charged_is_never_released(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed(count=2)) as cluster:

        async def refused(**options: Any) -> None:
            with pytest.raises(RequestRejected):
                await cluster.client.complete("hello", **options)

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(cluster.client.complete, "hello", LONG)
                nursery.start_soon(lambda: refused(engine="nowhere"))
                if number % 3 == 0:
                    nursery.start_soon(lambda: refused(max_tokens=10**6))
            await _settle()
            assert sum(_inflight(cluster)) == 30
            assert cluster.audit() == ()
            nursery.cancel_scope.cancel()
        await _settle()
        check_idle(cluster)
        assert cluster.client.statistics().causes == {Cause.REFUSED: 40, Cause.CLIENT: 30}


async def test_C09_accounting_has_no_expiry(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(
        make_config(f"{__name__}:Glacial", "supervision.step_timeout=24h")
    ) as cluster:
        async with cluster.client.generate("ab") as stream:
            for _ in range(2):
                await stream.__anext__()
                assert sum(_inflight(cluster)) == 1
            assert trio.current_time() == 12 * 3600
            await stream.__anext__()
            assert sum(_inflight(cluster)) == 0
        check_idle(cluster)


class EagerLink:
    """An engine that has answered before `submit` returns, or fails after it has answered."""

    def __init__(self, engine: EngineId, *, fails: bool) -> None:
        self.engine = engine
        self.flights: Flights | None = None
        self.fails = fails
        self.aborts: list[str] = []

    def submit(self, request: GenerateRequest) -> None:
        assert self.flights is not None
        output = EngineOutput(
            request_id=request.request_id, token_ids=(104,), finish_reason=FinishReason.LENGTH
        )
        self.flights.deliver(self.engine, output)
        if self.fails:
            raise EngineLost("the line broke")

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)

    def take_back(
        self,
        request_ids: Sequence[str],  # noqa: ARG002 - none is
        on_taken: Callable[[EngineId, Sequence[str]], object],
    ) -> None:
        on_taken(self.engine, ())


@pytest.mark.parametrize("fails", [False, True])
async def test_C10_an_answer_before_the_send_returns_is_released_once(*, fails: bool) -> None:
    ledger, engine = Ledger(), EngineId("e0")
    membership = Membership(Health(BalancerConfig()))
    flights = Flights(
        EarlyDispatch(ledger, LoadView((), ledger), load_policy("kv_pressure")),
        limits=Limits(),
        membership=membership,
        events=EventLog(),
    )
    membership.add_client(flights)
    client = Client(
        ledger=ledger,
        flights=flights,
        tokenizer=ByteTokenizer(),
        rng=random.Random(1),
        prefix="c",
    )
    link = EagerLink(engine, fails=fails)
    link.flights = flights

    def make_link(_: object, *, hears_all: bool = False) -> EagerLink:
        return link

    membership.join(engine, 0, make_link)
    for _ in range(10):
        assert (await client.complete("hello")).text == "h", "what was answered was answered"
        assert client.statistics().inflight == {}
        assert ledger.audit() == ()
    assert client.statistics().late_outputs == 0
    assert link.aborts == []


async def test_C11_all_state_of_a_request_is_gone_however_it_ended(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    config = timed("scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=16")
    async with open_cluster(config) as cluster:
        async with trio.open_nursery() as nursery:

            async def ask(seconds: float, prompt: int, tokens: int) -> None:
                with trio.move_on_after(seconds):
                    await cluster.client.complete([1] * prompt, max_tokens=tokens, ignore_eos=True)

            for number in range(100):
                nursery.start_soon(ask, 0.35 + number / 100, 500, 50)  # most in prefill or queue
                nursery.start_soon(ask, 2.05 + number / 100, 2, 50)  # most in decode
                nursery.start_soon(ask, 1e9, 2, 2)
        await _settle()
        check_idle(cluster)
        (loop,) = (loop_of(slot) for slot in cluster._slots)
        (flights,) = cluster._flights
        assert (
            len(flights) == flights.placed == len(flights.line._queue) == len(flights._alarms) == 0
        )
        assert cluster.client._ledger.statistics().inflight == 0
        assert len(loop._deliver) == len(loop.inbox._requests) == len(loop.inbox._aborts) == 0
        statistics = cluster.client.statistics()
        assert statistics.started == statistics.finished + statistics.aborted == 300


async def test_C12_the_count_is_right_after_every_completion(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("echo")) as cluster:
        for _ in range(500):
            async with cluster.client.generate("a", max_tokens=1) as stream:
                assert sum(_inflight(cluster)) == 1
                await stream.__anext__()
                assert sum(_inflight(cluster)) == 0


async def test_D01_the_engine_drops_a_left_request_within_a_step(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        with trio.CancelScope() as scope:
            async with cluster.client.generate("hello", LONG, request_id="r") as stream:
                for _ in range(3):
                    await stream.__anext__()
                scope.cancel()
                await trio.sleep_forever()
        assert _inflight(cluster) == [0]
        await _settle()
        assert len(_steps(cluster)) <= 4
        assert _core(cluster).statistics().free_blocks == _core(cluster).limits.num_blocks
        check_idle(cluster)


@pytest.mark.parametrize("chunks", [1.5, 2.0, 2.5, 3.0, 3.5])
async def test_D02_an_abort_holds_between_chunks_and_as_the_last_one_finishes(
    autojump_clock: object, timed: Callable[..., Config], chunks: float
) -> None:
    async with open_cluster(timed("scheduler.max_num_batched_tokens=10")) as cluster:
        with trio.move_on_at(chunks * STEP_S):
            await cluster.client.complete([1] * 30, LONG, request_id="r")
        left_at = len(_steps(cluster))
        await _settle()
        await _settle()
        assert len(_steps(cluster)) <= left_at + 1, "one step may have begun in that very instant"
        check_idle(cluster)


async def test_D05_a_prefill_stops_at_the_next_chunk_and_the_next_request_runs(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    config = timed("scheduler.max_num_batched_tokens=100", "kv.prefix_cache=false")
    async with open_cluster(config) as cluster, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def long() -> None:
            with trio.move_on_at(2.5 * STEP_S):  # during chunk 3 of 200
                await cluster.client.complete([1] * 20_000, request_id="long")

        await trio.sleep(STEP_S)
        completion = await cluster.client.complete("hi", request_id="short", max_tokens=1)
        assert completion.text == "h"
        assert _steps(cluster)[:4] == [{"long": 100}] * 3 + [{"short": 2}]
        assert trio.current_time() == pytest.approx(4 * STEP_S)


@pytest.mark.parametrize("wave_coordination", ["true", "false"])
@pytest.mark.parametrize("prefix_cache", ["true", "false"])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1.0, 1.25])
async def test_D06_no_abort_in_any_state_ends_the_engine(
    autojump_clock: object,
    timed: Callable[..., Config],
    seconds: float,
    prefix_cache: str,
    wave_coordination: str,
) -> None:
    config = timed(
        "kv.block_size=4",
        "kv.num_blocks=6",
        "scheduler.max_num_batched_tokens=6",
        f"kv.prefix_cache={prefix_cache}",
        f"coordinator.wave_coordination={wave_coordination}",
    )
    async with open_cluster(config) as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(4):  # one runs, one is preempted now and then, two wait
                nursery.start_soon(
                    cluster.client.complete, "abcdefgh", SamplingParams(max_tokens=9)
                )
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        assert (await cluster.client.complete("abcdefgh", max_tokens=9)).text == "abcdefgh"
        await _settle()
        check_idle(cluster)


async def test_D09_who_leaves_the_queue_is_never_scheduled(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed("scheduler.max_num_seqs=2")) as cluster:

        async def ask(number: int) -> None:
            with trio.move_on_at(0.25 if 2 <= number < 17 else 1e9):
                await cluster.client.complete("hello", max_tokens=5, request_id=f"r{number}")

        async with trio.open_nursery() as nursery:
            for number in range(22):
                nursery.start_soon(ask, number)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(0.35)
            assert _core(cluster).get_request_counts() == (2, 5), "gone from the queue at once"
        scheduled = {request_id for step in _steps(cluster) for request_id in step}
        assert scheduled == {"r0", "r1", *(f"r{number}" for number in range(17, 22))}
        # Seven requests of five steps, two at a time: nobody waited for those who left.
        assert trio.current_time() == pytest.approx(20 * STEP_S)
        check_idle(cluster)


async def test_D10_nothing_of_a_cancelled_turn_is_seen_in_the_next(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        for turn in range(10):
            with trio.move_on_after(STEP_S * (turn / 4)):
                await cluster.client.complete("first turn", LONG, request_id="session")
            completion = await cluster.client.complete("second", request_id="session")
            assert completion.text == "second"
            assert completion.finish_reason is FinishReason.STOP
        await _settle()
        check_idle(cluster)


async def test_D13_some_of_a_batch_leave_and_the_others_are_not_disturbed(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    times = []
    async with open_cluster(timed()) as cluster:

        async def ask(number: int) -> None:
            with trio.move_on_at(0.25 if number < 3 else 1e9):
                async with cluster.client.generate("abcdefgh", request_id=f"r{number}") as stream:
                    await trio.lowlevel.checkpoint()
                    async for _ in stream:
                        pass
                assert stream.text == "abcdefgh"
                times.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
        together = [step for step in _steps(cluster) if len(step) == 8]
        assert len(together) in {2, 3}, "three steps had begun, perhaps the first without all"
        assert {len(step) for step in _steps(cluster)[3:-1]} == {5}
        assert all(at == pytest.approx(0.95, abs=0.06) for at in times)
        assert len(times) == 5
        check_idle(cluster)


async def _break(stream: OutputStream) -> None:
    async for _ in stream:
        break


async def _raise(stream: OutputStream) -> None:
    async for _ in stream:
        raise ZeroDivisionError


async def test_O01_a_loop_may_be_left_by_break_or_by_an_error(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        async with cluster.client.generate("hello") as stream:
            await _break(stream)
        assert _inflight(cluster) == [0]
        with pytest.raises(ZeroDivisionError):
            async with cluster.client.generate("hello") as stream:
                await _raise(stream)
        assert _inflight(cluster) == [0]
        await _settle()
        check_idle(cluster)


async def _raise_while_cancelled(cluster: Cluster) -> None:
    with trio.CancelScope() as scope:
        async with cluster.client.generate("hello"):
            scope.cancel()
            raise ZeroDivisionError


async def test_O02_the_users_error_survives_a_cancellation(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        with pytest.raises(ZeroDivisionError):
            await _raise_while_cancelled(cluster)
        assert _inflight(cluster) == [0]
        await _settle()
        check_idle(cluster)


async def test_O03_aborts_sent_from_a_cancelled_nursery_arrive(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed(count=2)) as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(cluster.client.complete, "hello", LONG)
            await trio.sleep(0.25)
            nursery.cancel_scope.cancel()
        assert cluster.client.statistics().aborted == 100
        await _settle()
        check_idle(cluster)


async def test_O04_a_token_that_arrives_as_its_reader_is_cancelled_is_not_lost(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        text, cancelled = "", 0
        async with cluster.client.generate("hello, world") as stream:
            while stream.finish_reason is None:
                with trio.move_on_after(STEP_S) as scope:  # to the instant at which one comes
                    text += (await stream.__anext__()).text
                cancelled += scope.cancelled_caught
        assert text == "hello, world"
        assert cancelled


async def test_O09_the_release_waits_for_no_reader(
    autojump_clock: object, timed: Callable[..., Config]
) -> None:
    async with open_cluster(timed()) as cluster:
        async with cluster.client.generate("hello") as stream:
            await trio.sleep(10)
            assert _inflight(cluster) == [0], "finished, though nobody has read it"
            assert (await stream.__anext__()).text == "hello"
        assert cluster.client.statistics().aborted == 0


async def test_O11_streams_at_full_rate_leave_room_for_others(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("echo")) as cluster, trio.open_nursery() as nursery:
        done = trio.Event()
        turns = 0

        @nursery.start_soon
        async def heartbeat() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as streams:
            for _ in range(100):
                streams.start_soon(cluster.client.complete, "hello", LONG)
        done.set()
        steps = max(each.core.steps for each in cluster.statistics().engines)
        assert turns >= steps, "a turn for each step of each engine, at the least"
