"""What engines tell of their work reaches each client's view and policy, with its own counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import dpkit
from dpkit.abc import Policy
from dpkit.messages import EngineId, StepReport, StepWork

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.abc import LoadView
    from dpkit.messages import GenerateRequest

# A step takes 6.6 ms and a little more per token.
CONFIG = """
    [balancer]
    policy = "tests.nursery.test_step_reports:Hearing"
    [[engines]]
    model = "cost:h100-8b"
    count = {count}
    kv.block_size = 16
    kv.num_blocks = 100
    scheduler.max_num_seqs = 8
    scheduler.max_num_batched_tokens = 40
"""

heard: list[tuple[int, int, StepReport]] = []
"""Client, engine, and what it told, in the order in which it came."""


class Hearing(Policy):
    """Takes the first engine, and notes what it is told."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - none is
        return 0

    def on_report(self, index: int, view: LoadView) -> None:
        report = view.load(index).report
        assert report is not None
        assert index in view.changes
        heard.append((view.client_index, index, report))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    heard.clear()
    yield
    heard.clear()


def last(client: int = 0) -> StepReport:
    """What a client was told last."""
    return [report for index, _, report in heard if index == client][-1]


async def test_a_report_tells_what_is_to_be_done_and_what_the_step_was(autojump_clock) -> None:
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG.format(count=1))) as cluster:
        assert not heard, "an engine that has nothing to do says nothing"
        async with cluster.client.generate([7] * 64, max_tokens=3) as stream:
            await wait_all_tasks_blocked()
            assert last() == StepReport(
                unprefilled_tokens=64,
                scheduled_tokens=40,
                requests=1,
                kv_tokens_used=64,
                kv_tokens=1600,
                sent=1,
                acknowledged=1,
            )
            await trio.sleep(0.007)
            first, second = (report for _, _, report in heard[1:])
            assert first.step_time_s == second.step_time_s > 0.0066
            assert first.last_step == StepWork(prefill_tokens=40, prefill_context=40 * 20)
            assert (first.unprefilled_tokens, first.scheduled_tokens) == (24, 0), "between steps"
            assert (second.unprefilled_tokens, second.scheduled_tokens) == (24, 24)
            assert (second.context_tokens, second.generated_tokens) == (40, 0)
            async for _ in stream:
                pass
        done = last()
        assert done.last_step == StepWork(decodes=1, decode_context=66)
        assert (done.steps, done.requests, done.context_tokens) == (4, 0, 0)
        assert (done.generated_tokens, done.kv_tokens_used) == (0, 0)
        assert len(heard) == 2 * 2 + 2, "two a step that prefills, one a step that decodes"


async def test_blocks_that_requests_share_are_counted_once(autojump_clock) -> None:
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG.format(count=1))) as cluster:
        prompt = [7] * 33
        async with cluster.client.generate(prompt, max_tokens=50) as first:
            async for _ in first:
                break
            assert last().kv_tokens_used == 3 * 16
            async with cluster.client.generate(prompt, max_tokens=50):
                await trio.sleep(0.02)
                assert last().kv_tokens_used == 4 * 16
                assert last().context_tokens > 2 * 33
                assert last().requests == 2
        await trio.sleep(0.02)
        assert last().kv_tokens_used == 0, "cached, and held by nobody"


async def test_each_client_hears_how_many_of_its_own_requests_are_known(autojump_clock) -> None:
    config = dpkit.parse_config(CONFIG.format(count=1))
    async with dpkit.open_cluster(config, clients=2) as cluster:
        mine, theirs = cluster.clients
        async with mine.generate("abc", max_tokens=50):
            await wait_all_tasks_blocked()
            assert (last(0).sent, last(0).acknowledged) == (1, 1)
            assert (last(1).sent, last(1).acknowledged) == (0, 0)
            async with theirs.generate("def", max_tokens=50), theirs.generate("ghi"):
                heard.clear()
                await trio.sleep(0.007)
                ended, begun = (report for index, _, report in heard if index == 1)
                assert (ended.sent, ended.acknowledged, ended.requests) == (2, 0, 1)
                assert (begun.sent, begun.acknowledged, begun.requests) == (2, 2, 3)


async def test_an_abort_before_the_engine_looked_is_reckoned_with(autojump_clock) -> None:
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG.format(count=1))) as cluster:
        async with cluster.client.generate("abc", max_tokens=5):
            pass
        async with cluster.client.generate("abc", max_tokens=5):
            await wait_all_tasks_blocked()
            assert (last().sent, last().acknowledged, last().requests) == (2, 2, 1)


async def test_a_new_life_has_told_nothing_and_counts_anew(autojump_clock) -> None:
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG.format(count=2))) as cluster:
        async with cluster.client.generate("abc", max_tokens=5) as stream:
            await wait_all_tasks_blocked()
            cluster._slots[0].life.lose(RuntimeError("out"))
            await stream.read_all()
        assert {index for _, index, _ in heard} == {0}, "that of engine-1 has moved to the front"
        await trio.sleep(5)
        heard.clear()
        async with cluster.client.generate("abc", max_tokens=5, engine="engine-0") as stream:
            await stream.read_all()
            assert stream.engine == EngineId("engine-0", 1)
        assert (last().sent, last().acknowledged) == (1, 1)
