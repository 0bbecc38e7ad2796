"""What is measured is right: exact times on a virtual clock, steps of 100 ms."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.meter import Counted, Histogram, Meter
from dpkit.observe import Metrics
from dpkit.testing.faults import CRASH, kill_coordinator
from tests.nursery.lab import Lab, Timed, settle
from tests.nursery.test_changes import configs
from tests.nursery.test_rescue import config as short_of_memory
from tests.nursery.test_rescue import crowd
from tests.observe.lab import scrape
from tests.processes.lab import group, open_processes
from tests.waiting import until

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dpkit.nursery.cluster import Cluster
    from tests.observe.lab import Scraped


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(2.5, 3)
    assert histogram.now() == Counted((1.0, 2.0), (2, 2, 4), 15.5)
    assert histogram.now().plus(histogram.now()) == Counted((1.0, 2.0), (4, 4, 8), 31.0)
    assert repr(histogram) == "<Histogram of 8 values, 15.5 in all>"


async def test_a_step_is_measured_once_for_all_that_it_brought(autojump_clock: MockClock) -> None:
    meter = Meter()
    meter.step(0)
    meter.step(2, [5, 7])  # two first tokens: nothing came before them
    await trio.sleep(0.1)
    meter.step(3, [9])  # their second ones, and another's first one
    await trio.sleep(5)  # nobody was there
    meter.step(1, [3])
    await trio.sleep(0.2)
    meter.step(1)
    now = meter.measured()
    assert now.inter_token_s.total == pytest.approx(0.1 * 2 + 0.2)
    assert sum(now.inter_token_s.counts) == 3
    assert now.step_tokens.total == (2 + 12) + (3 + 9) + (1 + 3) + 1
    assert sum(now.step_tokens.counts) == 4


async def test_an_abort_is_measured_until_the_blocks_are_free(autojump_clock: MockClock) -> None:
    meter = Meter()
    for request_id in "abcd":
        meter.abort(request_id)
    await trio.sleep(0.1)
    meter.abort("a")  # again: it was asked for before
    meter.freed(["a", "x"])
    meter.forget("b")
    assert repr(meter) == "<Meter: <Histogram of 0 values, 0 in all>, 2 aborts under way>"
    meter.end()
    meter.freed("abcd")
    assert meter.measured().abort_to_free_s.total == pytest.approx(0.1)
    assert sum(meter.measured().abort_to_free_s.counts) == 1


def mean(scraped: Scraped, name: str) -> tuple[float, float]:
    """How many values, and their mean."""
    count = scraped.get(f"{name}_count")
    return count, round(scraped.get(f"{name}_sum") / count, 6)


async def test_each_phase_of_a_request_has_its_time(autojump_clock: MockClock) -> None:
    """Two requests where one has room: the second waits for all of the first, in our queue."""
    lab = Lab([Timed()], settings="[admission]\nmax_inflight = 1\n")
    async with lab.open() as cluster:
        metrics = Metrics(cluster)
        async with trio.open_nursery() as nursery:
            for request_id in ("first", "second"):
                nursery.start_soon(one, cluster, request_id)
            await trio.sleep(0.05)
            now = scrape(metrics)
            assert now.get("dpkit:requests_queued") == now.get("dpkit:requests_inflight") == 1
            await trio.sleep(0.1)
            now = scrape(metrics)
            assert now.get("vllm:time_to_first_token_seconds_count") == 1, "told when it comes"
            assert now.get("vllm:e2e_request_latency_seconds_count") == 0
        now = scrape(metrics)
        # Four tokens and the end are five steps.
        assert mean(now, "vllm:request_queue_time_seconds") == (2, 0.25)
        assert mean(now, "vllm:request_prefill_time_seconds") == (2, 0.1)
        assert mean(now, "vllm:request_decode_time_seconds") == (2, 0.4)
        assert mean(now, "vllm:request_inference_time_seconds") == (2, 0.5)
        assert mean(now, "vllm:e2e_request_latency_seconds") == (2, 0.75)
        assert mean(now, "vllm:time_to_first_token_seconds") == (2, 0.35)
        assert mean(now, "vllm:inter_token_latency_seconds") == (8, 0.1)
        assert mean(now, "vllm:request_time_per_output_token_seconds") == (2, 0.1)
        assert mean(now, "vllm:request_prompt_tokens") == (2, 4)
        assert mean(now, "vllm:request_generation_tokens") == (2, 5)
        assert mean(now, "vllm:request_params_max_tokens") == (2, 77)
        assert mean(now, "vllm:iteration_tokens_total") == (10, 1.8)
        assert now.get("vllm:prefix_cache_queries_total") == 8
        assert now.get("vllm:kv_cache_usage_perc") == 0
        assert now.get("vllm:cache_config_info", block_size="4", num_gpu_blocks="64") == 1


async def one(cluster: Cluster, request_id: str) -> None:
    """Ask for something."""
    await cluster.client.complete("abcd", request_id=request_id, max_tokens=77)


async def test_a_cancelled_request_is_free_within_a_step(autojump_clock: MockClock) -> None:
    async with Lab([Timed()]).open() as cluster:
        metrics = Metrics(cluster)
        with trio.move_on_after(0.23):
            await cluster.client.complete("abcdefgh")
        await settle()
        freed = "dpkit:cancel_to_freed_seconds"
        assert mean(scrape(metrics), freed) == (1, 0.07), "at the end of the step under way"


async def test_uneven_load_and_reasons_of_picks_are_told(autojump_clock: MockClock) -> None:
    with configs() as make:
        async with open_cluster(make(3)) as cluster:
            metrics = Metrics(cluster)
            assert scrape(metrics).get("dpkit:scheduler_imbalance") == 0
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(pinned, cluster)
                nursery.start_soon(one, cluster, "free")
                await trio.sleep(0.15)
                now = scrape(metrics)
                assert now.get("dpkit:scheduler_imbalance") == 4
                assert now.get("dpkit:requests_inflight", engine="1") == 4
            assert now.get("dpkit:picks_total", engine="1", reason="pinned") == 4
            assert now.get("dpkit:picks_total", reason="kv_pressure") == 1
            await trio.sleep(3)
            assert 0 <= scrape(metrics).get("dpkit:snapshot_age_seconds") <= 5


async def test_whether_there_is_an_arbiter_is_told_where_one_is_needed(
    autojump_clock: MockClock,
) -> None:
    late = 'balancer = { policy = "expected_ttft" }\n'
    async with Lab([Timed()], settings=late).open(clients=2) as cluster:
        metrics, told = Metrics(cluster), []
        for happens in (settle, partial(_lose_arbiter, cluster), partial(trio.sleep, 0.5)):
            await happens()
            told.append((cluster.statistics().arbiter_up, scrape(metrics).get("dpkit:arbiter_up")))
        assert told == [(True, 1), (False, 0), (True, 1)]
    for clients, settings in ((1, late), (2, "")):
        async with Lab([Timed()], settings=settings).open(clients=clients) as cluster:
            assert cluster.statistics().arbiter_up is None
            assert not scrape(Metrics(cluster)).series("dpkit:arbiter_up")


async def _lose_arbiter(cluster: Cluster) -> None:
    kill_coordinator(cluster)
    await trio.testing.wait_all_tasks_blocked()


async def pinned(cluster: Cluster) -> None:
    """Ask one engine."""
    await cluster.client.complete("abcd", engine="engine-1")


async def test_what_goes_elsewhere_is_counted_where_it_ends(autojump_clock: MockClock) -> None:
    lab = Lab([Timed(), Timed()], settings="[admission]\nresume = true\n")
    async with lab.open() as cluster:
        metrics = Metrics(cluster)
        async with cluster.client.generate("abcdefgh") as stream:
            await anext(stream)
            first = stream.engine
            assert first is not None
            lab.faulty[int(first.name[1])].inject(CRASH)
            await stream.read_all()
            assert stream.engine != first
        now = scrape(metrics)
        for name in ("vllm:request_success_total", "vllm:time_to_first_token_seconds_count"):
            assert now.get(name) == 1, name
        other = str(1 - int(first.name[1]))
        assert now.get("vllm:request_success_total", engine=other) == 1
        assert now.get("dpkit:requests_resumed_total") == 1
        assert now.get("dpkit:picks_total") == 2
        assert now.get("vllm:generation_tokens_total") == 9


async def test_what_is_had_back_is_counted_and_aborted_by_nobody(
    autojump_clock: MockClock,
) -> None:
    async with open_cluster(short_of_memory()) as cluster:
        metrics = Metrics(cluster)
        await crowd(cluster)
        now = scrape(metrics)
        assert now.get("dpkit:requests_taken_back_total") == 1
        assert now.get("vllm:request_success_total", finished_reason="abort") == 0
        assert [each.totals.requests for each in cluster.statistics().engines] == [2, 2]


async def test_engines_that_have_told_nothing_of_their_work_yet_are_counted(
    autojump_clock: MockClock,
) -> None:
    with configs() as make:
        async with open_cluster(make(2), clients=2) as cluster:
            metrics = Metrics(cluster)
            told = []
            for name in ("engine-0", "engine-1"):
                told.append(scrape(metrics).get("dpkit:engines_unreported"))
                await cluster.client.complete("a", engine=name)
            told.append(scrape(metrics).get("dpkit:engines_unreported"))
            assert told == [2, 1, 0]


async def test_engines_in_processes_are_measured_from_here() -> None:
    async with open_processes(group(count=2)) as cluster:
        metrics = Metrics(cluster)
        found = []
        for _ in range(4):
            completion = await cluster.client.complete("abcd" * 8)
            assert completion.text == "abcd" * 8
            found.append(completion.cached_tokens or 0)
        async with cluster.client.generate("abcdefgh", ignore_eos=True, max_tokens=60_000) as left:
            await anext(left)
        await until(lambda: cluster.statistics().engines[0].core.running == 0)

        def freed() -> int:
            engines = cluster.statistics().engines
            return sum(sum(each.totals.measured.abort_to_free_s.counts) for each in engines)

        await until(lambda: freed() == 1)
        now = scrape(metrics)
        tokens = now.get("vllm:generation_tokens_total")
        assert now.get("vllm:time_to_first_token_seconds_count") == 5
        late = now.get("dpkit:late_outputs_total")
        assert now.get("vllm:inter_token_latency_seconds_count") >= 4 * 32
        assert now.get("vllm:inter_token_latency_seconds_count") <= tokens - 5 + late
        assert now.get("vllm:prefix_cache_queries_total") == 4 * 32 + 8
        assert now.get("vllm:prefix_cache_hits_total") == 2 * 16 == sum(found)
        assert 0 < now.get("dpkit:cancel_to_freed_seconds_sum") < 15
