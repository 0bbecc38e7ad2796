"""The coordinator's rules: what is told to whom, and when. A task or a replay only drives them.

Knows nothing of clocks, channels or engine processes: every call says what time it is, in seconds.
Messages come in the order in which they count: keeping the newest of an engine's life is the
fan-in's work. The rules, to the millisecond, are those of vLLM 0.33.0's coordinator.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.messages import EngineId, Snapshot, StartWave

if TYPE_CHECKING:
    from dpkit.messages import EngineStats

    Row = tuple[int, int, float]

_log = logging.getLogger(__name__)

IDLE_INTERVAL_S = 5.0
"""A snapshot goes out this often though nothing changed, so that a client that missed one heals.
vLLM: 5,000 ms."""

STEP_FLOOR_S = 0.05
"""Lockstep engines report one step within moments of each other: wait this long after the last of
them, so that a snapshot holds one step of all. vLLM: 50 ms."""

_IDLE: Row = (0, 0, 0.0)


@frozen(kw_only=True)
class CoordinatorStatistics:
    """What a coordinator did so far."""

    published: int
    """Snapshots sent, those about the wave state alone not counted."""

    published_at: float | None
    """When the newest of them was sent, on the caller's clock; None: none was."""

    unknown_engines: int
    """Messages of engines that do not exist, ignored: the engine had just left."""

    ended_lives: int
    """Stats of a life that has ended, ignored: they had been under way."""

    out_of_order: int
    """Stats of an older wave or step than the newest seen; their counts were taken all the same."""

    current_wave: int
    engines_running: bool


