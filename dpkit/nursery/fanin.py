"""The stats fan-in channel: every engine publishes, the coordinator receives; producers never wait.

One slot an engine, the newest (epoch, seq) wins: a coordinator that was busy learns the present,
not the history. Lockstep engines need the history of whole steps, so with ``ordered=True`` messages
stay in arrival order, at most one per engine and step. Knows nothing of what the counts mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from dpkit.messages import EngineId, EngineStats


@frozen(kw_only=True)
class FanInStatistics:
    """Counts since the channel was made."""

    received: int
    overwritten: int
    """Newer stats of the same engine arrived before the coordinator looked."""
    stale: int
    """Older or repeated messages of one life: ignored. They should not happen in one process."""
    ended_lives: int = 0
    """Of a life that another one has followed, and that is finishing what it has: ignored."""


class StatsFanIn:
    """Many synchronous producers, one receiver."""

    def __init__(self, *, ordered: bool = False) -> None:
        self.carry: Callable[[EngineStats], None] = self.arrive
        """The line from `publish` to `arrive`; whoever tests puts a bad one in its place."""
        self._ordered = ordered
        self._pending: dict[tuple[object, ...], EngineStats] = {}
        self._newest: dict[str, EngineStats] = {}
        self._lot = trio.lowlevel.ParkingLot()
        self._received = self._overwritten = self._stale = self._ended_lives = 0

    def publish(self, stats: EngineStats) -> None:
        """Send stats to the engine's slot; never blocks."""
        self.carry(stats)

    def arrive(self, stats: EngineStats) -> None:
        """Leave the stats in the engine's slot, unless it has seen newer ones."""
        self._received += 1
        newest = self._newest.get(stats.engine.name)
        if newest is not None and _age(stats) <= _age(newest):
            if stats.engine.epoch < newest.engine.epoch:
                self._ended_lives += 1
            else:
                self._stale += 1
            return
        self._newest[stats.engine.name] = stats
        slot = self._slot(stats)
        if slot in self._pending:
            self._overwritten += 1
        self._pending[slot] = stats
        self._lot.unpark()

    def _slot(self, stats: EngineStats) -> tuple[object, ...]:
        if self._ordered:
            return (stats.engine, stats.current_wave, stats.step_counter)
        return (stats.engine.name,)

    def receive_nowait(self) -> tuple[EngineStats, ...]:
        """Take what is pending, one message a slot, oldest slot first; empty when nothing is."""
        messages = tuple(self._pending.values())
        self._pending.clear()
        return messages

    def repeat(self, engines: Container[EngineId]) -> None:
        """Have the newest stats of these engines pending again: their receiver lost its memory.

        What engines publish is changes, and one that is busy with a long step would stay unknown.
        """
        known = (stats for stats in self._newest.values() if stats.engine in engines)
        self._pending = {self._slot(stats): stats for stats in known}
        if self._pending:
            self._lot.unpark()

    def newest_read(self, engine: EngineId) -> EngineStats | None:
        """The newest stats of a life, if there are any and the receiver has taken them."""
        stats = self._newest.get(engine.name)
        if stats is None or stats.engine != engine or self._slot(stats) in self._pending:
            return None
        return stats

    async def wait_pending(self) -> None:
        """Wait until some engine has published what was not yet received."""
        if self._pending:
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()

    def statistics(self) -> FanInStatistics:
        """Counts since the channel was made."""
        return FanInStatistics(
            received=self._received,
            overwritten=self._overwritten,
            stale=self._stale,
            ended_lives=self._ended_lives,
        )


def _age(stats: EngineStats) -> tuple[int, int]:
    return stats.engine.epoch, stats.seq
