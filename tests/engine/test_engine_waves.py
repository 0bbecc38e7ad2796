"""Waves: the table row by row, vLLM's order of messages, and what remains true in any order."""

# ruff: noqa: N802 - tests carry the reports' names

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import pytest

from dpkit.engine import waves as under_test
from dpkit.engine.waves import AHEAD, TABLE, Act, Ballot, EngineWaves, Event, Phase, Word
from dpkit.errors import InternalError
from tests.engine.waves_world import World, Wrong

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL = 16


def make(rank: int = 0, *, interval: int = INTERVAL) -> EngineWaves:
    return EngineWaves(rank, speaks=rank == 0, sync_interval=interval)


def step_together(ranks: list[EngineWaves], work: list[bool]) -> list[list[Word]] | None:
    """One step of all ranks; what each says after the vote, if there was one."""
    due = {rank.step() for rank in ranks}
    assert len(due) == 1
    if due == {False}:
        return None
    tally = Ballot.tally(rank.ballot(has) for rank, has in zip(ranks, work, strict=True))
    return [rank.count(tally) for rank in ranks]


# -- The table -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_what_is_not_in_the_table_is_refused_and_changes_nothing(
    phase: Phase, event: Event
) -> None:
    waves = make()
    waves.phase = phase
    if (phase, event) in TABLE:
        after, acts = TABLE[phase, event]
        said = waves._on(event)
        assert waves.phase is after
        assert len(said) == len(acts)
        assert waves.wave == (Act.COMPLETE in acts)
    else:
        with pytest.raises(InternalError, match=f"cannot have {event.name}"):
            waves._on(event)
        assert (waves.phase, waves.wave, waves.step_counter) == (phase, 0, 0)


def test_only_a_wave_that_runs_can_be_voted_on() -> None:
    votes = {Event.WORK_LEFT, Event.ALL_DONE, Event.ALL_PAUSE}
    voting = {phase for phase, event in TABLE if event in votes}
    assert voting == {phase for phase in Phase if _in(phase).runs}


def _in(phase: Phase) -> EngineWaves:
    waves = make()
    waves.phase = phase
    return waves


# -- vLLM's order of messages ----------------------------------------------------------------------


def test_a_wave_from_its_first_request_to_its_end() -> None:
    zero, one = ranks = [make(0), make(1)]
    zero.note_request(0)
    assert zero.look(has_work=True) == [Word(start_wave=0)]
    zero.note_start(0, 0)
    one.note_start(0, 0)
    assert zero.look(has_work=True) == one.look(has_work=False) == []
    assert zero.runs
    assert one.runs
    assert step_together(ranks, [True, False]) == [[], []]
    for _ in range(INTERVAL - 2):
        assert step_together(ranks, [False, False]) is None
    assert step_together(ranks, [False, False]) == [[Word(wave_complete=0)], []]
    assert [(rank.wave, rank.step_counter, rank.runs) for rank in ranks] == [(1, 0, False)] * 2
    assert one.look(has_work=True) == [Word(start_wave=1)]


def test_votes_are_at_step_one_and_at_each_sixteenth() -> None:
    waves = make()
    assert [step for step in range(1, 50) if waves.step()] == [1, 16, 32, 48]


def test_a_newer_wave_of_a_client_is_taken_over_and_an_older_one_is_not() -> None:
    waves = make(1)
    waves.note_request(7)
    assert waves.look(has_work=True) == [Word(start_wave=7)]
    waves.note_request(3)
    assert waves.look(has_work=True) == []
    assert waves.wave == 7


def test_a_request_that_was_aborted_before_it_was_seen_moves_no_wave() -> None:
    waves = make()
    waves.note_request(7)
    assert waves.look(has_work=False) == []
    waves.note_start(0, 1)
    waves.look(has_work=False)
    assert waves.runs


@pytest.mark.parametrize(("wave", "excluded"), [(0, 1), (1, 1), (5, 0)])
def test_a_stale_start_is_ignored_and_so_is_ones_own(wave: int, excluded: int) -> None:
    waves = make()
    waves.wave = 2 if excluded else 5
    waves.note_start(wave, excluded)
    assert waves.look(has_work=False) == []
    assert not waves.runs


