"""Engines that step together, in one process: they vote in a room, on a virtual clock."""

# ruff: noqa: N802 - tests carry the reports' names

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import define, field

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.echo import EchoModel
from dpkit.engine.publish import PublishGate
from dpkit.engine.waves import Ballot, EngineWaves, Phase, Word
from dpkit.errors import EngineLost, ModelFailed
from dpkit.messages import (
    EngineId,
    EngineOutput,
    EngineStats,
    GenerateRequest,
    SamplingParams,
    StartWave,
    StepResult,
)
from dpkit.names import FinishReason
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.inbox import Inbox
from dpkit.nursery.lockstep import Lockstep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.messages import Batch

STEP_S = 0.1
LIMIT_S = 5.0
INTERVAL = 4
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=64)


class Timed(EchoModel):
    """Each step lasts 100 ms, unless it is to hang; counts the dummy steps of its rank."""

    def __init__(self) -> None:
        self.dummies = 0
        self.steps = 0
        self.step_s = STEP_S
        self.boom: BaseException | None = None

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.steps += 1
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=self.step_s)

    def execute_dummy(self, cache: Any) -> None:  # noqa: ARG002
        self.dummies += 1
        if self.boom is not None:
            raise self.boom


class Room:
    """Where ranks vote: each vote waits for all, or breaks off when one leaves."""

    def __init__(self, count: int) -> None:
        self.votes = 0
        self._count = count
        self._cast: list[Ballot] = []
        self._done = trio.Event()
        self._has_broken = False

    async def vote(self, ballot: Ballot) -> Ballot:
        cast, done = self._cast, self._done
        cast.append(ballot)
        if len(cast) == self._count:
            self.votes += 1
            self._cast, self._done = [], trio.Event()
            done.set()
        with trio.move_on_after(LIMIT_S) as waiting:
            await done.wait()
        if waiting.cancelled_caught:
            raise TimeoutError(f"was not taken within {LIMIT_S:g} s")
        if self._has_broken:
            raise ConnectionError("broke off")
        return Ballot.tally(cast)

    def leave(self) -> None:
        self._has_broken = True
        self._done.set()


