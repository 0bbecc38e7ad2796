"""Requests that wait on an engine short of memory: had back, as they wait better at the client.

What an engine has been sent it must finish, unless it is asked: what waits there, not begun or
preempted, may be given up. At the client it goes to whichever engine has room first, and others may
pass it that have room now; an engine lets nobody pass who waits. Looks at what engines report, and
asks those for it. The engine's answer decides; whoever owns the requests places them anew. Only
where requests are bound late: else they would be sent at once, to wait again.

An answer that was preempted has its tokens computed anew wherever it goes on, and what it says next
follows from those and its seed alone. So where all engines compute alike nothing is lost by moving
it, whatever `resume` says of answers whose engine was lost.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dpkit.balancer.dispatch import most_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dpkit.abc import EngineLink
    from dpkit.balancer.ledger import Ledger
    from dpkit.balancer.view import LoadView
    from dpkit.messages import EngineId, Room, StepReport
    from dpkit.nursery.flight import Flight


def is_starved(report: StepReport, room: Room) -> bool:
    """Whether requests wait for another reason than that a step has only so many tokens.

    Told after a step: who could not be in it, though it had tokens left, was short of KV blocks, or
    of sequences.
    """
    if not report.waiting or report.scheduled_tokens:
        return False
    step = report.last_step
    return step.decodes + step.prefill_tokens < room.tokens_per_step


def nothing() -> None:
    """There is nothing to ask for."""


class Rescue:
    """One client's.

    Args:
        flights: Its requests, by id.
        links: Its engines.
        rooms: How much these hold and do at once.
        place_anew: Takes a request that its engine has given up.
        on_done: Called when there are no more of these.
    """

    def __init__(
        self,
        flights: Mapping[str, Flight],
        links: Mapping[EngineId, EngineLink],
        rooms: Mapping[EngineId, Room],
        place_anew: Callable[[EngineId, Flight], None],
        on_done: Callable[[], None],
    ) -> None:
        self.taken = 0
        """Requests that were had back so far."""
        self._flights = flights
        self._links = links
        self._rooms = rooms
        self._place_anew = place_anew
        self._on_done = on_done
        self._asked: set[EngineId] = set()  # that have not answered yet

    def forget(self, engine: EngineId) -> None:
        """A life is over: it answers no more."""
        self._asked.discard(engine)

    def look(
        self,
        engine: EngineId,
        report: StepReport,
        books: tuple[Ledger, LoadView],
        *,
        moves: bool,
    ) -> Callable[[], None]:
        """What asks a starved engine for what waits there, once it is called.

        Args:
            engine: Who has just told of a step.
            report: What it told.
            books: Say what was sent there, in which order, and who may be picked now.
            moves: `Limits.moves`; what leaves a cluster may be other than what takes its place.
        """
        room = self._rooms.get(engine)
        if room is None or engine in self._asked or not is_starved(report, room):
            return nothing
        ledger, view = books
        moves = moves and engine in view.engines
        waiting = self._waiting(ledger.requests(engine), report)
        wanted = [name for name, flight in waiting if self._may_move(flight, moves=moves)]
        return partial(self._ask, engine, wanted) if wanted else nothing

    def _ask(self, engine: EngineId, wanted: Sequence[str]) -> None:
        if (link := self._links.get(engine)) is not None:  # else it was lost meanwhile
            self._asked.add(engine)
            link.take_back(wanted, self._on_taken)

    def _waiting(self, sent: Sequence[str], report: StepReport) -> Iterator[tuple[str, Flight]]:
        """Those that probably wait, newest first: an engine runs what came first.

        Of several clients each asks for as many: of those that run the engine gives up none.
        """
        known = sent[: report.acknowledged - report.sent or None]
        for request_id in reversed(known[-report.waiting :]):
            if (flight := self._flights.get(request_id)) is not None:
                yield request_id, flight

    def _may_move(self, flight: Flight, *, moves: bool) -> bool:
        """Whether a request may go to whichever engine: to one too small for it, it could not."""
        request = flight.request
        if request.engine is not None or (flight.delivered and not (moves or request.resume)):
            return False
        needs = most_tokens(request)
        return all(needs <= room.kv_tokens for room in self._rooms.values())

    @trio.lowlevel.enable_ki_protection
    def _on_taken(self, engine: EngineId, request_ids: Sequence[str]) -> None:
        self._asked.discard(engine)
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None and flight.engine == engine:
                self.taken += 1
                self._place_anew(engine, flight)
        self._on_done()