@pytest.mark.parametrize("wave", [7 + AHEAD, 2**62, 2**63, 2**64 - 1])
def test_a_wave_that_no_group_could_come_to_is_not_believed(wave: int) -> None:
    """A vote could not even carry some of them."""
    waves = make()
    waves.wave = 7
    waves.note_start(wave, 1)
    assert waves.look(has_work=False) == []
    assert waves.phase is Phase.ASLEEP
    waves.note_request(wave)
    assert waves.look(has_work=True) == [Word(start_wave=7)]


def test_a_start_that_excludes_nobody_calls_all() -> None:
    waves = make()
    waves.note_start(0, None)
    waves.look(has_work=False)
    assert waves.runs


def test_what_comes_during_a_vote_is_taken_in_after_it() -> None:
    waves = make(1)
    waves.note_start(0, 0)
    waves.look(has_work=False)
    waves.step()
    ballot = waves.ballot(has_work=False)
    waves.note_start(1, 0)  # rank 0 has heard the result, and had a request, already
    assert waves.count(ballot) == []
    assert waves.phase is Phase.ASLEEP
    waves.look(has_work=False)
    assert (waves.runs, waves.wave) == (True, 1)


def test_ranks_that_vote_at_different_steps_are_found_out() -> None:
    zero, one = make(0), make(1)
    for waves in (zero, one):
        waves.note_start(0, None)
        waves.look(has_work=False)
        waves.step()
    one.step()
    with pytest.raises(InternalError, match="different steps of wave 0, from 1 to 2; rank 0 at 1"):
        zero.count(Ballot.tally([zero.ballot(has_work=True), one.ballot(has_work=True)]))


def test_a_coordinator_that_knows_nothing_is_told_where_the_waves_are() -> None:
    zero, one = make(0), make(1)
    assert zero.report() == one.report() == []
    one.wave = zero.wave = 3
    assert (zero.report(), one.report()) == ([Word(wave_complete=2)], [])
    one.look(has_work=True)
    assert one.report() == [Word(start_wave=3)]


def test_repr_tells_the_state_and_a_word_itself() -> None:
    waves = make(2)
    assert repr(waves) == "<EngineWaves of rank 2: wave 0, step 0, no wave runs>"
    assert str(Word(start_wave=3)) == "start_wave 3"
    assert str(Word(wave_complete=2)) == "wave_complete 2"


# -- Pauses ----------------------------------------------------------------------------------------


def test_a_pause_needs_all_ranks() -> None:
    zero, one = ranks = [make(0, interval=1), make(1, interval=1)]
    zero.note_pause()
    assert zero.look(has_work=False) == [Word(start_wave=0)]
    one.note_start(0, 0)
    one.look(has_work=False)
    assert step_together(ranks, [False, False]) == [[Word(wave_complete=0)], []]
    assert zero.phase is Phase.WISHING
    one.note_pause()
    assert one.look(has_work=False) == [Word(start_wave=1)]
    zero.note_start(1, 1)
    zero.look(has_work=False)
    assert step_together(ranks, [False, False]) == [[Word(wave_complete=1)], []]
    assert zero.is_paused
    assert one.is_paused


def test_requests_that_came_before_the_pause_are_finished_first() -> None:
    ranks = [make(0, interval=1), make(1, interval=1)]
    for rank in ranks:
        rank.note_pause()
        rank.look(has_work=rank is ranks[1])
    assert step_together(ranks, [False, True]) == [[], []]
    step_together(ranks, [False, False])
    assert all(rank.is_paused for rank in ranks)


def test_I03_a_paused_engine_does_not_step_and_keeps_the_start_for_its_resume() -> None:
    waves = make(1, interval=1)
    waves.note_pause()
    waves.look(has_work=False)
    waves.step()
    waves.count(waves.ballot(has_work=False))
    waves.note_start(1, 0)
    waves.look(has_work=False)
    assert waves.phase is Phase.CALLED
    waves.note_resume()
    waves.look(has_work=False)
    assert waves.runs


def test_I07_a_resume_is_idempotent() -> None:
    waves = make(1, interval=1)
    waves.note_pause()
    waves.look(has_work=False)
    waves.step()
    waves.count(waves.ballot(has_work=False))
    waves.note_resume()
    waves.note_resume()
    assert waves.look(has_work=True) == [Word(start_wave=1)]
    assert waves.runs


# -- Any order -------------------------------------------------------------------------------------


def explore(seeds: range, **options: object) -> None:
    for seed in seeds:
        World(seed, **options).run()  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_in_any_order_nothing_is_left_waiting() -> None:
    explore(range(2000))