@define(eq=False)
class Rank:
    """One engine of the group, and what came of it."""

    loop: BusyLoop
    lockstep: Lockstep
    waves: EngineWaves
    model: Timed
    outputs: list[EngineOutput] = field(factory=list)
    stats: list[EngineStats] = field(factory=list)
    error: Exception | None = None

    def submit(self, name: str, tokens: int, *, wave: int = 0) -> None:
        self.loop.inbox.submit(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
            ),
            self.deliver,
        )
        self.lockstep.note_request(wave)

    def deliver(self, _: EngineId, output: EngineOutput) -> None:
        self.outputs.append(output)

    @property
    def answer(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def ends(self) -> list[tuple[str, FinishReason]]:
        return [
            (output.request_id, output.finish_reason)
            for output in self.outputs
            if output.finish_reason is not None
        ]


@define(eq=False)
class Group:
    """All ranks, and their coordinator, whose words take their time."""

    ranks: list[Rank]
    rules: CoordinatorRules
    room: Room
    scope: trio.CancelScope
    rng: random.Random
    said: list[tuple[int, Word]] = field(factory=list)
    under_way: int = 0

    async def settle(self) -> None:
        """Wait until nobody runs, and nothing is under way."""
        while self.under_way or any(rank.waves.runs for rank in self.ranks):  # noqa: ASYNC110
            await trio.sleep(STEP_S)


@asynccontextmanager
async def open_ranks(count: int = 2, *, seed: int | None = None) -> AsyncIterator[Group]:
    """Run the engines of a group, until the block is left."""
    room, rng = Room(count), random.Random(seed)
    rules = CoordinatorRules(count, now=0.0, wave_coordination=True)
    async with trio.open_nursery() as nursery:
        group = Group([], rules, room, nursery.cancel_scope, rng)
        news, heard = trio.open_memory_channel[tuple[int, Word]](1000)

        async def coordinate() -> None:
            async for rank, word in heard:
                await trio.sleep(rng.random() * STEP_S * (seed is not None))
                group.said.append((rank, word))
                if word.start_wave is not None:
                    told = rules.on_start_wave(0.0, word.start_wave, rank)
                else:
                    assert word.wave_complete is not None
                    told = rules.on_wave_complete(0.0, word.wave_complete)
                for each in told:
                    if isinstance(each, StartWave):
                        for rank_ in group.ranks:
                            nursery.start_soon(call, rank_, each)
                group.under_way -= 1

        async def call(rank: Rank, start: StartWave) -> None:
            group.under_way += 1
            await trio.sleep(rng.random() * STEP_S * (seed is not None))
            rank.lockstep.note_start(start.wave, start.engine_index)
            group.under_way -= 1

        async def live(rank: Rank) -> None:
            try:
                await rank.loop.run()
            except Exception as error:  # noqa: BLE001 - looked at by the test
                rank.error = error
            room.leave()

        def tell(number: int, word: Word) -> None:
            group.under_way += 1
            news.send_nowait((number, word))

        for number in range(count):
            rank = _rank(number, room)
            rank.lockstep.say = lambda word, number=number: tell(number, word)  # type: ignore[misc]
            group.ranks.append(rank)
            nursery.start_soon(live, rank)
        nursery.start_soon(coordinate)
        for rank in group.ranks:
            await rank.loop.ready.wait()
        with news, heard:
            yield group
            nursery.cancel_scope.cancel()


def _rank(number: int, room: Room) -> Rank:
    engine, inbox, model = EngineId(f"e{number}"), Inbox(), Timed()
    waves = EngineWaves(number, speaks=number == 0, sync_interval=INTERVAL)
    lockstep = Lockstep(engine=engine, waves=waves, ballots=room, inbox=inbox)
    stats: list[EngineStats] = []
    loop = BusyLoop(
        engine=engine,
        index=number,
        model=model,
        core=EngineCore(model, limits=LIMITS),
        inbox=inbox,
        publish=stats.append,
        gate=PublishGate(1.0),
        lockstep=lockstep,
    )
    return Rank(loop, lockstep, waves, model, stats=stats)


async def test_an_engine_without_work_does_dummy_steps_while_its_wave_runs(
    autojump_clock: object,
) -> None:
    async with open_ranks(3) as group:
        one, *others = (group.ranks[number] for number in (1, 0, 2))
        one.submit("a", 10)
        await trio.sleep(STEP_S)
        await group.settle()
        assert one.answer == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
        assert [rank.model.dummies for rank in others] == [12, 12]  # to the vote at step 12
        assert (one.model.steps, one.model.dummies) == (10, 2)
        assert group.room.votes == 4
        assert group.said == [(1, Word(start_wave=0)), (0, Word(wave_complete=0))]
        assert not group.rules.statistics().engines_running


async def test_waves_follow_each_other(autojump_clock: object) -> None:
    async with open_ranks() as group:
        for wave in range(3):
            group.ranks[wave % 2].submit(f"r{wave}", 2, wave=wave)
            await trio.sleep(STEP_S)
            await group.settle()
        assert group.said == [
            (0, Word(start_wave=0)),
            (0, Word(wave_complete=0)),
            (1, Word(start_wave=1)),
            (0, Word(wave_complete=1)),
            (0, Word(start_wave=2)),
            (0, Word(wave_complete=2)),
        ]


async def test_counts_are_stamped_with_wave_and_step(autojump_clock: object) -> None:
    async with open_ranks() as group:
        (zero, _) = group.ranks
        for wave in range(2):
            zero.submit(f"r{wave}", 2)
            await trio.sleep(STEP_S)
            await group.settle()
        stamps = [(stats.current_wave, stats.step_counter) for stats in zero.stats]
        assert stamps == [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1)]


async def test_a_vote_that_takes_too_long_ends_the_engine(autojump_clock: object) -> None:
    async with open_ranks() as group:
        zero, one = group.ranks
        one.model.step_s = 100 * LIMIT_S
        zero.submit("a", 50)
        one.submit("b", 50)
        await zero.loop.ended.wait()
        assert isinstance(zero.error, EngineLost)
        assert str(zero.error) == (
            "engine e0 is lost with its group: the vote at step 1 of wave 0 was not taken within "
            f"{LIMIT_S:g} s"
        )
        assert isinstance(zero.error.__cause__, TimeoutError)
        assert zero.ends == [("a", FinishReason.ERROR)]
        assert isinstance(zero.outputs[-1].error, EngineLost)


async def test_an_engine_that_is_lost_takes_its_group_along(autojump_clock: object) -> None:
    async with open_ranks(3) as group:
        zero, *others = group.ranks
        zero.submit("a", 50)
        await trio.sleep(3 * STEP_S)
        others[0].model.boom = ModelFailed("boom")
        for rank in group.ranks:
            await rank.loop.ended.wait()
        assert isinstance(others[0].error, ModelFailed)
        assert isinstance(zero.error, EngineLost)
        assert isinstance(others[1].error, EngineLost)


async def test_engines_that_are_closed_leave_when_their_wave_is_over(
    autojump_clock: object,
) -> None:
    async with open_ranks(3) as group:
        group.ranks[0].submit("a", 10)
        await trio.sleep(STEP_S / 2)
        for rank in group.ranks:
            rank.loop.close()
        for rank in group.ranks:
            await rank.loop.ended.wait()
        assert group.ranks[0].ends == [("a", FinishReason.LENGTH)]
        assert [rank.error for rank in group.ranks] == [None] * 3


