"""A step of many sequences: others get turns while its outputs are handed out, and nothing breaks.

The clock is virtual; a sink that takes a millisecond turns it forward by as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.errors import EngineLost
from dpkit.names import Cause
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.handout import PIECE, TURN_S
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from dpkit.config.schema import Config
    from dpkit.messages import EngineOutput
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.submission import Submission

MANY = 200
SINK_S = 0.001
A_PIECE_S = TURN_S + PIECE * SINK_S
"""The longest that others wait."""


def config(**engine: int) -> Config:
    """One engine that has room for all of them at once."""
    scheduler = f"{{max_num_seqs = {MANY}, max_num_batched_tokens = {MANY * 4}}}"
    kv = "{num_blocks = 1000}"
    text = f"[[engines]]\nname = 'e'\nmodel = 'echo'\nscheduler = {scheduler}\nkv = {kv}\n"
    return parse_config(f"{text}count = {engine.get('count', 1)}\n")


class Slow:
    """Sinks that take their time, for one request of MANY."""

    def __init__(self, clock: MockClock, cluster: Cluster, tokens: int = 3) -> None:
        self.got: dict[str, list[EngineOutput]] = {}
        self.on_output: Callable[[str], None] = lambda _: None
        self._clock = clock
        self.submissions: dict[str, Submission] = {}
        for number in range(MANY):
            name = f"r{number}"
            self.got[name] = []
            self.submissions[name] = cluster.client.submit(
                "abc", sink=self.sink, request_id=name, max_tokens=tokens, ignore_eos=True
            )

    def sink(self, output: EngineOutput) -> None:
        self.got[output.request_id].append(output)
        self._clock.jump(SINK_S)
        self.on_output(output.request_id)

    @property
    def ended(self) -> int:
        """How many have had their last word."""
        return sum(bool(got) and got[-1].finish_reason is not None for got in self.got.values())

    async def wait(self) -> None:
        """Wait until all have ended that were not closed."""
        while self.ended < MANY:  # noqa: ASYNC110 - the clock jumps with each of their sinks
            await trio.sleep(0.01)


async def test_others_never_wait_longer_than_a_piece_takes(autojump_clock: MockClock) -> None:
    async with open_cluster(config()) as cluster, trio.open_nursery() as nursery:
        slow, waits = Slow(autojump_clock, cluster), list[float]()

        async def look() -> None:
            while True:
                since = trio.current_time()
                await trio.lowlevel.checkpoint()
                waits.append(trio.current_time() - since)
                assert not cluster.audit()

        nursery.start_soon(look)
        while slow.ended < MANY:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert max(waits) <= 2 * A_PIECE_S  # of two turns, as tasks of a batch are shuffled
    assert sum(wait > 0 for wait in waits) >= 3 * MANY / (2 * PIECE)
    for got in slow.got.values():
        assert sum(len(output.token_ids) for output in got) == 3


async def test_whoever_leaves_amid_a_step_gets_no_more_of_it(autojump_clock: MockClock) -> None:
    async with open_cluster(config()) as cluster:
        slow = Slow(autojump_clock, cluster, tokens=1000)
        left = dict[str, int]()

        def leave_all(_: str) -> None:
            """In the midst of the fifth step, from a sink, which others cannot tell from a task."""
            if len(slow.got["r0"]) == 5 and not left:
                for name, submission in slow.submissions.items():
                    left[name] = len(slow.got[name])
                    submission.close()

        slow.on_output = leave_all
        await trio.sleep(5)
        assert {name: len(got) for name, got in slow.got.items()} == left
        check_idle(cluster)
        assert cluster.client.statistics().causes == {Cause.CLIENT: MANY}


@pytest.mark.parametrize("tokens", [2, 1000])
async def test_a_task_that_leaves_between_two_pieces_is_told_nothing_more(
    tokens: int, autojump_clock: MockClock
) -> None:
    """Of a last step too, in which the engine has freed all of them."""
    async with open_cluster(config()) as cluster:
        slow = Slow(autojump_clock, cluster, tokens=tokens)
        while not any(len(got) == 2 for got in slow.got.values()):
            await trio.lowlevel.checkpoint()
        left = [name for name, got in slow.got.items() if len(got) < 2]
        assert left
        for name in left:
            slow.submissions[name].close()
            assert not cluster.audit()
        await trio.lowlevel.checkpoint()
        assert not cluster.audit()
        again = [
            cluster.client.submit("a", sink=lambda _: None, request_id=name, max_tokens=1)
            for name in left
        ]
        for submission in slow.submissions.values():
            submission.close()
        await trio.sleep(5)
        assert all(len(slow.got[name]) == 1 for name in left)
        assert all(submission.finish_reason is not None for submission in again)
        check_idle(cluster)


async def test_an_engine_that_is_lost_amid_a_step_tells_each_request_once(
    autojump_clock: MockClock,
) -> None:
    async with open_cluster(config(count=2)) as cluster:
        slow = Slow(autojump_clock, cluster, tokens=2)
        while not slow.ended:
            await trio.lowlevel.checkpoint()
        [slot] = [slot for slot in cluster._slots if slot.name == "e-0"]
        before = {name: len(got) for name, got in slow.got.items()}
        slot.life.lose(EngineLost("as a test says", engine=slot.engine))
        assert not cluster.audit()
        await slow.wait()
        lost = [got[-1].error for got in slow.got.values() if got[-1].error is not None]
        assert lost
        assert all(isinstance(error, EngineLost) for error in lost)
        assert all(len(got) <= before[name] + 2 for name, got in slow.got.items())
        await trio.sleep(10)
        check_idle(cluster)


async def test_a_cluster_that_ends_amid_a_step_tells_each_request_once(
    autojump_clock: MockClock,
) -> None:
    async with open_cluster(config()) as cluster:
        slow = Slow(autojump_clock, cluster, tokens=2)
        while not slow.ended:
            await trio.lowlevel.checkpoint()
    assert slow.ended == MANY
    last = [got[-1].finish_reason for got in slow.got.values()]
    assert len({str(reason) for reason in last}) == 2


async def test_a_few_outputs_cost_no_turn(autojump_clock: MockClock) -> None:
    async with open_cluster(config()) as cluster:
        times = list[float]()

        def sink(_: EngineOutput) -> None:
            autojump_clock.jump(1)
            times.append(trio.current_time())

        for _ in range(PIECE):
            cluster.client.submit("a", sink=sink, max_tokens=1)
        turns = 0
        while len(times) < PIECE:
            await trio.lowlevel.checkpoint()
            turns += bool(times)
        assert turns == 1
