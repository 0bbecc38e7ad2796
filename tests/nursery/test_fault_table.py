"""The fault table, row by row: what must happen when something breaks, within which time.

Rows that need child processes, HTTP or bad bytes are elsewhere, as are rows 23 and 25, which are
the command line's (`tests/cli`) and the config's (`tests/config`).
"""

from __future__ import annotations

import logging
import os
import random
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import (
    ClusterClosed,
    ClusterFailed,
    ClusterNotStarted,
    DpkitError,
    EngineLost,
    InternalError,
    OutOfMemory,
    Overloaded,
    RequestRejected,
)
from dpkit.messages import EngineId, EngineOutput, StepResult
from dpkit.names import EngineState, FinishReason
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.nursery.events import EventKind, EventLog
from dpkit.nursery.eventwriter import EventWriter
from dpkit.testing.failing import fail_sweep
from dpkit.testing.faults import CRASH, HANG, Fault, FaultKind
from dpkit.testing.history import History
from dpkit.testing.idle import check_idle
from dpkit.testing.links import Line, LineFaults, put_stats_on
from dpkit.testing.points import ALLOCATE, STEP, Points
from dpkit.testing.sweep import sweep
from dpkit.testing.wrapper import named
from tests.clusters import told
from tests.nursery.lab import STEP_S, Lab, Timed, loop_of, settle, when

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dpkit.messages import Batch
    from dpkit.nursery.stream import OutputStream
    from dpkit.testing.mark import Mark

SEEDS = range(int(os.environ.get("DPKIT_TEST_SEEDS", "20")))

NARROW = "max_num_seqs = 3, max_num_batched_tokens = 6"
SMALL = f"""
kv = {{ block_size = 4, num_blocks = 8 }}
scheduler = {{ {NARROW} }}
"""


async def _crowd(cluster: Cluster, history: History, count: int = 5) -> None:
    """As many requests at once, of which every other one may be resumed."""
    async with trio.open_nursery() as nursery:
        for number in range(count):

            async def ask(number: int = number) -> None:
                prompt, resume = f"{number}bcdef", number % 2 == 1
                await history.complete(cluster.client, prompt, max_tokens=5, resume=resume)

            nursery.start_soon(ask)


# Row 1: an engine raises in a step.


@pytest.mark.parametrize("kind", [STEP, ALLOCATE])
def test_row_1_an_engine_that_fails_at_any_step_loses_nothing_that_can_be_saved(kind: str) -> None:
    outcomes: set[str] = set()

    async def scenario(points: Points) -> tuple[History, Cluster]:
        history = History()
        with named(history.model(points.model(CostModel("h20-4b")))) as model:
            config = parse_config(
                f'[[engines]]\nmodel = "{model}"\ncount = 2\n{SMALL}', overrides=["cluster.seed=1"]
            )
            async with open_cluster(config) as cluster:
                await _crowd(cluster, history)
        return history, cluster

    def check(result: tuple[History, Cluster]) -> None:
        history, cluster = result
        history.check(cluster)
        assert len(told(cluster, EventKind.ENGINE_LOST)) <= 1, "the other one was well"
        outcomes.update(entry.outcomes[0] for entry in history.entries)

    done = fail_sweep(scenario, seeds=SEEDS, check=check, kinds=[kind])
    assert done.runs > len(SEEDS)
    assert outcomes == ({"length", "EngineLost"} if kind == STEP else {"length"})


