"""A bad line is as bad as it was told to be, and the same each time."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import trio

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle
from dpkit.testing.links import Line, LineFaults, put_stats_on

if TYPE_CHECKING:
    import pytest

COUNT = 200


async def carried(faults: LineFaults, *, seed: int = 1) -> list[tuple[int, float]]:
    """What came out of the numbers sent all at once, and when."""
    arrived: list[tuple[int, float]] = []
    line = Line(random.Random(seed), faults)
    start = trio.current_time()

    def arrive(number: int) -> None:
        arrived.append((number, round(trio.current_time() - start, 6)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        for number in range(COUNT):
            line.send(partial(arrive, number))
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    return arrived


async def test_a_good_line_delivers_at_once_and_in_order() -> None:
    line, arrived = Line(random.Random(1)), list[int]()
    for number in range(3):
        line.send(partial(arrived.append, number))
    assert arrived == [0, 1, 2]


async def test_messages_are_lost(autojump_clock: object) -> None:
    arrived = await carried(LineFaults(loss=0.5))
    assert 0.3 * COUNT < len(arrived) < 0.7 * COUNT


async def test_all_may_be_lost(autojump_clock: object) -> None:
    assert await carried(LineFaults(loss=1.0)) == []


async def test_messages_are_doubled(autojump_clock: object) -> None:
    numbers = [number for number, _ in await carried(LineFaults(duplicate=0.5))]
    assert set(numbers) == set(range(COUNT))
    assert 1.3 * COUNT < len(numbers) < 1.7 * COUNT


async def test_late_messages_keep_their_order_unless_told_otherwise(
    autojump_clock: object,
) -> None:
    late = await carried(LineFaults(delay=2.0))
    assert [number for number, _ in late] == list(range(COUNT))
    assert 0 < late[0][1] <= late[-1][1] <= 2.0
    mixed = [number for number, _ in await carried(LineFaults(delay=2.0, reorder=True))]
    assert mixed != sorted(mixed) == list(range(COUNT))


async def test_the_same_seed_is_the_same_line(autojump_clock: object) -> None:
    faults = LineFaults(loss=0.2, duplicate=0.2, delay=1.0, reorder=True)
    assert await carried(faults) == await carried(faults) != await carried(faults, seed=2)


async def test_a_stalled_line_keeps_everything_back(autojump_clock: object) -> None:
    line, arrived = Line(random.Random(1)), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        line.stall()
        for number in range(3):
            line.send(partial(arrived.append, number))
        await trio.sleep(100)
        assert arrived == []
        line.resume()
        await trio.sleep(1)
        assert arrived == [0, 1, 2]
        nursery.cancel_scope.cancel()


async def test_a_cluster_does_without_its_stats(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_config('[[engines]]\nmodel = "cost:h100-32b"\ncount = 2\n')
    line = Line(random.Random(1), LineFaults(loss=0.3, duplicate=0.5, delay=0.5, reorder=True))
    async with open_cluster(config) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        put_stats_on(cluster, line)
        async with trio.open_nursery() as requests:
            for _ in range(20):
                requests.start_soon(lambda: cluster.client.complete("abc", max_tokens=20))
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert line.lost
    assert line.doubled
    assert cluster.statistics().fanin.stale
    check_idle(cluster, bad_stats=True)
    assert not caplog.records
