"""A client takes back what its engine does not run: all of it that was asked for, or not at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import dpkit
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.nursery.wirelife import WireLife
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.messages import Batch, EngineId, EngineOutput, StepResult

CONFIG = """
    [[engines]]
    model = "{model}"
    kind = "{kind}"
    scheduler.max_num_seqs = 1
"""


class Slow(EchoModel):
    """Takes its time for a step, so that one is under way."""

    inline = False

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        time.sleep(0.3)
        return super().execute(batch, cache)


class Asker:
    """A client that is nothing but its link."""

    def __init__(self, cluster: dpkit.Cluster) -> None:
        [slot] = cluster._slots
        self.outputs: list[tuple[str, bool]] = []
        self.taken: list[list[str]] = []
        self.link = slot.life.link(self._deliver)
        self._news = trio.lowlevel.ParkingLot()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, which only news can change."""
        while not holds():
            await self._news.park()

    def _deliver(self, _: EngineId, output: EngineOutput) -> None:
        self.outputs.append((output.request_id, output.finish_reason is not None))
        self._news.unpark_all()

    def ask(self, *request_ids: str, tokens: int = 3) -> None:
        for request_id in request_ids:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            self.link.submit(
                GenerateRequest(
                    request_id=request_id, prompt_token_ids=(1, 2, 3), sampling=sampling
                )
            )

    def take_back(self, *request_ids: str) -> None:
        self.link.take_back(request_ids, self._on_taken)

    def _on_taken(self, _: EngineId, taken: Sequence[str]) -> None:
        self.taken.append(list(taken))
        self._news.unpark_all()

    def ended(self) -> list[str]:
        return [name for name, is_last in self.outputs if is_last]


def config(model: str = "cost:h100-8b", kind: str = "local") -> dpkit.Config:
    return dpkit.parse_config(CONFIG.format(model=model, kind=kind))


async def test_a_local_engine_answers_at_once(autojump_clock: object) -> None:
    async with dpkit.open_cluster(config()) as cluster:
        mine, theirs = Asker(cluster), Asker(cluster)
        mine.ask("a", "b", "c")
        theirs.ask("d")
        mine.take_back("b")
        assert mine.taken == [["b"]], "the engine has not looked yet"
        await wait_all_tasks_blocked()  # a step is under way
        mine.ask("e", "f")
        mine.take_back("a", "c", "d", "e", "nobody")
        assert mine.taken[1:] == [["c", "e"]], "what runs stays, and what is another's"
        mine.take_back("c")
        assert mine.taken[2:] == [[]]
        await trio.sleep(1)
        assert mine.ended() == ["a", "f"]
        assert theirs.ended() == ["d"]
        mine.ask("b")
        await trio.sleep(1)
        assert mine.ended() == ["a", "f", "b"], "its id is free again"


async def test_books_agree_in_the_middle_of_a_step(autojump_clock: object) -> None:
    async with dpkit.open_cluster(config()) as cluster:
        asker = Asker(cluster)
        asker.ask("a", "b", "c")
        await wait_all_tasks_blocked()
        asker.take_back("b", "c")
        [slot] = cluster._slots
        assert list(slot.life.audit({"a"})) == []
        await trio.sleep(1)
        assert list(slot.life.audit(set())) == []


async def test_what_is_aborted_already_is_not_taken(autojump_clock: object) -> None:
    async with dpkit.open_cluster(config()) as cluster:
        asker = Asker(cluster)
        asker.ask("a", "b")
        await wait_all_tasks_blocked()
        asker.link.abort("b")
        asker.take_back("b")
        assert asker.taken == [[]]


async def test_an_engine_in_a_process_answers_by_the_wire() -> None:
    with trio.fail_after(60):
        slow = config("tests.nursery.test_take_back:Slow", "process")
        async with dpkit.open_cluster(slow) as cluster:
            asker = Asker(cluster)
            asker.ask("a", "b", "c", tokens=5)
            await until(lambda: cluster.statistics().engines[0].core.waiting == 2)
            await asker.until(lambda: len(asker.outputs) >= 2)  # what came in a step is drained
            asker.take_back("a", "b", "c", "nobody")
            await asker.until(lambda: bool(asker.taken))
            assert asker.taken == [["b", "c"]]
            await asker.until(lambda: asker.ended() == ["a"])
            [slot] = cluster._slots
            assert list(slot.life.audit(set())) == []
            asker.ask("b", tokens=1)
            await asker.until(lambda: asker.ended() == ["a", "b"])
            assert [name for name, _ in asker.outputs] == [*"aaaaa", "b"], "no output was lost"
            [engine] = cluster.statistics().engines
            assert (engine.core.requests_aborted, engine.core.requests_taken_back) == (0, 2)
            assert engine.totals.requests == 2, "what it gave back it did not do"


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_who_asks_twice_for_one_gets_it_once(kind: str) -> None:
    with trio.fail_after(60):
        async with dpkit.open_cluster(config("tests.nursery.test_take_back:Slow", kind)) as cluster:
            asker = Asker(cluster)
            asker.ask("a", "b", "c", tokens=4)
            await until(lambda: cluster.statistics().engines[0].core.waiting == 2)
            asker.ask("d", tokens=1)
            asker.take_back("d", "b", "b", "d", "c")
            await asker.until(lambda: bool(asker.taken))
            assert asker.taken == [["d", "b", "c"]]
            await asker.until(lambda: asker.ended() == ["a"])
            [slot] = cluster._slots
            assert list(slot.life.audit(set())) == []


async def test_who_leaves_while_its_engine_gives_it_up_is_forgotten() -> None:
    with trio.fail_after(60):
        slow = config("tests.nursery.test_take_back:Slow", "process")
        async with dpkit.open_cluster(slow) as cluster:
            asker = Asker(cluster)
            asker.ask("a", "b", tokens=2)
            await asker.until(lambda: bool(asker.outputs))
            asker.take_back("b")
            asker.link.abort("b")
            await asker.until(lambda: bool(asker.taken))
            assert asker.taken == [[]]
            await asker.until(lambda: asker.ended() == ["a"])
            [slot] = cluster._slots
            assert isinstance(slot.life, WireLife)
            assert slot.life._connection is not None
            assert slot.life._connection.is_idle