async def test_row_1_requests_move_in_the_same_step_and_others_do_not_notice(
    autojump_clock: object,
) -> None:
    lab = Lab()
    lab.faulty[0].plan = {2: CRASH}
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:

            async def ask(name: str, **options: Any) -> None:
                completion = await cluster.client.complete("abcd", request_id=name, **options)
                assert completion.text == "abcd"

            nursery.start_soon(lambda: ask("other", engine="e1-0"))
            async with cluster.client.generate("abcdef", engine="e0-0") as delivered:
                await delivered.__anext__()
                await trio.sleep(STEP_S / 2)  # its second step is under way, and this one waits
                nursery.start_soon(lambda: ask("moved"))
                await trio.testing.wait_all_tasks_blocked()
                cluster.client.statistics()
                with pytest.raises(EngineLost) as caught:
                    await delivered.read_all()
                assert (delivered.text, caught.value.engine) == ("ab", EngineId("e0-0"))
                assert trio.current_time() == pytest.approx(2 * STEP_S)
        lost = told(cluster, EventKind.ENGINE_LOST)
        assert when(lost) == [(0.2, "e0-0")]
        await trio.sleep(2)
        assert when(told(cluster, EventKind.ENGINE_READY))[2:] == [(1.2, "e0-0#1")]
        assert cluster.client.statistics().retried in {0, 1}, "wherever the policy put it"
        check_idle(cluster)


# Row 2: an engine raises at its start, again and again.


async def test_row_2_an_engine_that_never_starts_is_given_up_on_time(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()], supervision='intensity = 3, backoff = "1s", jitter = 0.0')
    lab.faulty[0].births = dict.fromkeys(range(99), CRASH)
    with pytest.raises(ClusterNotStarted, match="engine e0-0 failed: InjectedCrash") as caught:
        async with lab.open():
            pytest.fail("the body began without an engine")
    assert lab.watched[0].births == [0, 1, 3, 7]
    assert "life 0" in str(caught.value.__cause__), "the first failure is the one that tells"


async def test_row_2_the_others_serve_while_enough_are_left(autojump_clock: object) -> None:
    lab = Lab(supervision='intensity = 1, backoff = "1s", jitter = 0.0')
    lab.faulty[0].births = dict.fromkeys(range(99), CRASH)
    async with lab.open() as cluster:
        assert trio.current_time() == 1
        broken, well = cluster.statistics().engines
        assert (broken.state, well.state) == (EngineState.DOWN, EngineState.READY)
        assert broken.last_error == "InjectedCrash: injected: crash at the start of life 0"
        assert (await cluster.client.complete("hello")).engine.name == "e1-0"
        with pytest.raises(RequestRejected, match="e0-0"):
            await cluster.client.complete("hello", engine="e0-0")


async def test_row_2_below_min_ready_the_cluster_fails_with_the_first_cause(
    autojump_clock: object,
) -> None:
    lab = Lab(settings="cluster = { min_ready = 2 }", supervision="intensity = 0")

    async def crash() -> None:
        async with lab.open() as cluster:
            lab.faulty[0].inject(CRASH)
            async with cluster.client.generate("hello", engine="e0-0"):
                await trio.sleep_forever()

    with pytest.raises(ClusterFailed, match="e0-0") as caught:
        await crash()
    assert not isinstance(caught.value, ClusterNotStarted)
    assert trio.current_time() == 0


# Row 4: an engine hangs in a step.


async def test_row_4_a_simulated_hang_is_interrupted_and_the_engine_restarted(
    autojump_clock: object,
) -> None:
    lab = Lab()  # step_timeout = 5 s
    lab.faulty[0].plan = {0: HANG}
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(cluster.client.complete, "hello")
        assert trio.current_time() == pytest.approx(6 + 6 * STEP_S), "5 s and a second look"
        assert when(told(cluster, EventKind.ENGINE_STUCK, EventKind.ENGINE_LOST)) == [
            (6, "e0-0"),
            (6, "e0-0"),
        ]
        await trio.sleep(1)
        assert cluster.statistics().engines[0].state is EngineState.READY
        assert cluster.client.statistics().retried == 1
        check_idle(cluster)


class Stoppable(EchoModel):
    """Computes in its engine's thread, and hangs there when it is told to, until it is let go."""

    inline: ClassVar[bool] = False

    def __init__(self) -> None:
        self.go = threading.Event()

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        if any(row.request_id == "hang" for row in batch.rows):
            self.go.wait()
        return super().execute(batch, cache)


