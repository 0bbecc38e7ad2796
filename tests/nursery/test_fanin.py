"""Producers never wait; the coordinator learns the present, or whole steps in their order."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing
from attrs import evolve

from dpkit.messages import EngineId, EngineStats
from dpkit.nursery.fanin import FanInStatistics, StatsFanIn


def _stats(name: str = "e0", seq: int = 1, epoch: int = 0, **fields: Any) -> EngineStats:
    stats = EngineStats(
        engine=EngineId(name, epoch), index=0, seq=seq, waiting=0, running=0, kv_cache_usage=0.0
    )
    return evolve(stats, **fields)


def test_the_newest_of_each_engine_wins() -> None:
    fanin = StatsFanIn()
    for stats in (_stats("e0", 1), _stats("e1", 1), _stats("e0", 2), _stats("e0", 3)):
        fanin.publish(stats)
    assert fanin.receive_nowait() == (_stats("e0", 3), _stats("e1", 1))
    assert fanin.receive_nowait() == ()
    assert fanin.statistics() == FanInStatistics(received=4, overwritten=2, stale=0)


def test_older_and_repeated_messages_are_ignored_and_counted() -> None:
    fanin = StatsFanIn()
    for seq in (5, 5, 4):
        fanin.publish(_stats(seq=seq))
    assert fanin.receive_nowait() == (_stats(seq=5),)
    fanin.publish(_stats(seq=5))
    assert fanin.receive_nowait() == (), "also when the newest was received already"
    assert fanin.statistics().stale == 3


def test_a_new_life_begins_its_numbers_anew_and_the_old_one_is_not_heard_again() -> None:
    fanin = StatsFanIn()
    fanin.publish(_stats(seq=90))
    fanin.publish(_stats(seq=1, epoch=1))
    fanin.publish(_stats(seq=91))
    assert fanin.receive_nowait() == (_stats(seq=1, epoch=1),)
    assert fanin.statistics().ended_lives == 1
    assert fanin.statistics().stale == 0


def test_ordered_messages_stay_in_arrival_order_one_per_engine_and_step() -> None:
    fanin = StatsFanIn(ordered=True)
    arrived = [
        _stats("e0", 1, step_counter=1),
        _stats("e1", 1, step_counter=1),
        _stats("e0", 2, step_counter=2),
        _stats("e1", 2, step_counter=1, running=7),
        _stats("e1", 3, current_wave=1),
    ]
    for stats in arrived:
        fanin.publish(stats)
    assert fanin.receive_nowait() == (arrived[0], arrived[3], arrived[2], arrived[4])


async def test_the_receiver_wakes_at_the_first_message(autojump_clock: object) -> None:
    fanin = StatsFanIn()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def receive() -> None:
            await fanin.wait_pending()
            assert trio.current_time() == 2
            assert len(fanin.receive_nowait()) == 1

        await trio.sleep(2)
        fanin.publish(_stats())


async def test_a_cancelled_receiver_loses_nothing() -> None:
    fanin = StatsFanIn()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fanin.wait_pending)
        await trio.testing.wait_all_tasks_blocked()
        fanin.publish(_stats())  # wakes it
        nursery.cancel_scope.cancel()  # in the same tick
    with trio.testing.assert_checkpoints():
        await fanin.wait_pending()
    assert fanin.receive_nowait() == (_stats(),)
