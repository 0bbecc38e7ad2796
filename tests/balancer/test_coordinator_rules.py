"""The coordinator's rules on hand-made cases: what is published, and at which moment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.messages import EngineId, EngineStats, Snapshot, StartWave

if TYPE_CHECKING:
    from collections.abc import Sequence

IDLE = (0, 0, 0.0)


def stats(
    index: int, waiting: int, running: int = 0, *, step: tuple[int, int] = (0, 0), epoch: int = 0
) -> EngineStats:
    return EngineStats(
        engine=EngineId(f"e{index}", epoch=epoch),
        index=index,
        seq=0,
        waiting=waiting,
        running=running,
        kv_cache_usage=0.5,
        current_wave=step[0],
        step_counter=step[1],
    )


def independent(engines: int = 2) -> CoordinatorRules:
    """Rules of independent engines that have just published for the first time, at 0."""
    rules = CoordinatorRules(engines, now=0.0)
    rules.publish(0.0)
    return rules


def lockstep(engines: int = 2) -> CoordinatorRules:
    """Rules of lockstep engines that have just published for the first time, at 0."""
    rules = CoordinatorRules(engines, now=-0.05, wave_coordination=True)
    rules.publish(0.0)
    return rules


def waiting(snapshot: Snapshot) -> Sequence[int]:
    assert snapshot.loads is not None
    return [load[0] for load in snapshot.loads]


@pytest.mark.parametrize(("wave_coordination", "wait"), [(False, 0.0), (True, 0.05)])
def test_the_first_snapshot_waits_for_the_floor_only(wave_coordination: bool, wait: float) -> None:
    rules = CoordinatorRules(2, now=7.0, wave_coordination=wave_coordination)
    assert rules.due(7.0) == pytest.approx(wait)
    assert rules.publish(7.0 + wait) == Snapshot(loads=(IDLE, IDLE))


def test_nothing_new_is_published_every_five_seconds() -> None:
    rules = independent()
    assert rules.due(0.0) == pytest.approx(5.0)
    assert rules.due(4.0) == pytest.approx(1.0)
    assert rules.due(6.0) == 0.0
    rules.publish(5.0)
    assert rules.due(5.0) == pytest.approx(5.0)


def test_news_is_published_once_per_interval() -> None:
    rules = independent()
    rules.on_stats(0.03, stats(1, waiting=4, running=2))
    assert rules.due(0.03) == pytest.approx(0.07)
    rules.on_stats(0.06, stats(0, waiting=1, running=9))
    assert rules.due(0.06) == pytest.approx(0.04)
    assert rules.publish(0.1) == Snapshot(loads=((1, 9, 0.5), (4, 2, 0.5)))
    assert rules.due(0.1) == pytest.approx(5.0)


def test_news_after_a_quiet_time_is_published_at_once() -> None:
    rules = independent()
    rules.on_stats(3.0, stats(0, waiting=1))
    assert rules.due(3.0) == 0.0


def test_the_interval_can_be_set() -> None:
    rules = CoordinatorRules(1, now=0.0, interval=0.25)
    rules.publish(0.0)
    rules.on_stats(0.05, stats(0, waiting=1))
    assert rules.due(0.05) == pytest.approx(0.2)


def test_steps_mean_nothing_to_independent_engines() -> None:
    rules = independent()
    rules.on_stats(0.01, stats(0, waiting=1, step=(3, 5)))
    rules.on_stats(0.02, stats(1, waiting=2, step=(3, 6)))
    rules.on_stats(0.03, stats(0, waiting=3, step=(2, 1)))
    assert rules.due(0.03) == pytest.approx(0.07)
    assert waiting(rules.publish(0.1)) == [3, 2]
    assert rules.statistics().out_of_order == 0


def test_lockstep_waits_for_the_stragglers_of_a_step() -> None:
    rules = lockstep()
    for now in (0.10, 0.14, 0.18, 0.22):
        rules.on_stats(now, stats(0, waiting=1, step=(0, 1)))
        assert rules.due(now) == pytest.approx(0.05)
    assert rules.due(0.25) == pytest.approx(0.02), "looking again does not start the wait again"


def test_lockstep_publishes_the_finished_step_whole_and_then_the_rest() -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(0, waiting=10, step=(0, 1)))
    rules.on_stats(0.02, stats(1, waiting=11, step=(0, 1)))
    rules.on_stats(0.03, stats(1, waiting=21, step=(0, 2)))
    assert rules.due(0.03) == pytest.approx(0.07), "no floor once a finished step is kept"
    assert waiting(rules.publish(0.1)) == [10, 11]
    assert rules.due(0.1) == pytest.approx(0.1), "the present state is still news"
    assert waiting(rules.publish(0.2)) == [10, 21]
    assert rules.due(0.2) == pytest.approx(5.0)


def test_lockstep_keeps_the_newest_finished_step_only() -> None:
    rules = lockstep()
    for step in (1, 2, 3):
        for index in (0, 1):
            rules.on_stats(0.01 * step, stats(index, waiting=step, step=(0, step)))
    assert waiting(rules.publish(0.1)) == [2, 2]


def test_a_new_wave_is_a_newer_step() -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(0, waiting=1, step=(0, 9)))
    rules.on_stats(0.02, stats(0, waiting=2, step=(1, 0)))
    assert waiting(rules.publish(0.1)) == [1, 0]


def test_a_step_that_follows_a_publication_keeps_nothing() -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(0, waiting=1, step=(0, 1)))
    rules.publish(0.1)
    rules.on_stats(0.11, stats(0, waiting=2, step=(0, 2)))
    assert waiting(rules.publish(0.2)) == [2, 0]
    assert rules.due(0.2) == pytest.approx(5.0)


def test_an_older_step_is_counted_and_warned_of_and_its_counts_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(0, waiting=1, step=(0, 2)))
    with caplog.at_level(logging.WARNING, logger="dpkit"):
        rules.on_stats(0.02, stats(1, waiting=7, step=(0, 1)))
    assert caplog.messages == ["stats of (wave, step) (0, 1) came after those of (0, 2): 1 so far"]
    assert rules.statistics().out_of_order == 1
    assert waiting(rules.publish(0.1)) == [1, 7]


def test_a_flood_of_older_steps_is_no_flood_of_warnings(caplog: pytest.LogCaptureFixture) -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(0, waiting=1, step=(9, 9)))
    with caplog.at_level(logging.WARNING, logger="dpkit"):
        for step in range(1000):
            rules.on_stats(0.02, stats(1, waiting=7, step=(0, step)))
    assert rules.statistics().out_of_order == 1000
    assert len(caplog.messages) == 10


@pytest.mark.parametrize("index", [-1, 2])
def test_stats_of_an_engine_that_just_left_are_counted_and_ignored(index: int) -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(index, waiting=9, step=(5, 5)))
    assert rules.statistics().unknown_engines == 1
    assert rules.due(0.01) == pytest.approx(4.99), "it is no news"
    rules.on_stats(0.02, stats(0, waiting=1, step=(0, 1)))
    assert rules.statistics().out_of_order == 0, "its step is not taken either"
    assert waiting(rules.publish(0.1)) == [1, 0]


def test_the_load_of_an_engine_goes_with_it_and_is_news() -> None:
    rules = independent()
    rules.on_stats(0.01, stats(0, waiting=1))
    rules.on_stats(0.01, stats(1, waiting=9, running=9))
    rules.publish(0.1)
    rules.on_engine_left(0.15, EngineId("e1"), 1)
    assert rules.due(0.15) == pytest.approx(0.05)
    assert rules.publish(0.2) == Snapshot(loads=((1, 0, 0.5), IDLE))


def test_stats_of_a_life_that_ended_are_counted_and_ignored() -> None:
    rules = independent()
    rules.on_engine_left(0.01, EngineId("e1"), 1)
    rules.on_stats(0.02, stats(1, waiting=9))
    rules.on_engine_started(0.03, EngineId("e1", epoch=1), 1)
    rules.on_stats(0.04, stats(1, waiting=8))
    assert rules.statistics().ended_lives == 2
    assert rules.due(0.04) == pytest.approx(4.96), "none of it is news"
    rules.on_stats(0.05, stats(1, waiting=3, epoch=1))
    assert waiting(rules.publish(0.1)) == [0, 3]


def test_a_late_word_of_the_end_of_an_earlier_life_leaves_the_next_one_alone() -> None:
    rules = independent()
    rules.on_engine_started(0.0, EngineId("e1", epoch=1), 1)
    rules.on_stats(0.01, stats(1, waiting=3, epoch=1))
    rules.on_engine_left(0.02, EngineId("e1"), 1)
    rules.on_engine_left(0.02, EngineId("e9"), 9)
    assert waiting(rules.publish(0.1)) == [0, 3]


def test_a_life_may_be_heard_of_before_its_start_is_told() -> None:
    rules = independent()
    rules.on_engine_left(0.0, EngineId("e1"), 1)
    rules.on_stats(0.01, stats(1, waiting=3, epoch=1))
    assert waiting(rules.publish(0.1)) == [0, 3]


def test_a_new_engine_gets_a_row_of_its_own() -> None:
    rules = independent()
    rules.on_engine_started(0.01, EngineId("e3"), 3)
    assert rules.due(0.01) == pytest.approx(4.99), "an idle engine is no news"
    rules.on_stats(0.02, stats(3, waiting=5))
    assert rules.publish(0.1).loads == (IDLE, IDLE, IDLE, (5, 0, 0.5))


def test_another_engine_may_take_the_row_of_one_that_left() -> None:
    rules = independent()
    rules.on_stats(0.01, stats(1, waiting=9))
    rules.on_engine_started(0.02, EngineId("other"), 1)
    rules.on_stats(0.03, stats(1, waiting=8))
    assert rules.statistics().ended_lives == 1
    assert waiting(rules.publish(0.1)) == [0, 0]


def test_a_kept_step_forgets_the_dead_too() -> None:
    rules = lockstep()
    rules.on_stats(0.01, stats(0, waiting=1, step=(0, 1)))
    rules.on_stats(0.01, stats(1, waiting=9, step=(0, 1)))
    rules.on_stats(0.02, stats(0, waiting=2, step=(0, 2)))
    rules.on_engine_started(0.03, EngineId("e2"), 2)
    rules.on_engine_left(0.03, EngineId("e1"), 1)
    assert rules.publish(0.1).loads == ((1, 0, 0.5), IDLE)
    assert rules.publish(0.2).loads == ((2, 0, 0.5), IDLE, IDLE)


def test_any_message_starts_the_floor_anew_even_one_that_is_ignored() -> None:
    rules = lockstep()
    rules.on_stats(4.98, stats(2, waiting=9))
    assert rules.due(4.98) == pytest.approx(0.05)


def started(wave: int, *, running: bool) -> CoordinatorRules:
    """Rules whose current wave is `wave`."""
    rules = lockstep()
    if running:
        rules.on_start_wave(0.0, wave, 0)
    else:
        rules.on_wave_complete(0.0, wave - 1)
    return rules


@pytest.mark.parametrize(
    ("running", "wave", "taken"),
    [
        (False, 2, False),
        (False, 3, True),
        (False, 4, True),
        (True, 2, False),
        (True, 3, False),
        (True, 4, True),
    ],
)
def test_a_wave_starts_if_it_is_newer_or_the_present_one_is_idle(
    running: bool, wave: int, taken: bool
) -> None:
    rules = started(3, running=running)
    messages = rules.on_start_wave(0.1, wave, 1)
    if taken:
        assert messages == (
            StartWave(wave=wave, engine_index=1),
            Snapshot(loads=None, current_wave=wave, engines_running=True),
        )
    else:
        assert messages == ()
    statistics = rules.statistics()
    assert statistics.current_wave == (wave if taken else 3)
    assert statistics.engines_running is (taken or running)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(("wave", "taken"), [(2, False), (3, True), (5, True)])
def test_a_complete_wave_ends_unless_a_newer_one_began(
    running: bool, wave: int, taken: bool
) -> None:
    rules = started(3, running=running)
    messages = rules.on_wave_complete(0.1, wave)
    ended = Snapshot(loads=None, current_wave=wave + 1, engines_running=False)
    assert messages == ((ended,) if taken else ())
    statistics = rules.statistics()
    assert statistics.current_wave == (wave + 1 if taken else 3)
    assert statistics.engines_running is (running and not taken)


def test_every_snapshot_carries_the_wave_state() -> None:
    rules = started(3, running=True)
    assert rules.publish(0.1) == Snapshot(loads=(IDLE, IDLE), current_wave=3, engines_running=True)


def test_a_word_about_waves_is_no_news_of_loads_but_starts_the_floor_anew() -> None:
    rules = lockstep()
    rules.on_start_wave(4.99, 1, 0)
    assert rules.due(4.99) == pytest.approx(0.05)
    rules.publish(5.04)
    rules.on_wave_complete(5.05, 1)
    assert rules.due(5.05) == pytest.approx(4.99)


# -- More engines, fewer engines, and clients that come later --------------------------------------


def test_more_engines_are_idle_and_news() -> None:
    rules = independent()
    rules.on_stats(0.1, stats(1, waiting=3))
    rules.publish(0.1)
    rules.on_engine_count(0.15, 4)
    assert rules.due(0.15) == pytest.approx(0.05)
    assert waiting(rules.publish(0.2)) == [0, 3, 0, 0]
    rules.on_stats(0.3, stats(3, waiting=1))
    assert waiting(rules.publish(0.3)) == [0, 3, 0, 1]
    assert rules.statistics().unknown_engines == 0


def test_fewer_engines_take_their_loads_with_them() -> None:
    rules = independent(3)
    for index in range(3):
        rules.on_stats(0.1, stats(index, waiting=1 + index))
    rules.on_engine_count(0.1, 1)
    assert rules.engine_count == 1
    assert waiting(rules.publish(0.1)) == [1]
    rules.on_stats(0.2, stats(2, waiting=9))
    assert rules.statistics().unknown_engines == 1
    rules.on_engine_count(0.2, 3)
    assert waiting(rules.publish(0.2)) == [1, 0, 0], "who comes back is idle"


def test_as_many_engines_as_before_are_no_news() -> None:
    rules = independent()
    rules.on_engine_count(0.1, 2)
    assert rules.due(0.1) == pytest.approx(4.9)


@pytest.mark.parametrize("engines", [1, 3])
def test_the_kept_snapshot_of_a_step_is_of_those_engines_that_there_are(engines: int) -> None:
    rules = lockstep()
    for index in range(2):
        rules.on_stats(0.1, stats(index, waiting=1, step=(0, 1)))
    rules.on_stats(0.11, stats(0, waiting=2, step=(0, 2)))
    rules.on_engine_count(0.12, engines)
    assert waiting(rules.publish(0.12)) == [1, 1][:engines]
    assert waiting(rules.publish(0.22)) == [2, 1, 0][:engines]


def test_a_client_that_comes_later_is_told_what_the_others_know() -> None:
    rules = lockstep()
    for index in range(2):
        rules.on_stats(0.1, stats(index, waiting=1, step=(0, 1)))
    rules.publish(0.15)
    rules.on_stats(0.16, stats(0, waiting=2, step=(0, 2)))
    due = rules.due_at
    greeting = rules.greeting()
    assert greeting is not None
    assert waiting(greeting) == [1, 1], "and not half of a step"
    assert (rules.due_at, rules.statistics().published) == (due, 2), "nothing else changes"


def test_before_the_first_snapshot_there_is_nothing_to_tell() -> None:
    assert CoordinatorRules(2, now=0.0).greeting() is None


def test_a_greeting_carries_the_wave_state_of_now() -> None:
    rules = started(3, running=True)
    assert rules.greeting() == Snapshot(loads=(IDLE, IDLE), current_wave=3, engines_running=True)


def test_messages_of_independent_engines_may_be_read_when_they_are_told() -> None:
    rules = independent()
    silent = rules.may_rest
    rules.on_stats(0.05, stats(0, waiting=1))
    due, changed = rules.due_at, rules.may_rest
    rules.on_stats(0.09, stats(0, waiting=2))
    assert rules.due_at == due
    rules.publish(0.1)
    assert (silent, changed, rules.may_rest) == (False, True, False)


def test_messages_of_lockstep_engines_may_not() -> None:
    rules = lockstep()
    rules.on_stats(0.05, stats(0, waiting=1, step=(0, 1)))
    assert not rules.may_rest


def test_the_rules_tell_their_state_in_a_line() -> None:
    rules = lockstep()
    assert repr(rules) == "<CoordinatorRules: 2 engines, unchanged, wave 0 idle, 1 published>"
    rules.on_start_wave(0.01, 1, 0)
    rules.on_stats(0.02, stats(0, waiting=1))
    assert repr(rules) == "<CoordinatorRules: 2 engines, changed, wave 1 running, 1 published>"
    assert rules.statistics().published == 1