@asynccontextmanager
async def _with_hang(settings: str = "") -> AsyncIterator[tuple[Cluster, OutputStream, Stoppable]]:
    """In real time, since threads know no other: a request that hangs in the thread of e0-0."""
    stoppable = Stoppable()
    supervision = 'backoff = "1ms", step_timeout = "30ms"'
    lab = Lab([stoppable, stoppable], settings=settings, supervision=supervision)
    try:
        with trio.fail_after(10):
            async with (
                lab.open() as cluster,
                cluster.client.generate("hello", request_id="hang", engine="e0-0") as stream,
            ):
                yield cluster, stream, stoppable
    finally:  # this process goes on, so let the thread that was left behind end
        stoppable.go.set()
        for thread in threading.enumerate():
            if thread.name.startswith("dpkit e"):
                thread.join()


async def test_row_4_a_hung_thread_is_given_up_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _with_hang('cluster = { grace = "1h" }') as (cluster, stream, _):
        moved = cluster.client.generate("hello")
        with pytest.raises(EngineLost, match=r"more than 0\.03 s \(supervision.step_timeout\)"):
            await stream.read_all()
        assert cluster.statistics().engines[0].state is EngineState.STUCK
        async with moved:
            assert moved.engine.name == "e1-0", "nothing goes to the other any more"
            assert (await moved.read_all()).text == "hello"
        check_idle(cluster)
    assert "dpkit e0-0: its step does not end; the thread is left behind" in caplog.text


async def test_row_4_a_hang_that_nobody_has_noticed_yet_delays_the_end_by_the_grace() -> None:
    settings = 'cluster = { grace = "100ms", kill_after = "20ms" }'
    async with _with_hang(settings) as (cluster, stream, _):
        await trio.sleep(0.01)
        left_at = trio.current_time()
        stream.close()
    assert trio.current_time() - left_at < 5
    check_idle(cluster)


async def test_row_4_a_thread_that_comes_back_begins_a_new_life() -> None:
    async with _with_hang() as (cluster, stream, stoppable):
        with pytest.raises(EngineLost, match="stuck"):
            await stream.read_all()
        stoppable.go.set()
        completion = await cluster.client.complete("hello", engine="e0-0")
        assert completion.engine == EngineId("e0-0", 1)
        assert completion.text == "hello"
        assert cluster.client.statistics().late_outputs == 0


# Rows 5 and 14: what is late, lost, doubled or out of order.


async def test_row_5_frames_of_an_old_life_are_counted_and_dropped(autojump_clock: object) -> None:
    lab = Lab([Timed()])
    lab.faulty[0].plan = {0: CRASH}
    async with lab.open() as cluster:
        async with cluster.client.generate("hello", request_id="r") as stream:
            await trio.sleep(1.25)  # it is on the second life by now, and has two tokens
            assert stream.engine == EngineId("e0-0", 1)
            for reason in (None, FinishReason.LENGTH):
                late = EngineOutput(request_id="r", token_ids=(7,), finish_reason=reason)
                cluster._flights[0].deliver(EngineId("e0-0"), late)
            assert (await stream.read_all()).text == "hello"
        assert cluster.client.statistics().late_outputs == 2
        check_idle(cluster)


def _routes(policy: str, faults: LineFaults) -> list[str]:
    """Where sixty requests go, of which every third is left early."""
    routes = {}

    async def ask(cluster: Cluster, number: int) -> None:
        await trio.sleep(number * 0.037)
        with trio.move_on_after(0.1 if number % 3 == 0 else 1e9):
            prompt, tokens = [1] * (7 * number % 150 + 1), number * 5 % 40 + 1
            async with cluster.client.generate(prompt, max_tokens=tokens) as stream:
                routes[number] = stream.engine.name
                await stream.read_all()

    async def main() -> None:
        config = parse_config(
            f'balancer.policy = "{policy}"\n[[engines]]\nmodel = "cost:h20-4b"\ncount = 3\n',
            overrides=["cluster.seed=1"],
        )
        async with open_cluster(config) as cluster, trio.open_nursery() as background:
            line = Line(random.Random(1), faults)
            background.start_soon(line.run)
            put_stats_on(cluster, line)
            async with trio.open_nursery() as nursery:
                for number in range(60):
                    nursery.start_soon(ask, cluster, number)
            background.cancel_scope.cancel()
        check_idle(cluster, bad_stats=True)

    with seeded_scheduler(1):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return [routes[number] for number in range(60)]


