"""Load on a cluster of known speed, on a virtual clock: each moment is known."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.bench.arrivals import Arrivals
from dpkit.bench.inprocess import ClusterTarget
from dpkit.bench.lengths import Fixed, parse_lengths
from dpkit.bench.plan import Load
from dpkit.bench.prompts import PromptMaker
from dpkit.bench.record import Outcome
from dpkit.bench.session import run_bench
from dpkit.bench.slo import parse_slo
from dpkit.bench.target import Target
from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle
from dpkit.traces import Ask as Came
from dpkit.traces import Trace
from tests.nursery.lab import STEP_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from dpkit.bench.plan import Ask
    from dpkit.bench.record import Record

TIMED = "[[engines]]\nname = 'e'\nmodel = 'tests.nursery.lab:Timed'\n"
ALONE = f"{TIMED}[engines.scheduler]\nmax_num_seqs = 1\n"
TWO = f"{TIMED}count = 2\n"


@asynccontextmanager
async def timed(load: Load, toml: str = TIMED) -> AsyncIterator[ClusterTarget]:
    """A cluster whose steps last 100 ms each; nothing is left of any request."""
    async with open_cluster(parse_config(toml)) as cluster:
        yield ClusterTarget(cluster, "here", load)
        await trio.sleep(2 * STEP_S)  # engines drop what was aborted before their next step
        check_idle(cluster)


def of(**fields) -> Load:
    fields.setdefault("prompt_tokens", Fixed(8))
    fields.setdefault("output_tokens", Fixed(3))
    return Load(ignore_eos=True, **fields)


async def test_times_of_a_closed_loop_are_those_of_the_engine(autojump_clock) -> None:
    load = of(concurrency=2, requests=6)
    async with timed(load) as target:
        report = await run_bench(target, load, slo=parse_slo("ttft=100ms,tpot=100ms"))
    summary = report.summary
    assert (summary.finished, summary.failed, summary.most_at_once) == (6, 0, 2)
    assert (summary.prompt_tokens, summary.output_tokens) == (48, 18)
    for spread, seconds, count in (
        (summary.itl, 0.1, 12),
        (summary.tpot, 0.1, 6),
        (summary.e2e, 0.3, 6),
        (summary.ttft, 0.1, 6),
    ):
        assert spread is not None
        assert spread.count == count
        assert spread.p50 == pytest.approx(seconds)
        assert spread.max == pytest.approx(seconds)
    assert summary.goodput is not None
    assert summary.goodput.good == 6
    assert summary.duration == pytest.approx(0.9)
    assert summary.output_tokens_per_s == pytest.approx(20)
    assert not summary.generator_was_late
    assert report.notes == ()


async def test_an_open_loop_counts_from_the_moment_that_was_meant(autojump_clock) -> None:
    """The engine serves one request in 0.3 s and gets one each 0.1 s: nobody's wait is left out."""
    load = of(rate=10.0, arrivals=Arrivals.CONSTANT, requests=5)
    async with timed(load, ALONE) as target:
        report = await run_bench(target, load, slo=parse_slo("e2e=750ms"))
    latencies = [record.latency for record in report.records]
    assert latencies == pytest.approx([0.3, 0.5, 0.7, 0.9, 1.1])
    assert [record.late for record in report.records] == pytest.approx([0.0] * 5)
    assert report.summary.goodput is not None
    assert (report.summary.goodput.good, report.summary.goodput.share) == (3, 0.6)
    assert report.summary.most_at_once == 4


class Hogging(Target):
    """Answers at once, but for the first request the whole program stands still for 350 ms."""

    name, model, is_exact = "here", "hog", True

    def __init__(self, clock: MockClock) -> None:
        self._clock = clock

    def prompts(self, *, seed: int, prefix: int) -> PromptMaker:
        return PromptMaker((1, 2), seed=seed, prefix=prefix)

    async def ask(self, ask: Ask, record: Record) -> None:
        if ask.index == 0:
            self._clock.jump(0.35)
        record.moments.append(trio.current_time())
        await trio.lowlevel.checkpoint()


async def test_a_generator_that_comes_late_says_so(autojump_clock) -> None:
    load = of(rate=10.0, arrivals=Arrivals.CONSTANT, requests=5)
    report = await run_bench(Hogging(autojump_clock), load)
    assert report.summary.generator_was_late
    lateness = [record.late for record in report.records]
    assert lateness == pytest.approx([0.0, 0.25, 0.15, 0.05, 0.0])
    first_tokens = [record.ttft for record in report.records]
    assert first_tokens == pytest.approx([0.35, 0.25, 0.15, 0.05, 0.0])
    [note] = report.notes
    assert note.startswith("the generator itself was late: requests began up to 250.0 ms late")
    assert ", it was woken up to 340.0 ms late" in note
    assert "ask for less, or give it a core of its own" in note


async def test_the_warm_up_is_sent_and_left_out(autojump_clock) -> None:
    load = of(concurrency=1, requests=4, warm_up_requests=2)
    async with timed(load) as target:
        report = await run_bench(target, load)
    assert [record.is_warm_up for record in report.records] == [True] * 2 + [False] * 4
    assert (report.summary.requests, report.summary.warm_up) == (4, 2)
    assert report.summary.duration == pytest.approx(1.2)


