"""Admission, queues, deadlines, fairness (class K of the reports)."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.errors import DeadlineExceeded, Overloaded
from dpkit.testing.idle import check_idle
from dpkit.testing.links import Line, LineFaults, put_stats_on
from tests.nursery.lab import STEP_S, Lab, Timed

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.standing import EngineStatistics


async def _with_line(cluster: Cluster, faults: LineFaults, requests: int) -> list[str]:
    """Where requests go that come all along, while stats travel over a bad line."""
    engines: list[str] = []
    async with trio.open_nursery() as background:
        line = Line(random.Random(1), faults)
        background.start_soon(line.run)
        put_stats_on(cluster, line)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                engines.append((await cluster.client.complete("abcd")).engine.name)

            for _ in range(requests):
                nursery.start_soon(ask)
                await trio.sleep(0.05)
        background.cancel_scope.cancel()
    return engines


async def test_K01_without_any_stats_requests_go_on_evenly(autojump_clock: object) -> None:
    async with Lab().open() as cluster:
        picks = Counter(await _with_line(cluster, LineFaults(loss=1.0), 100))
        assert abs(picks["e0-0"] - picks["e1-0"]) <= 2, picks
        assert cluster.client.statistics().finished == 100


async def test_K02_late_stats_refuse_nobody(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        assert len(await _with_line(cluster, LineFaults(delay=0.3), 50)) == 50
        assert cluster.client.statistics().finished == 50


def _engines(cluster: Cluster) -> tuple[EngineStatistics, ...]:
    return cluster.statistics().engines


async def test_K03_no_burst_overshoots_the_bound(autojump_clock: object) -> None:
    lab = Lab(settings="admission = { max_inflight = 8, max_queued = 500 }")
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(500):
                nursery.start_soon(cluster.client.complete, "a")
            await trio.testing.wait_all_tasks_blocked()
            while cluster.client.statistics().queued:
                held = [each.core.waiting + each.core.running for each in _engines(cluster)]
                assert sum(held) <= 8, "the rest waits where priorities count"
                await trio.sleep(STEP_S / 3)
        check_idle(cluster)


async def test_K04_a_priority_may_rest_for_an_hour(autojump_clock: object) -> None:
    lab = Lab([Timed()], settings="admission = { max_inflight = 1 }")
    async with lab.open() as cluster:
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cluster.client.complete, "a")
                await trio.testing.wait_all_tasks_blocked()
                assert (await cluster.client.complete("b", priority=7)).text == "b"
            await trio.sleep(3600)


async def test_K05_shares_are_by_tokens_and_not_by_turns(autojump_clock: object) -> None:
    tokens: Counter[str] = Counter()
    settings = 'admission = { max_inflight = 1, queue_timeout = "1h" }'
    lab = Lab([Timed()], settings=settings, blocks=5000)
    async with lab.open() as cluster, trio.open_nursery() as nursery:

        async def ask(tenant: str, prompt: int) -> None:
            async with cluster.client.generate(
                [1] * prompt, max_tokens=1, ignore_eos=True, tenant=tenant
            ) as stream:
                tokens[tenant] += prompt
                await stream.read_all()

        for _ in range(30):
            nursery.start_soon(ask, "a", 16_000)
        for _ in range(900):
            nursery.start_soon(ask, "b", 100)
        await trio.sleep(80)
        assert sum(tokens.values()) > 100_000
        nursery.cancel_scope.cancel()
    assert abs(tokens["a"] - tokens["b"]) <= 16_200, "within the largest request"


async def test_K07_who_is_too_late_is_dropped_and_not_first(autojump_clock: object) -> None:
    lab = Lab([Timed()], settings="admission = { max_inflight = 1 }")
    async with lab.open() as cluster, trio.open_nursery() as nursery:

        async def late() -> None:
            with pytest.raises(DeadlineExceeded):
                await cluster.client.complete("late", timeout=0.2, request_id="late")

        nursery.start_soon(cluster.client.complete, "abcdefgh")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(late)
        await trio.testing.wait_all_tasks_blocked()
        assert (await cluster.client.complete("next", request_id="next")).text == "next"
    asked = [rows for _, rows in lab.watched[0].steps]
    assert not any("late" in rows for rows in asked)


async def test_K08_a_high_priority_starts_with_the_next_free_place(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()], settings="admission = { max_inflight = 8 }")
    async with lab.open() as cluster, trio.open_nursery() as nursery:

        async def ask(name: str, priority: int) -> None:
            await cluster.client.complete("abcd", request_id=name, priority=priority)

        for number in range(30):
            nursery.start_soon(ask, f"r{number}", 0)
        await trio.sleep(1.5 * STEP_S)
        nursery.start_soon(ask, "urgent", -1)
    first = next(at for at, rows in lab.watched[0].steps if "urgent" in rows)
    assert first == pytest.approx(5 * STEP_S), "when the first eight have ended"


async def test_K09_three_times_the_capacity_fails_fast_and_keeps_latency(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()], settings="admission = { max_inflight = 10, max_queued = 50 }")
    latencies: list[float] = []
    refused: list[float] = []
    async with lab.open() as cluster:

        async def ask() -> None:
            started = trio.current_time()
            try:
                await cluster.client.complete("abcd")
            except Overloaded as error:
                assert trio.current_time() == started, "at once"
                refused.append(error.retry_after)
            else:
                latencies.append(trio.current_time() - started)

        async with trio.open_nursery() as nursery:
            for _ in range(60 * 60):  # ten requests in half a second are twenty a second
                nursery.start_soon(ask)
                await trio.sleep(1 / 60)
    half = len(latencies) // 2
    assert max(latencies[half:]) <= max(latencies[:half]) + STEP_S
    assert max(latencies) <= 50 / 20 + 10 * STEP_S
    assert len(refused) == pytest.approx(40 * 60, rel=0.1)
    assert all(1 <= each <= 10 for each in refused)