@pytest.mark.parametrize("policy", ["least_tokens", "power_of_two", "round_robin"])
def test_row_14_who_routes_by_its_ledger_never_notices_bad_stats(policy: str) -> None:
    good = _routes(policy, LineFaults())
    bad = [
        LineFaults(loss=0.5),
        LineFaults(loss=1.0),
        LineFaults(delay=2.0),
        LineFaults(delay=2.0, reorder=True, duplicate=0.5),
    ]
    for faults in bad:
        assert _routes(policy, faults) == good, faults


@pytest.mark.parametrize("loss", [0.3, 1.0])
def test_row_14_without_stats_the_default_policy_herds_nobody(loss: float) -> None:
    routes = _routes("kv_pressure", LineFaults(loss=loss, delay=1.0, reorder=True, duplicate=0.3))
    counts = [routes.count(f"engine-{number}") for number in range(3)]
    assert max(counts) - min(counts) <= 10


# Row 6: the coordinator's task dies.


def test_row_6_a_dead_coordinator_costs_no_request_and_comes_back() -> None:
    async def scenario(points: Points) -> Cluster:
        config = parse_config(
            f'[[engines]]\nmodel = "cost:h20-4b"\ncount = 2\n{SMALL}',
            overrides=["cluster.seed=1", "coordinator.interval=10ms"],
        )
        history = History()
        async with open_cluster(config) as cluster:
            coordinator, fanin = cluster._coordinator, cluster._fanin
            coordinator._tell = points.wrap("tell", coordinator._tell)
            fanin.receive_nowait = points.wrap("receive", fanin.receive_nowait)  # type: ignore[method-assign]
            await _crowd(cluster, history, 4)
            await trio.sleep(1)
            assert [entry.outcomes for entry in history.entries] == [["length"]] * 4
            restarts = cluster.statistics().coordinator_restarts
            assert restarts == len(told(cluster, EventKind.COORDINATOR_LOST))
            assert restarts == (points.injected is not None)
        return cluster

    done = fail_sweep(scenario, seeds=SEEDS[:5], check=check_idle)
    assert set(done.calls) == {"tell", "receive"}


async def test_row_6_the_view_is_rebuilt_though_engines_are_busy_and_silent(
    autojump_clock: object,
) -> None:
    class Slow(EchoModel):
        def execute(self, batch: Batch, cache: Any) -> StepResult:
            return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=60)

    lab = Lab([Slow(), Timed()], supervision='step_timeout = "5m"')
    async with lab.open() as cluster, cluster.client.generate("hello", engine="e0-0"):
        await trio.sleep(1)
        good = cluster._coordinator._tell

        def fail_once(snapshot: object) -> None:
            cluster._coordinator._tell = good
            raise ZeroDivisionError(snapshot)

        cluster._coordinator._tell = fail_once
        view = cluster._flights[0]._dispatch._view
        view.apply(cluster._rules.publish(trio.current_time()))
        view.load(0).hear(0, 0, 0.0)
        await trio.sleep(6)  # an idle interval, a failure, and a restart
        assert cluster.statistics().coordinator_restarts == 1
        assert view.waiting == [1, 0], "all that the engine has told since its step began"


# Rows 8 and 9: cancelled clients and clusters. `test_cancel_sweep` has more of them.