async def test_a_closed_engine_whose_group_has_left_already_ends_in_order(
    autojump_clock: object,
) -> None:
    async with open_ranks() as group:
        zero, one = group.ranks
        one.loop.close()
        await one.loop.ended.wait()
        zero.submit("a", 1)
        zero.loop.close()
        await zero.loop.ended.wait()
        assert (zero.error, zero.ends) == (None, [("a", FinishReason.LENGTH)])


async def test_I01_I02_a_first_request_to_any_rank_wakes_all(autojump_clock: object) -> None:
    for number in range(3):
        async with open_ranks(3) as group:
            group.ranks[number].submit("a", 3)
            await trio.sleep(STEP_S)
            await group.settle()
            assert group.ranks[number].answer == [1, 2, 3]


async def test_I03_a_paused_engine_keeps_a_start_for_its_resume(autojump_clock: object) -> None:
    async with open_ranks() as group:
        zero, one = group.ranks
        for rank in group.ranks:
            rank.lockstep.note_pause()
        await trio.sleep(STEP_S)
        await group.settle()
        assert [rank.waves.phase for rank in group.ranks] == [Phase.PAUSED] * 2
        steps = one.model.dummies
        zero.lockstep.note_resume()
        zero.submit("a", 3)
        await trio.sleep(2 * STEP_S)
        assert (one.waves.phase, one.model.dummies) == (Phase.CALLED, steps)
        one.lockstep.note_resume()
        await group.settle()
        assert zero.answer == [1, 2, 3]


async def test_I07_two_resumes_and_a_request_at_once(autojump_clock: object) -> None:
    async with open_ranks() as group:
        for rank in group.ranks:
            rank.lockstep.note_pause()
        await group.settle()
        for rank in group.ranks:
            rank.lockstep.note_resume()
            rank.lockstep.note_resume()
        group.ranks[1].submit("a", 3)
        await trio.sleep(STEP_S)
        await group.settle()
        assert group.ranks[1].answer == [1, 2, 3]


async def test_I08_an_abort_on_one_rank_changes_no_votes_of_the_others(
    autojump_clock: object,
) -> None:
    async with open_ranks(4) as group:
        for number, rank in enumerate(group.ranks):
            rank.submit(f"r{number}", 20)
        await trio.sleep(5 * STEP_S)
        group.ranks[2].loop.inbox.abort("r2", group.ranks[2].deliver)
        await group.settle()
        assert [len(rank.answer) for rank in group.ranks][::3] == [20, 20]
        assert len(group.ranks[2].answer) < 20
        assert {rank.waves.wave for rank in group.ranks} == {1}


async def storm(seed: int) -> None:
    """Requests, aborts, pauses and resumes, at moments of the seed's choice."""
    async with open_ranks(random.Random(seed).choice((2, 3)), seed=seed) as group:
        rng, wanted = group.rng, dict[str, tuple[Rank, int]]()
        for number in range(20):
            await trio.sleep(rng.choice((0, 0, 0.3, 1, 5)) * STEP_S)
            rank, tokens = rng.choice(group.ranks), rng.choice((1, 2, 9))
            order = rng.random()
            if order < 0.7:
                rank.submit(f"r{number}", tokens, wave=group.rules.statistics().current_wave)
                wanted[f"r{number}"] = rank, tokens
            elif wanted and order < 0.8:
                name = rng.choice(sorted(wanted))
                rank, _ = wanted.pop(name)
                rank.loop.inbox.abort(name, rank.deliver)
            else:
                for each in group.ranks:
                    each.lockstep.note_pause()
                await group.settle()
                await trio.sleep(STEP_S)
                await group.settle()
                assert {each.waves.phase for each in group.ranks} == {Phase.PAUSED}
                for each in group.ranks:
                    each.lockstep.note_resume()
                    await trio.sleep(rng.random() * STEP_S)
        await trio.sleep(STEP_S)
        await group.settle()
        for name, (rank, tokens) in wanted.items():
            told = [output for output in rank.outputs if output.request_id == name]
            assert sum(len(output.token_ids) for output in told) == tokens
        assert [rank.error for rank in group.ranks] == [None] * len(group.ranks)
        now = group.rules.statistics()
        assert {rank.waves.wave for rank in group.ranks} == {now.current_wave}
        assert not now.engines_running


@pytest.mark.parametrize("seed", range(40))
async def test_storms_come_to_rest(autojump_clock: object, seed: int) -> None:
    await storm(seed)