@pytest.mark.slow
def test_I06_no_wakeup_is_lost_over_100_000_schedules() -> None:
    explore(range(2000, 102_000))


def test_I01_I02_a_first_request_anywhere_wakes_all() -> None:
    for rank in range(3):
        world = World(rank, ranks=3)
        world.ranks[rank].requests[0].append((0, 1))
        world._open += 1
        while world._move():
            pass
        world._check()


def waves_of_four(count: int) -> None:
    done, seed = 0, 0
    while done < count:
        world = World(seed, ranks=4, events=300, crashes=False)
        world.run()
        done += world.waves_done // 4
        seed += 1


def test_I04_I08_ranks_of_uneven_load_leave_each_wave_at_the_same_step() -> None:
    waves_of_four(500)


@pytest.mark.slow
def test_I04_over_10_000_waves() -> None:
    waves_of_four(10_000)


def _without_starts(said: list[Word]) -> list[Word]:
    return [word for word in said if word.start_wave is None]


class ObeysStaleStarts(EngineWaves):
    """A start of a wave that is over wakes it."""

    def _on_start(self, wave: int, excluded: int | None) -> list[Word]:
        return super()._on_start(max(wave, self.wave), excluded)


class SleepsAfterAWave(EngineWaves):
    """A request whose client has not heard of the last wave's end yet starts none."""

    def look(self, has_work: bool) -> list[Word]:
        stamp = self._stamp
        said = super().look(has_work)
        return said if stamp >= self.wave else _without_starts(said)


class StartsOnlyAfterAWave(EngineWaves):
    """I02: stamps that agree are taken for a wave that runs."""

    def look(self, has_work: bool) -> list[Word]:
        stamp = self._stamp
        said = super().look(has_work)
        return said if stamp < self.wave else _without_starts(said)


class HearsWhileItVotes(EngineWaves):
    """I06: what comes is taken in at once."""

    def _note(self, take_in: Callable[[], list[Word]]) -> None:
        take_in()


class LeavesByItself(EngineWaves):
    """I04: acts on its own answer, not on that of all."""

    _own = 0

    def ballot(self, has_work: bool) -> Ballot:
        self._own = int(has_work)
        return super().ballot(has_work)

    def count(self, tally: Ballot) -> list[Word]:
        return super().count(tally._replace(has_work=self._own))


class AgreesOnAnyPause(EngineWaves):
    """Ranks that vote for a pause may mean different ones."""

    def count(self, tally: Ballot) -> list[Word]:
        return super().count(tally._replace(resumes=0, resumes_below=0))


class KeepsItsOwnWave(EngineWaves):
    """A vote says nothing of the number of the wave."""

    def count(self, tally: Ballot) -> list[Word]:
        return super().count(tally._replace(wave=0))


class IsSilentToNewcomers(EngineWaves):
    """A start that was lost with a coordinator is not said again."""

    def report(self) -> list[Word]:
        return []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "planted",
    [
        ObeysStaleStarts,
        SleepsAfterAWave,
        StartsOnlyAfterAWave,
        HearsWhileItVotes,
        LeavesByItself,
        AgreesOnAnyPause,
        KeepsItsOwnWave,
        IsSilentToNewcomers,
    ],
)
def test_a_planted_race_is_found(planted: type[EngineWaves]) -> None:
    with pytest.raises((Wrong, InternalError)):
        explore(range(2000), make=planted)


class PlantedRows:
    """Rows of the table that were wrong in one engine or another."""

    ROWS: ClassVar = {
        "I01: who begins a wave waits to be called": ((Phase.ASLEEP, Event.REQUEST), Phase.ASLEEP),
        "I03: a start wakes a paused engine": ((Phase.PAUSED, Event.CALL), Phase.AWAKE),
        "a start is lost on a paused engine": ((Phase.PAUSED, Event.CALL), Phase.PAUSED),
        "a kept start is lost at the resume": ((Phase.CALLED, Event.RESUME), Phase.ASLEEP),
    }


@pytest.mark.parametrize("plant", PlantedRows.ROWS)
def test_a_planted_row_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, after = PlantedRows.ROWS[plant]
    monkeypatch.setitem(under_test.TABLE, row, (after, TABLE[row][1]))
    with pytest.raises((Wrong, InternalError)):
        explore(range(2000))


@pytest.mark.timeout(60)
def test_words_of_an_ended_group_must_not_reach_the_coordinator_of_the_next() -> None:
    with pytest.raises(Wrong):
        explore(range(2000), late_words=True)