def test_row_8_who_leaves_at_any_step_delays_nobody() -> None:
    times: list[float] = []

    async def scenario(mark: Mark) -> Cluster:
        times.clear()
        lab = Lab([Timed()])
        async with lab.open() as cluster:

            async def neighbour() -> None:
                await cluster.client.complete("abcdefgh")
                times.append(trio.current_time())

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(neighbour)
                with mark.target():
                    await cluster.client.complete("abcdefgh")
            await settle()
            check_idle(cluster)
        return cluster

    def check(cluster: Cluster) -> None:
        check_idle(cluster)
        assert all(at == pytest.approx(9 * STEP_S, abs=STEP_S + 1e-9) for at in times)

    sweep(scenario, seeds=SEEDS, check=check)


class _OwnError(Exception):
    """The user's."""


async def _return(_: Cluster) -> None:
    """Just the end."""


async def _raise(_: Cluster) -> None:
    raise _OwnError


async def _interrupt(_: Cluster) -> None:
    raise KeyboardInterrupt


async def _exit(_: Cluster) -> None:
    raise SystemExit(3)


async def _cancel_outside(_: Cluster) -> None:
    SCOPES[-1].cancel()
    await trio.sleep_forever()


async def _cancel_and_raise(_: Cluster) -> None:
    SCOPES[-1].cancel()
    raise _OwnError


async def _cancel_and_clean_up_with_the_cluster(cluster: Cluster) -> None:
    SCOPES[-1].cancel()
    with trio.CancelScope(shield=True):  # whoever cleans up still has a cluster
        assert (await cluster.client.complete("bye", max_tokens=4)).text == "bye"


async def _group(_: Cluster) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_raise, _)


async def _timeout(_: Cluster) -> None:
    with trio.fail_after(1):
        await trio.sleep_forever()


SCOPES: list[trio.CancelScope] = []

EXITS: list[tuple[Callable[[Cluster], Any], type[BaseException] | None]] = [
    (_return, None),
    (_raise, _OwnError),
    (_interrupt, KeyboardInterrupt),
    (_exit, SystemExit),
    (_cancel_outside, None),
    (_cancel_and_raise, _OwnError),
    (_cancel_and_clean_up_with_the_cluster, None),
    (_group, ExceptionGroup),
    (_timeout, trio.TooSlowError),
]


@pytest.mark.parametrize(
    ("body", "expected"), EXITS, ids=lambda value: getattr(value, "__name__", "")
)
async def test_row_9_every_exit_leaves_nothing_and_comes_out_bare(
    autojump_clock: object, body: Callable[[Cluster], Any], expected: type[BaseException] | None
) -> None:
    lab = Lab(blocks=8, scheduler=NARROW)
    before = trio.lowlevel.current_statistics().tasks_living
    caught: BaseException | None = None
    with trio.CancelScope() as scope:
        SCOPES.append(scope)
        try:
            async with lab.open() as cluster:
                streams = [cluster.client.generate("abcdef", max_tokens=7) for _ in range(6)]
                for stream in streams:
                    await stream.__aenter__()
                await streams[0].__anext__()
                await body(cluster)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - looked at below
            caught = error
    assert type(caught) is (expected or type(None))
    assert trio.lowlevel.current_statistics().tasks_living == before
    check_idle(cluster)
    statistics = cluster.client.statistics()
    assert sum(statistics.causes.values()) == statistics.started
    for stream in streams:  # no reader waits for ever
        with suppress(ClusterClosed):
            await stream.read_all()
        assert stream.finish_reason is not None


# Rows 11 and 19: somebody is slow.


async def test_row_11_a_reader_that_stops_loses_nothing_and_delays_nobody(
    autojump_clock: object,
) -> None:
    async def times(*, slow: bool) -> list[float]:
        lab = Lab([Timed()])
        seen = []
        async with lab.open() as cluster:

            async def neighbour(number: int) -> None:
                await trio.sleep(0.01 + number * 0.25)  # after the stream, whoever runs first
                started = trio.current_time()
                await cluster.client.complete("abcdefgh")
                seen.append(round(trio.current_time() - started, 6))

            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(neighbour, number)
                async with cluster.client.generate("abcdefghijklmnop") as stream:
                    if slow:
                        await trio.sleep(100)
                        assert [output.text async for output in stream] == ["abcdefghijklmnop"]
                    else:
                        await stream.read_all()
        return seen

    assert await times(slow=True) == await times(slow=False)


