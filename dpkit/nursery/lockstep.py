"""An engine's part in a group that steps together: what its busy loop asks once a loop.

Joins three that do not know each other: the rules (`dpkit.engine.waves`), the way in which ranks
vote (`Ballots`, such as `dpkit.link.gloo`), and whoever tells the coordinator. Everything but the
vote is synchronous, on Trio's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from dpkit.errors import EngineLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpkit.engine.waves import Ballot, EngineWaves, Word
    from dpkit.messages import EngineId
    from dpkit.nursery.inbox import Inbox


_log = logging.getLogger(__name__)


class Ballots(Protocol):
    """How the ranks of a group vote."""

    async def vote(self, ballot: Ballot) -> Ballot:
        """Put this rank's ballot in, and wait for what comes out of those of all.

        Cancelled, it leaves at once; this rank cannot vote again then.

        Raises:
            TimeoutError: not all have voted in time; the message says how long that is.
            ConnectionError: a rank has gone.
        """


class Lockstep:
    """One life of one engine in its group.

    Args:
        engine: The incarnation, for messages.
        waves: Its state; owned by this object from now on.
        ballots: How it votes.
        inbox: The busy loop's, which is woken when there is something to look at.
    """

    def __init__(
        self, *, engine: EngineId, waves: EngineWaves, ballots: Ballots, inbox: Inbox
    ) -> None:
        self.say: Callable[[Word], None] = lambda _: None
        """How the coordinator is told."""
        self._engine = engine
        self._waves = waves
        self._ballots = ballots
        self._inbox = inbox
        self._broken: EngineLost | None = None

    def __repr__(self) -> str:
        return f"<Lockstep of {self._engine}: {self._waves}>"

    @property
    def stamp(self) -> tuple[int, int]:
        """The wave, and the steps of it that are done: what counts are told with."""
        return self._waves.wave, self._waves.step_counter

    @property
    def is_paused(self) -> bool:
        """Whether all ranks have agreed to pause."""
        return self._waves.is_paused

    # What comes from outside, at any time.

    def note_request(self, current_wave: int) -> None:
        """A request has been put into the inbox; its client takes this for the present wave."""
        self._waves.note_request(current_wave)

    def note_start(self, wave: int, excluded: int | None) -> None:
        """The coordinator calls all but one to a wave."""
        self._waves.note_start(wave, excluded)
        self._inbox.wake()

    def note_pause(self) -> None:
        """This rank is to pause as soon as all are; it takes no requests by now."""
        self._waves.note_pause()
        self._inbox.wake()

    def note_resume(self) -> None:
        """This rank is to go on."""
        self._waves.note_resume()
        self._inbox.wake()

    def report(self) -> None:
        """Tell a coordinator that may know nothing where the waves are."""
        self._tell(self._waves.report())

    # What the busy loop asks.

    def look(self, has_work: bool) -> bool:
        """Take in what came; True: this loop is one of a wave, even if there is no work here.

        Raises:
            EngineLost: there is work, and the group has gone.
        """
        if self._broken is not None:
            if has_work:
                raise self._broken
            return False
        self._tell(self._waves.look(has_work))
        return self._waves.runs

    async def keep_step(self, has_work: bool) -> None:
        """Count a step that is done, and vote if that is due.

        Raises:
            EngineLost: the vote failed, and with it the group.
        """
        if not self._waves.step():
            return
        try:
            tally = await self._ballots.vote(self._waves.ballot(has_work))
        except (TimeoutError, ConnectionError) as error:
            wave, step = self.stamp
            self._broken = EngineLost(
                f"engine {self._engine} is lost with its group: the vote at step {step} of wave "
                f"{wave} {error}",
                engine=self._engine,
            )
            self._broken.__cause__ = error
            if not self._inbox.closed:
                raise self._broken from error
            # All ranks end at once, some sooner. What was aborted here is about to be drained.
        else:
            self._tell(self._waves.count(tally))

    def _tell(self, words: Iterable[Word]) -> None:
        for word in words:
            _log.debug("engine %s tells the coordinator: %s", self._engine, word)
            self.say(word)
