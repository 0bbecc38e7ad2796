"""Engines that step together, as ranks of a mixture of experts do: each step waits for the slowest.

The rules are those of the processes that do so (`dpkit.engine.waves`, `dpkit.nursery.lockstep`);
only the vote is taken here, by all ranks of this process, and at every step, so that it is the
barrier that the experts' exchange is on GPUs. A rank's tokens are out when its own share of the
step is done, a little early; its next step begins when all are. For runs in which no engine dies:
one that comes back would have to learn the wave of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from attrs import define, field

from dpkit.engine.waves import Ballot, EngineWaves
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.lockstep import Lockstep

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.waves import Word
    from dpkit.nursery.cluster import Cluster


@define(eq=False)
class _Round:
    """One vote."""

    ballots: list[Ballot] = field(factory=list)
    counted: trio.Event = field(factory=trio.Event)

    @property
    def tally(self) -> Ballot:
        return Ballot.tally(self.ballots)


class StepGroup:
    """All ranks of a cluster; implements `Ballots`."""

    def __init__(self, loops: list[BusyLoop]) -> None:
        self._round = _Round()
        self._ranks = [self._join(rank, loop) for rank, loop in enumerate(loops)]

    def _join(self, rank: int, loop: BusyLoop) -> Lockstep:
        waves = EngineWaves(rank, speaks=rank == 0, sync_interval=1)
        joined = Lockstep(engine=loop.engine, waves=waves, ballots=self, inbox=loop.inbox)
        joined.say = self._call_others(rank)
        loop.lockstep = joined
        return joined

    def _call_others(self, rank: int) -> Callable[[Word], None]:
        def say(word: Word) -> None:
            if word.start_wave is not None:
                for other in self._ranks:
                    other.note_start(word.start_wave, rank)

        return say

    async def vote(self, ballot: Ballot) -> Ballot:
        """Wait until all ranks have done this step."""
        own = self._round
        own.ballots.append(ballot)
        if len(own.ballots) == len(self._ranks):
            self._round = _Round()
            own.counted.set()
        else:
            await own.counted.wait()
        return own.tally


def step_together(cluster: Cluster) -> None:
    """Let all engines of a cluster, which are idle, step together from now on."""
    lives = [slot.life for slot in cluster._slots]  # noqa: SLF001 - lives are nobody else's affair
    StepGroup([life for life in lives if isinstance(life, BusyLoop)])
    arbiter = cluster._arbitration.arbiter  # noqa: SLF001 - likewise
    views = [flights.line.view for flights in cluster._flights]  # noqa: SLF001 - likewise
    if arbiter is not None:
        views.append(arbiter.line.view)
    for view in views:  # who picks knows it of processes only
        view.steps_together = True