async def test_row_19_a_slow_engine_gets_less_and_stays(autojump_clock: object) -> None:
    lab = Lab([Timed(), Timed()])
    lab.faulty[0].always = Fault(FaultKind.SLOW, 10)
    done = {"e0-0": 0, "e1-0": 0}
    async with lab.open() as cluster:

        async def user() -> None:
            while trio.current_time() < 300:  # in 60 s the luck of turns is a tenth of it
                completion = await cluster.client.complete("abcd")
                done[completion.engine.name] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(user)
        assert not told(cluster, EventKind.ENGINE_LOST, EventKind.ENGINE_STUCK)
        assert {each.state for each in cluster.statistics().engines} == {EngineState.READY}
    assert 0 < done["e0-0"] * 5 < done["e1-0"], done


# Rows 15 to 17: what does not fit.


@settings(max_examples=60, deadline=None)
@given(
    asks=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8
    )
)
def test_row_15_every_request_is_finished_or_refused_at_once(
    asks: list[tuple[int, int, int]],
) -> None:
    async def main() -> None:
        lab = Lab([CostModel("h20-4b")], blocks=8, scheduler=NARROW)
        async with lab.open() as cluster:

            async def ask(prompt: int, tokens: int, wait: int) -> None:
                await trio.sleep(wait * 0.01)
                started = trio.current_time()
                try:
                    await cluster.client.complete([1] * prompt, max_tokens=tokens)
                except RequestRejected as error:
                    refused.append((prompt, tokens, str(error), trio.current_time() - started))
                else:
                    assert 0 < prompt <= 33 - tokens, "32 positions, and the last is not computed"

            with trio.fail_after(1000):
                async with trio.open_nursery() as nursery:
                    for each in asks:
                        nursery.start_soon(ask, *each)
        check_idle(cluster)

    refused: list[tuple[int, int, str, float]] = []
    with seeded_scheduler(1):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    for prompt, tokens, message, waited in refused:
        assert not 0 < prompt <= 33 - tokens
        assert "more than the KV cache's 32" in message or not prompt
        assert waited < 0.1, "a step at the most"


async def test_row_16_a_pool_of_minimum_size_serves_all_in_turn(autojump_clock: object) -> None:
    lab = Lab([Timed()], blocks=7, prefix_cache=False)
    async with lab.open() as cluster:

        async def ask(number: int) -> None:
            await lab.history.complete(cluster.client, f"{number}bcdefg", max_tokens=11)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
        core = cluster.statistics().engines[0].core
        assert core.preemptions > 0
        assert core.steps <= 8 * 8, "as if one after the other, at the worst"
    assert {entry.outcomes[0] for entry in lab.history.entries} == {"stop"}
    lab.history.check(cluster)


async def _offer(share: float, seconds: float = 60) -> tuple[int, int, int]:
    """Offer a share of what one engine can do; done in time, refused, most that ever waited."""
    start = trio.current_time()
    done = most = 0
    retry_after: list[float] = []
    settings = "admission = { max_inflight = 4, max_queued = 8 }"
    async with Lab([Timed()], settings=settings).open() as cluster:

        async def ask() -> None:
            nonlocal done, most
            try:
                async with cluster.client.generate("abcd", max_tokens=5) as stream:
                    most = max(most, cluster.client.statistics().queued)
                    await stream.read_all()
                done += trio.current_time() < start + seconds
            except Overloaded as error:
                retry_after.append(error.retry_after)

        async with trio.open_nursery() as nursery:
            while trio.current_time() < start + seconds:
                nursery.start_soon(ask)
                await trio.sleep(1 / (8 * share))  # four requests in half a second each
        check_idle(cluster)
    assert all(1 <= each <= 60 for each in retry_after)
    return done, len(retry_after), most


