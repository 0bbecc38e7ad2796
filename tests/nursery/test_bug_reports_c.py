"""In-flight accounting drifts (class C of the reports): those about engines that come back."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.errors import EngineLost
from dpkit.messages import EngineId, EngineOutput
from dpkit.names import FinishReason
from dpkit.testing.faults import CRASH
from dpkit.testing.idle import check_idle
from tests.nursery.lab import Lab, Timed, settle

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster


def _inflight(cluster: Cluster) -> list[int]:
    held = cluster.client.statistics().inflight
    return [held.get(each.engine, 0) for each in cluster.statistics().engines]


async def test_C01_after_cancellations_and_a_restart_the_load_is_even(
    autojump_clock: object,
) -> None:
    rng = random.Random(215)
    lab = Lab([Timed()] * 4)
    async with lab.open() as cluster:

        async def ask(number: int) -> None:
            with trio.move_on_after(rng.choice((0, 0.05, 0.1, 2 * rng.random()))):
                await cluster.client.complete("hello", max_tokens=20, ignore_eos=True)
            assert number >= 0

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(ask, number)
                if number % 20 == 0:
                    await trio.sleep(0.05)
        assert _inflight(cluster) == [0, 0, 0, 0]
        lab.faulty[2].inject(CRASH)
        with pytest.raises(EngineLost):
            await cluster.client.complete("hello", engine="e2-0")
        await trio.sleep(2)
        await cluster.client.complete("hello", engine="e2-0")  # the probe
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(40 - sum(_inflight(cluster))):
                nursery.start_soon(
                    lambda: cluster.client.complete("x", max_tokens=90, ignore_eos=True)
                )
            await trio.testing.wait_all_tasks_blocked()
            loads = _inflight(cluster)
            assert max(loads) - min(loads) <= 1
            nursery.cancel_scope.cancel()
        await settle()
        check_idle(cluster)


@pytest.mark.parametrize("report", ["C04", "C05"])
async def test_C04_C05_a_late_end_counts_for_the_life_that_was_charged(
    autojump_clock: object, report: str
) -> None:
    """Five requests of a first life are told late that they ended; the second one has three."""
    lab = Lab([Timed()], settings="admission = { retries = 0 }")
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        client = cluster.client
        first = [client.generate("hello", request_id=f"r{number}") for number in range(5)]
        for stream in first:
            await stream.__aenter__()
        lab.faulty[0].inject(CRASH)
        await trio.sleep(1.5)
        assert client.statistics().inflight == {}
        await client.complete("x")  # the probe
        for _ in range(3):
            nursery.start_soon(client.complete, "abcdefgh")
        await trio.testing.wait_all_tasks_blocked()
        for stream in first:
            late = EngineOutput(
                request_id=stream.request_id, token_ids=(1,), finish_reason=FinishReason.LENGTH
            )
            cluster._flights[0].deliver(EngineId("e0-0"), late)
            stream.close()
            assert client.statistics().inflight == {EngineId("e0-0", 1): 3}
        assert client.statistics().late_outputs == 5
        assert client.audit() == ()
