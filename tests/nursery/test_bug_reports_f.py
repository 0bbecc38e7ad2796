"""Shutdown, drain, orphans (class F of the reports): those that need one process and no signal."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from dpkit.errors import ClusterClosed, ClusterNotStarted
from dpkit.names import Cause
from dpkit.testing.faults import CRASH, HANG
from dpkit.testing.idle import check_idle
from tests.nursery.lab import STEP_S, Lab, Timed


async def test_F03_open_streams_are_told_of_a_shutdown_within_the_grace(
    autojump_clock: object,
) -> None:
    lab = Lab()
    ends: list[float] = []
    async with trio.open_nursery() as readers:

        async def read(stream_id: int) -> None:
            stream = cluster.client.generate("abcdefghijkl", request_id=f"r{stream_id}")
            with pytest.raises(ClusterClosed):
                async with stream:
                    await stream.read_all()
            assert stream.text == "ab"
            ends.append(trio.current_time())

        async with lab.open() as cluster:
            for number in range(20):
                readers.start_soon(read, number)
            await trio.sleep(2.5 * STEP_S)
    assert ends == [pytest.approx(2.5 * STEP_S)] * 20
    assert cluster.client.statistics().causes == {Cause.SHUTDOWN: 20}
    check_idle(cluster)


async def test_F04_scaling_down_loses_no_answer(autojump_clock: object) -> None:
    lab = Lab([Timed()])
    async with lab.open() as cluster:
        await cluster.scale("e0", 2)
        texts = []

        async def ask(number: int) -> None:
            completion = await cluster.client.complete(f"{number}bcdef", engine="e0-1")
            texts.append(completion.text)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, number)
            await trio.sleep(2.5 * STEP_S)
            await cluster.scale("e0", 1)
        assert sorted(texts) == [f"{number}bcdef" for number in range(10)]
        assert [each.engine.name for each in cluster.statistics().engines] == ["e0-0"]
        check_idle(cluster)


async def test_F05_an_engine_that_drains_is_picked_no_more(autojump_clock: object) -> None:
    lab = Lab([Timed()])
    async with lab.open() as cluster:
        await cluster.scale("e0", 2)
        async with (
            trio.open_nursery() as nursery,
            cluster.client.generate("abcdefgh", engine="e0-1") as stream,
        ):
            await stream.__anext__()
            nursery.start_soon(cluster.scale, "e0", 1)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(4):
                assert (await cluster.client.complete("a")).engine.name == "e0-0"
            assert (await stream.read_all()).text == "abcdefgh"
        check_idle(cluster)


async def test_F09_a_start_that_fails_half_way_leaves_nothing(autojump_clock: object) -> None:
    lab = Lab([Timed()] * 4, settings="cluster = { min_ready = 4 }", supervision="intensity = 0")
    lab.faulty[2].births = {0: CRASH}
    before = trio.lowlevel.current_statistics().tasks_living
    with pytest.raises(ClusterNotStarted, match="e2-0"):
        async with lab.open():
            pytest.fail("the body began")
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_F10_embedding_touches_no_signal_handler(autojump_clock: object) -> None:
    before = {each: signal.getsignal(each) for each in signal.valid_signals()}
    async with Lab().open() as cluster:
        await cluster.client.complete("hello")
        assert {each: signal.getsignal(each) for each in signal.valid_signals()} == before
    assert {each: signal.getsignal(each) for each in signal.valid_signals()} == before


async def test_F11_an_open_stream_to_a_hung_engine_does_not_hold_the_end_up(
    autojump_clock: object,
) -> None:
    lab = Lab(settings='cluster = { grace = "4s", kill_after = "1s" }')
    lab.faulty[0].plan = {1: HANG}
    async with lab.open() as cluster:
        stream = cluster.client.generate("hello", engine="e0-0")
        await stream.__aenter__()
        await trio.sleep(1)
    assert trio.current_time() <= 5
    with pytest.raises(ClusterClosed):
        await stream.read_all()
    check_idle(cluster)
