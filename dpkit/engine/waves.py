"""The waves of an engine that steps together with others, as one literal table.

A model whose experts are spread over all ranks computes a step at all of them at once, or at none:
a rank without work does a dummy step while another has work. A *wave* is such a stretch of steps,
from the first request at any rank to the vote that finds nobody with work left. Then all sleep,
until a rank gets a request: it begins the next wave, and the coordinator calls the others.

This is one rank's half. It knows nothing of sockets, clocks and models, nor how a vote is taken.
The coordinator's half is `dpkit.balancer.coordinator`; `dpkit.nursery.lockstep` drives this one.

Messages and rules are those of vLLM 0.33.0. Within the group, where no vLLM engine is ever mixed
in, more is agreed on than there:

- The number of the wave: a client's stamp may be of an earlier life of the group, and a rank whose
  wave is ahead of the others' takes their start for a stale one.
- Which pause is meant: ranks that have been resumed a different number of times wait for each
  other, as one of them would fall asleep in a pause that is over.
- A start that comes while all are paused is kept until this rank is resumed. vLLM ignores it, and
  has every resume wait for all the others.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


AHEAD = 2**40
"""Whoever speaks of a wave that is so many later is not believed: no group comes as far, with a
thousand waves a second for decades. Were there a last wave that all believe in, the first client to
name it would keep all ranks but its own from being called to the next."""


class Phase(Enum):
    """Where an engine is between waves."""

    ASLEEP = "no wave runs"
    AWAKE = "its wave runs"
    PAUSING = "its wave runs, and it votes for a pause"
    WISHING = "no wave runs; it wishes for a pause, and not all others do"
    PAUSED = "all have agreed to pause"
    CALLED = "paused; a wave has begun, which it joins once it is resumed"


class Event(Enum):
    """What may happen to it, between two of its steps."""

    REQUEST = auto()  # it has work
    CALL = auto()  # START_DP_WAVE, neither stale nor its own
    PAUSE = auto()
    RESUME = auto()
    WORK_LEFT = auto()  # votes: somebody has work
    ALL_DONE = auto()  # nobody has
    ALL_PAUSE = auto()  # nobody has, and all want a pause


class Act(Enum):
    """What it does about it."""

    START = auto()  # says start_wave
    COMPLETE = auto()  # says wave_complete, if it speaks for all; then the next wave is due


_A, _W, _P, _I, _X, _C = Phase  # in the order above
_E = Event

TABLE: dict[tuple[Phase, Event], tuple[Phase, tuple[Act, ...]]] = {
    (_A, _E.REQUEST): (_W, (Act.START,)),
    (_W, _E.REQUEST): (_W, ()),
    (_P, _E.REQUEST): (_P, ()),  # it had come before the pause, and is finished first
    (_I, _E.REQUEST): (_P, (Act.START,)),  # likewise
    (_A, _E.CALL): (_W, ()),
    (_W, _E.CALL): (_W, ()),
    (_P, _E.CALL): (_P, ()),
    (_I, _E.CALL): (_P, ()),
    (_X, _E.CALL): (_C, ()),
    (_C, _E.CALL): (_C, ()),
    (_A, _E.PAUSE): (_P, (Act.START,)),  # a pause takes a vote, and a vote takes a wave
    (_W, _E.PAUSE): (_P, ()),
    (_P, _E.PAUSE): (_P, ()),
    (_I, _E.PAUSE): (_I, ()),  # whoever joins the wish begins the wave
    (_X, _E.PAUSE): (_X, ()),
    (_C, _E.PAUSE): (_C, ()),
    (_A, _E.RESUME): (_A, ()),
    (_W, _E.RESUME): (_W, ()),
    (_P, _E.RESUME): (_W, ()),
    (_I, _E.RESUME): (_A, ()),
    (_X, _E.RESUME): (_A, ()),
    (_C, _E.RESUME): (_W, ()),
    (_W, _E.WORK_LEFT): (_W, ()),
    (_P, _E.WORK_LEFT): (_P, ()),
    (_W, _E.ALL_DONE): (_A, (Act.COMPLETE,)),
    (_P, _E.ALL_DONE): (_I, (Act.COMPLETE,)),
    (_P, _E.ALL_PAUSE): (_X, (Act.COMPLETE,)),
}
"""What is not in it cannot be: a paused engine takes no requests, one that sleeps does not vote."""


class Word(NamedTuple):
    """What the coordinator is told: one of the two, by the names of the wire."""

    start_wave: int | None = None
    wave_complete: int | None = None

    def __str__(self) -> str:
        if self.start_wave is not None:
            return f"start_wave {self.start_wave}"
        return f"wave_complete {self.wave_complete}"


class Ballot(NamedTuple):
    """What one rank puts into a vote. The greatest of each number, over all ranks, comes out."""

    has_work: int
    goes_on: int  # 1: it wants no pause
    resumes: int
    resumes_below: int  # minus `resumes`, so that both ends of what ranks say come out
    wave: int
    step: int
    step_below: int  # likewise

    @classmethod
    def tally(cls, ballots: Iterable[Ballot]) -> Ballot:
        """Take a vote: what an all-reduce by maximum does."""
        return cls(*map(max, zip(*ballots, strict=True)))


class EngineWaves:
    """One rank's state through one life of its group.

    What comes from outside is noted at any time and taken in by `look`, once a loop, before the
    step: a rank that has voted must not change its mind, or its wave, until it knows the result.

    Args:
        rank: The engine's.
        speaks: It tells the coordinator of completed waves; one rank of a group does: the first.
        sync_interval: Steps from one vote to the next.
    """

    def __init__(self, rank: int, *, speaks: bool, sync_interval: int) -> None:
        self.wave = 0
        self.step_counter = 0
        """Steps of this wave so far, dummy ones too: the same at every rank whenever they vote."""
        self.phase = Phase.ASLEEP
        self._rank = rank
        self._speaks = speaks
        self._sync_interval = sync_interval
        self._notes: list[Callable[[], list[Word]]] = []
        self._stamp = 0
        self._resumes = 0  # that ended a pause, or the wish for one

    def __repr__(self) -> str:
        return (
            f"<EngineWaves of rank {self._rank}: wave {self.wave}, step {self.step_counter}, "
            f"{self.phase.value}>"
        )

    @property
    def runs(self) -> bool:
        """Whether it steps, with work or without."""
        return self.phase in {Phase.AWAKE, Phase.PAUSING}

    @property
    def is_paused(self) -> bool:
        """Whether all have agreed to pause, and nothing has been asked of it since."""
        return self.phase in {Phase.PAUSED, Phase.CALLED} and not self._notes

    def note_request(self, current_wave: int) -> None:
        """A request comes, with the number of the wave that its client takes for the present one.

        Those noted before `look` are those that this loop has taken in.
        """
        if current_wave < self.wave + AHEAD:
            self._stamp = max(self._stamp, current_wave)

    def note_start(self, wave: int, excluded: int | None) -> None:
        """START_DP_WAVE came, perhaps late, perhaps twice."""
        self._note(lambda: self._on_start(wave, excluded))

    def note_pause(self) -> None:
        """It is to pause, as soon as all are; its frontends are refused by now."""
        self._note(lambda: self._on(Event.PAUSE))

    def note_resume(self) -> None:
        """It is to go on."""
        self._note(self._on_resume)

    def _note(self, take_in: Callable[[], list[Word]]) -> None:
        self._notes.append(take_in)

    def look(self, has_work: bool) -> list[Word]:
        """Take in what was noted, and whether there is work; what to tell the coordinator."""
        said: list[Word] = []
        notes, self._notes = self._notes, []
        for take_in in notes:
            said += take_in()
        stamp, self._stamp = self._stamp, 0
        if has_work:  # without, all that came has gone again, and its stamp with it
            self.wave = max(self.wave, stamp)
            if not self.runs:
                said += self._on(Event.REQUEST)
        return said

    def step(self) -> bool:
        """A step is done, with work or without; True: a vote is due."""
        self.step_counter += 1
        return self.step_counter == 1 or self.step_counter % self._sync_interval == 0

    def ballot(self, has_work: bool) -> Ballot:
        """What to put into the vote."""
        return Ballot(
            has_work=has_work,
            goes_on=self.phase is not Phase.PAUSING,
            resumes=self._resumes,
            resumes_below=-self._resumes,
            wave=self.wave,
            step=self.step_counter,
            step_below=-self.step_counter,
        )

    def count(self, tally: Ballot) -> list[Word]:
        """Take in what came out of the vote; what to tell the coordinator.

        Raises:
            InternalError: ranks voted at different steps.
        """
        if not tally.step == -tally.step_below == self.step_counter:
            raise InternalError(
                f"ranks vote at different steps of wave {self.wave}, from {-tally.step_below} to "
                f"{tally.step}; rank {self._rank} at {self.step_counter}"
            )
        self.wave = max(self.wave, tally.wave)
        if tally.has_work:
            return self._on(Event.WORK_LEFT)
        same_pause = tally.resumes == -tally.resumes_below
        is_agreed = same_pause and not tally.goes_on
        return self._on(Event.ALL_PAUSE if is_agreed else Event.ALL_DONE)

    def report(self) -> list[Word]:
        """What to tell a coordinator that may know nothing; at any time, in a vote too."""
        if self.runs:
            return [Word(start_wave=self.wave)]
        return self._completed()

    def _on_start(self, wave: int, excluded: int | None) -> list[Word]:
        if excluded == self._rank or not self.wave <= wave < self.wave + AHEAD:
            return []
        self.wave = wave
        return self._on(Event.CALL)

    def _on_resume(self) -> list[Word]:
        self._resumes += self.phase not in {Phase.ASLEEP, Phase.AWAKE}
        return self._on(Event.RESUME)

    def _on(self, event: Event) -> list[Word]:
        row = TABLE.get((self.phase, event))
        if row is None:
            raise InternalError(f"{self!r} cannot have {event.name}")
        self.phase, acts = row
        return [word for act in acts for word in self._do(act)]

    def _do(self, act: Act) -> list[Word]:
        if act is Act.START:
            return [Word(start_wave=self.wave)]
        self.wave += 1
        self.step_counter = 0
        return self._completed()

    def _completed(self) -> list[Word]:
        is_told = self._speaks and self.wave > 0
        return [Word(wave_complete=self.wave - 1)] if is_told else []