async def test_a_warm_up_of_a_time_is_left_out_before_the_count_begins(autojump_clock) -> None:
    load = of(concurrency=1, requests=2, warm_up_time=0.5)
    async with timed(load) as target:
        report = await run_bench(target, load)
    assert [record.is_warm_up for record in report.records] == [True, True, False, False]


async def test_none_begins_after_the_duration_and_all_end(autojump_clock) -> None:
    closed = of(concurrency=2, duration=0.5)
    async with timed(closed) as target:
        report = await run_bench(target, closed)
    assert [record.intended - report.origin for record in report.records] == pytest.approx(
        [0.0, 0.0, 0.3, 0.3]
    )
    opened = of(rate=10.0, arrivals=Arrivals.CONSTANT, duration=0.5, warm_up_time=0.2)
    async with timed(opened) as target:
        report = await run_bench(target, opened)
    assert (report.summary.warm_up, report.summary.finished) == (2, 5)


async def test_a_trace_is_replayed_at_its_moments(autojump_clock) -> None:
    came = (Came(arrival_s=n, prompt_tokens=4, output_tokens=n) for n in (1, 2, 4))
    load = Load(trace=Trace(name="t", asks=tuple(came)), replay=True, speed=2.0, ignore_eos=True)
    async with timed(load) as target:
        report = await run_bench(target, load)
    begun = [record.began - report.origin for record in report.records]
    assert begun == pytest.approx([0.0, 0.5, 1.5])
    assert [record.output_tokens for record in report.records] == [1, 2, 4]
    assert report.settings["load"] == "open loop, a trace of 3 requests, 2 times as fast"
    assert report.settings["until"] == "the end of the trace"


async def test_each_engine_has_its_share(autojump_clock) -> None:
    load = of(concurrency=2, requests=6)
    async with timed(load, TWO) as target:
        report = await run_bench(target, load)
    assert [each.engine for each in report.summary.engines] == ["e-0", "e-1"]
    assert sum(each.requests for each in report.summary.engines) == 6


async def test_without_ignore_eos_an_answer_may_be_shorter(autojump_clock) -> None:
    load = Load(concurrency=1, requests=3, prompt_tokens=Fixed(4), output_tokens=Fixed(50))
    async with timed(load) as target:
        report = await run_bench(target, load)
    assert [record.output_tokens for record in report.records] == [5] * 3  # the end is a token


async def test_what_is_refused_counts_by_its_kind(autojump_clock) -> None:
    lengths = parse_lengths("uniform:1,2")
    load = Load(concurrency=1, requests=2, prompt_tokens=lengths, output_tokens=Fixed(10**7))
    async with timed(load) as target:
        report = await run_bench(target, load)
    [error] = report.summary.errors
    assert (error.kind, error.count) == ("RequestRejected", 2)
    assert "10,000,00" in error.example or "1000000" in error.example


async def test_a_full_queue_counts_too(autojump_clock) -> None:
    full = f"{ALONE}[admission]\nmax_inflight = 1\nmax_queued = 0\n"
    load = of(concurrency=3, requests=3)
    async with timed(load, full) as target:
        report = await run_bench(target, load)
    assert (report.summary.finished, report.summary.failed) == (1, 2)
    assert [(each.kind, each.count) for each in report.summary.errors] == [("Overloaded", 2)]


async def test_a_request_that_takes_too_long_is_given_up(autojump_clock) -> None:
    load = of(concurrency=1, requests=2, timeout=0.25)
    async with timed(load) as target:
        report = await run_bench(target, load)
    [error] = report.summary.errors
    assert (error.kind, error.count) == ("timeout", 2)
    assert error.example == "no whole answer within 0.25 s"
    assert [record.latency for record in report.records] == pytest.approx([0.25] * 2)


async def test_a_stop_reports_what_there_is(autojump_clock) -> None:
    load = of(concurrency=2, duration=100.0)
    stop = trio.Event()

    async def stop_later() -> None:
        await trio.sleep(1.05)
        stop.set()

    async with timed(load) as target, trio.open_nursery() as nursery:
        nursery.start_soon(stop_later)
        report = await run_bench(target, load, stop=stop)
    assert report.was_stopped
    assert (report.summary.finished, report.summary.unfinished) == (6, 2)
    assert report.notes == ("2 requests were under way when the run was stopped",)
    unfinished = [each for each in report.records if each.outcome is Outcome.UNFINISHED]
    assert [each.ended - report.origin for each in unfinished] == pytest.approx([1.05] * 2)


async def test_a_cluster_that_ends_its_requests_is_told_of(autojump_clock) -> None:
    load = of(concurrency=1, requests=1, output_tokens=Fixed(50))
    async with open_cluster(parse_config(TIMED)) as cluster, trio.open_nursery() as nursery:

        async def drain() -> None:
            await trio.sleep(1)
            await cluster.drain(trio.current_time())

        nursery.start_soon(drain)
        report = await run_bench(ClusterTarget(cluster, "here", load), load)
    [error] = report.summary.errors
    assert (error.kind, error.count) == ("Draining", 1)


async def test_every_request_has_one_end(autojump_clock) -> None:
    seen: list[int] = []

    class Counting(Hogging):
        async def ask(self, ask: Ask, record: Record) -> None:  # noqa: ARG002
            seen.append(ask.index)
            await trio.sleep(0.01)

    load = of(rate=50.0, requests=200, seed=3)
    report = await run_bench(Counting(autojump_clock), load)
    assert sorted(seen) == list(range(200))
    assert [record.index for record in report.records] == list(range(200))
    assert report.summary.finished == 200