async def test_row_17_overload_is_refused_and_costs_no_goodput(autojump_clock: object) -> None:
    _, refused, _ = await _offer(0.5)
    assert refused == 0
    for share in (1.5, 2.0, 4.0):
        done, refused, most = await _offer(share)
        assert done > 0.9 * 8 * 60
        assert refused > 0
        assert most <= 8


async def test_row_17_who_waits_and_leaves_gives_its_place_at_once(
    autojump_clock: object,
) -> None:
    settings = "admission = { max_inflight = 1, max_queued = 2 }"
    async with Lab([Timed()], settings=settings).open() as cluster, trio.open_nursery() as nursery:
        client = cluster.client
        scopes = [trio.CancelScope() for _ in range(3)]

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                await client.complete("hello")

        for scope in scopes:
            nursery.start_soon(ask, scope)
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="2 requests wait already"):
            await client.complete("hello")
        scopes[1].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert client.statistics().queued == 1
        assert trio.current_time() == 0
        assert (await client.complete("hello")).text == "hello"


# Row 22: the event log's file cannot be written.


class _Disk:
    """A path whose writes fail while it is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.full = True

    def open(self, mode: str, **options: Any) -> Any:
        if self.full:
            raise OSError(28, "No space left on device", str(self.path))
        return self.path.open(mode, **options)

    def __str__(self) -> str:
        return str(self.path)


async def test_row_22_a_full_disk_costs_events_and_never_a_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events, disk = EventLog(), _Disk(tmp_path / "events.jsonl")
    writer = EventWriter(events, disk)  # type: ignore[arg-type]
    for _ in range(3):
        for _ in range(2):
            events.emit(EventKind.DRAINING)
        await writer.flush()
    assert writer.lost == 6
    assert caplog.text.count("No space left on device") == 1, "it nags nobody"
    disk.full = False
    events.emit(EventKind.DRAINING, detail="seen")
    await writer.flush()
    assert '"detail": "seen"' in disk.path.read_text()
    assert writer.lost == 6


@pytest.mark.parametrize("path", ["/dev/full", "/proc/version"])
async def test_row_22_a_cluster_with_a_bad_event_log_serves(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_config(f'log.events = "{path}"\n[[engines]]\nmodel = "echo"\n')
    async with open_cluster(config) as cluster:
        for _ in range(5):
            assert (await cluster.client.complete("hello")).text == "hello"
    assert f"event log {path}: " in caplog.text
    check_idle(cluster)


# Row 24: out of memory in a step.


class Cramped(Timed):
    """Has memory for so many tokens a step."""

    def __init__(self, most: int, error: Exception) -> None:
        self.sizes: list[int] = []
        self.most = most
        self.error = error

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.sizes.append(batch.num_tokens)
        if batch.num_tokens > self.most:
            raise self.error
        return super().execute(batch, cache)


@pytest.mark.parametrize("error", [MemoryError("no room"), OutOfMemory("no room")], ids=repr)
async def test_row_24_steps_are_halved_and_nothing_is_lost(
    autojump_clock: object, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cramped = Cramped(20, error)
    lab = Lab([cramped], blocks=64)
    async with lab.open() as cluster:
        completion = await cluster.client.complete("a" * 39, max_tokens=3)
        assert completion.text == "aaa"
        assert cramped.sizes == [39, 19, 19, 1, 1, 1]
        await _crowd(cluster, lab.history)
        core = cluster.statistics().engines[0].core
        assert core.steps_halved == 1
        assert cluster.statistics().engines[0].restarts == 0
    assert caplog.text.count("engine e0-0 halves its steps, for want of memory") == 1
    lab.history.check(cluster)


async def test_row_24_decodes_that_do_not_fit_wait_their_turn(autojump_clock: object) -> None:
    cramped = Cramped(8, MemoryError("no room"))
    lab = Lab([cramped], blocks=64)
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(12):  # twelve prompts of one token, so the first step is too large
                nursery.start_soon(lab.history.complete, cluster.client, "a")
        assert cluster.statistics().engines[0].restarts == 0
        assert max(cramped.sizes[1:]) <= 6
    lab.history.check(cluster)


async def test_row_24_what_fails_twice_ends_the_life(autojump_clock: object) -> None:
    cramped = Cramped(9, MemoryError("no room"))
    lab = Lab([cramped, Timed()])
    async with lab.open() as cluster:
        with pytest.raises(EngineLost, match="no room"):
            await cluster.client.complete("a" * 40, max_tokens=3, engine="e0-0")
        assert cramped.sizes == [40, 20]
        assert when(told(cluster, EventKind.ENGINE_LOST)) == [(0, "e0-0")]
        assert (await cluster.client.complete("hi")).engine.name == "e1-0"
        await trio.sleep(2)
        check_idle(cluster)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_row_24_whatever_the_memory_all_are_served(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 30), label="most")
    prompts = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8), label="prompts")

    async def main() -> None:
        lab = Lab([Cramped(most, MemoryError())], supervision="intensity = 1000", blocks=20)
        async with lab.open() as cluster:

            async def ask(prompt: int) -> None:
                await lab.history.complete(cluster.client, [1] * prompt, max_tokens=5, resume=True)

            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(ask, prompt)
            cluster.statistics()
        lab.history.check(cluster)

    with seeded_scheduler(1):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# Row 27: the clock jumps.


async def test_row_27_a_clock_that_jumps_ejects_nobody(mock_clock: trio.testing.MockClock) -> None:
    lab = Lab([Timed(), Timed()])
    async with lab.open() as cluster, trio.open_nursery() as nursery:

        async def keep_going() -> None:
            for _ in range(200):
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(STEP_S / 2)

        for number in range(4):
            nursery.start_soon(lab.history.complete, cluster.client, f"{number}bcdef")
        nursery.start_soon(keep_going)
        for _ in range(5):
            await trio.sleep(1.25 * STEP_S)
            mock_clock.jump(3600)  # the lid was closed in the middle of a step
    assert not told(cluster, EventKind.ENGINE_LOST, EventKind.ENGINE_STUCK)
    assert [entry.outcomes for entry in lab.history.entries] == [["stop"]] * 4


# Row 28: a bug of ours.


async def _break_the_pool(cluster: Cluster) -> None:
    loop_of(cluster._slots[0]).core._scheduler.pool._refs[60] = 1
    await cluster.client.complete("a", engine="e0-0")


async def _break_the_ledger(cluster: Cluster) -> None:
    stream = cluster.client.generate("hello", engine="e0-0")
    await stream.__aenter__()
    del cluster._flights[0]._flights[stream.request_id].placement.charge.account  # type: ignore[union-attr]
    await stream.read_all()


async def _break_the_coordinator(cluster: Cluster) -> None:
    def fail(_: object) -> None:
        raise InternalError("loads do not add up")

    cluster._coordinator._tell = fail
    await cluster.client.complete("hello")
    await trio.sleep_forever()


@pytest.mark.parametrize("breaks", [_break_the_pool, _break_the_ledger, _break_the_coordinator])
async def test_row_28_a_broken_invariant_stops_the_cluster_with_a_dump(
    autojump_clock: object,
    breaks: Callable[[Cluster], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def run() -> None:
        async with Lab().open() as cluster:
            with trio.CancelScope(shield=True), trio.move_on_after(3):
                await breaks(cluster)
            await trio.sleep_forever()

    with pytest.raises(DpkitError) as caught:
        await run()
    assert isinstance(caught.value, (ClusterFailed, EngineLost))
    assert isinstance(caught.value.__cause__, InternalError)
    for part in ("contradictions:", "clients:", "engines:", "coordinator:", "events:", "tasks:"):
        assert part in caplog.text
    assert "found a bug in dpkit" in caplog.text
    assert "ejection timer" in caplog.text, "the tasks are named"