class CoordinatorRules:
    """Loads of all engines, and the moment at which clients hear of them.

    After every message and every publication `due` says how long to wait for the next message;
    when none came, `publish`. Messages that are there already are read before publishing.
    """

    def __init__(
        self,
        engine_count: int,
        *,
        now: float,
        interval: float = 0.1,
        wave_coordination: bool = False,
    ) -> None:
        self.interval = interval
        self._wave_coordination = wave_coordination
        # Waiting first: the order that goes to clients, though engines count running first.
        self._loads: list[Row] = [_IDLE] * engine_count
        # Whose each row is: earlier lives of that engine count no more. None: whoever sends.
        self._lives: list[EngineId | None] = [None] * engine_count
        self._kept: tuple[Row, ...] | None = None
        self._told: tuple[Row, ...] | None = None
        self._changed = False
        self._last_publish = -math.inf
        self._newest_step = (-1, -1)
        self._current_wave = 0
        self._engines_running = False
        self._published = self._unknown_engines = self._ended_lives = self._out_of_order = 0
        self._wait_from(now)

    def __repr__(self) -> str:
        state = "running" if self._engines_running else "idle"
        changed = "changed" if self._changed else "unchanged"
        return (
            f"<CoordinatorRules: {len(self._loads)} engines, {changed}, wave "
            f"{self._current_wave} {state}, {self._published} published>"
        )

    @property
    def engine_count(self) -> int:
        """Rows of the table."""
        return len(self._loads)

    @property
    def current_wave(self) -> int:
        """The wave that runs, or else the next."""
        return self._current_wave

    @property
    def due_at(self) -> float:
        """When to `publish`, unless a message comes first."""
        return self._due_at

    @property
    def may_rest(self) -> bool:
        """Whether what comes before `due_at` may as well be read then: nothing is told earlier."""
        return self._changed and not self._wave_coordination

    def due(self, now: float) -> float:
        """Seconds until `publish`, unless a message comes first; never negative."""
        return max(0.0, self._due_at - now)

    def load(self, index: int) -> Row:
        """What is known of one engine: waiting, running, KV usage."""
        return self._loads[index]

    def on_stats(self, now: float, stats: EngineStats) -> None:
        """Take one engine's counts."""
        row = (stats.waiting, stats.running, stats.kv_cache_usage)
        step = (stats.current_wave, stats.step_counter)
        self.on_counts(now, stats.index, stats.engine, row, step)

    def on_counts(
        self, now: float, index: int, engine: EngineId, row: Row, step: tuple[int, int]
    ) -> None:
        """Take one engine's counts: waiting, running, KV usage; as of which wave and step."""
        if not 0 <= index < len(self._loads):
            self._unknown_engines += 1
        elif self._has_ended(index, engine):
            self._ended_lives += 1
        else:
            if self._wave_coordination:
                self._on_step(step)
            self._loads[index] = row
            self._changed = True
        self._wait_from(now)

    def on_engine_started(self, now: float, engine: EngineId, index: int) -> None:
        """A life begins, in a row of its own or in that of the life before: it is idle."""
        self._fit(max(index + 1, len(self._loads)))
        self._lives[index] = engine
        self._newest_step = (-1, -1)  # those that step together begin together, at wave 0
        self._clear(now, index)

    def on_engine_left(self, now: float, engine: EngineId, index: int) -> None:
        """A life is over: its load is gone with it, and stats still under way count no more."""
        if 0 <= index < len(self._loads) and not self._has_ended(index, engine):
            self._lives[index] = EngineId(engine.name, engine.epoch + 1)
            self._clear(now, index)

    def on_engine_count(self, now: float, engine_count: int) -> None:
        """There are more engines, idle ones, or the last of them are gone; clients hear of it."""
        if engine_count != len(self._loads):
            self._fit(engine_count)
            self._changed = True
            self._wait_from(now)

    def on_wave_complete(self, now: float, wave: int) -> tuple[Snapshot | StartWave, ...]:
        """All engines ran out of work in `wave`; returns what to send at once, in order."""
        self._wait_from(now)
        if self._current_wave > wave:
            return ()
        self._current_wave = wave + 1
        self._engines_running = False
        return (self._wave_state(),)

    def on_start_wave(
        self, now: float, wave: int, engine_index: int
    ) -> tuple[Snapshot | StartWave, ...]:
        """An idle engine got a request and began `wave`; returns what to send at once, in order."""
        self._wait_from(now)
        if wave < self._current_wave or (wave == self._current_wave and self._engines_running):
            return ()
        self._current_wave = wave
        self._engines_running = True
        return (StartWave(wave=wave, engine_index=engine_index), self._wave_state())

    def on_waves(self, wave: int, running: bool) -> tuple[Snapshot, ...]:
        """Take the wave state of whoever hears of waves instead; returns what to send at once."""
        if (wave, running) == (self._current_wave, self._engines_running):
            return ()
        self._current_wave, self._engines_running = wave, running
        return (self._wave_state(),)

    def call(self) -> StartWave | None:
        """For an engine that comes late: the wave that runs; None: none does."""
        if not self._engines_running:
            return None
        return StartWave(wave=self._current_wave, engine_index=None)

    def publish(self, now: float) -> Snapshot:
        """The snapshot that is due: the kept one of the last finished step, else the present state.

        After a kept one the present state is still news, so it follows within the interval.
        """
        loads = self._kept
        if loads is None:
            loads = tuple(self._loads)
            self._changed = False
        self._kept, self._told = None, loads
        self._last_publish = now
        self._published += 1
        self._wait_from(now)
        return self._snapshot(loads)

    def greeting(self) -> Snapshot | None:
        """What was published last, for a client that has come since; None: nothing was so far.

        Not the present state, which other clients hear as well: it may hold half of a step.
        """
        return None if self._told is None else self._snapshot(self._told)

    def statistics(self) -> CoordinatorStatistics:
        """Counts since the start, and the wave state."""
        return CoordinatorStatistics(
            published=self._published,
            published_at=self._last_publish if self._published else None,
            unknown_engines=self._unknown_engines,
            ended_lives=self._ended_lives,
            out_of_order=self._out_of_order,
            current_wave=self._current_wave,
            engines_running=self._engines_running,
        )

    def _has_ended(self, index: int, engine: EngineId) -> bool:
        life = self._lives[index]
        return life is not None and (engine.name != life.name or engine.epoch < life.epoch)

    def _clear(self, now: float, index: int) -> None:
        """Put a row to idle, in what is kept too; that is news if it was not idle before."""
        if self._kept is not None:
            self._kept = tuple(
                _IDLE if row == index else load for row, load in enumerate(self._kept)
            )
        if self._loads[index] != _IDLE:
            self._loads[index] = _IDLE
            self._changed = True
            self._wait_from(now)

    def _on_step(self, step: tuple[int, int]) -> None:
        if step > self._newest_step:
            if self._changed:  # what is known now is the whole of the step before
                self._kept = tuple(self._loads)
            self._newest_step = step
        elif step < self._newest_step:
            self._out_of_order = count = self._out_of_order + 1
            if not count & (count - 1):  # at the 1st, 2nd, 4th: a log is no place for a flood
                _log.warning(
                    "stats of (wave, step) %s came after those of %s: %d so far",
                    *(step, self._newest_step, count),
                )

    def _fit(self, engine_count: int) -> None:
        missing = engine_count - len(self._loads)
        self._loads = self._loads[:engine_count] + [_IDLE] * missing
        self._lives = self._lives[:engine_count] + [None] * missing
        if self._kept is not None:  # of a step before those that are new
            self._kept = self._kept[:engine_count]

    def _wave_state(self) -> Snapshot:
        return self._snapshot(None)

    def _snapshot(self, loads: tuple[Row, ...] | None) -> Snapshot:
        return Snapshot(
            loads=loads, current_wave=self._current_wave, engines_running=self._engines_running
        )

    def _wait_from(self, now: float) -> None:
        floor = STEP_FLOOR_S if self._wave_coordination and self._kept is None else 0.0
        period = self.interval if self._changed else IDLE_INTERVAL_S
        self._due_at = now + max(floor, period - (now - self._last_publish))
