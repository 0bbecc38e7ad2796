"""The line of one client: who waits for a place, and who goes next, to where.

The one queue there is, however requests are bound. Bound early, whoever is first goes as soon as
there is any engine. Bound late, those that wait are offered to the dispatch in their turn, and one
may go before others that are held for busier engines. Sends nothing and ends nobody: `Flights`
does, and asks again after each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.balancer.admission import AdmissionQueue
from dpkit.balancer.dispatch import ANYWHERE
from dpkit.balancer.late import LateDispatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.abc import Pass
    from dpkit.balancer.admission import AdmissionStatistics, Ticket
    from dpkit.balancer.dispatch import EarlyDispatch
    from dpkit.balancer.view import LoadView
    from dpkit.messages import EngineId
    from dpkit.names import Binding
    from dpkit.nursery.flight import Flight, Limits

SCAN = 32
"""As many are offered in a pass: those behind wait for the next one. With 8, 16 or 128 the 99th
percentile of the time to first token is the same on the traces tried. Those do not count that are
pinned to an engine for which a pinned one is held already: however many they are, others go."""


class Line:
    """Flights that wait, those for engines that are away apart from the others.

    Args:
        dispatch: Says where there is room.
        limits: How many may wait, and how long.
    """

    def __init__(self, dispatch: EarlyDispatch, limits: Limits) -> None:
        self._queue = AdmissionQueue(limits.max_queued, patience=limits.queue_timeout)
        self._waiting: dict[str, Flight] = {}  # those in the queue
        self._away: dict[str, dict[str, Flight]] = {}  # pinned to engines that are not here now
        self._pass: Pass | None = None
        self._rest: Iterator[Ticket] = iter(())  # not offered in this pass yet
        self._held_for: set[str] = set()  # engines for which pinned ones are held in this pass
        self._pinned = 0  # of those in the queue
        self._as_of = 0  # `moves` when it was opened
        self._has_sent = False
        self.use(dispatch, limits)

    def __repr__(self) -> str:
        return f"<Line: {len(self)} wait, {len(self) - len(self._queue)} for engines not here>"

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._away.values()))

    def __bool__(self) -> bool:
        """Whether somebody waits who may have a turn."""
        return bool(self._queue)

    def use(self, dispatch: EarlyDispatch, limits: Limits) -> None:
        """Go on with another dispatch, and other limits; nobody loses his place."""
        self._queue.max_queued = limits.max_queued
        self._late = dispatch if isinstance(dispatch, LateDispatch) else None
        self._dispatch = dispatch
        self.look_again()

    @property
    def binding(self) -> Binding:
        """When its flights get an engine."""
        return self._dispatch.binding

    @property
    def view(self) -> LoadView:
        """What is known of the engines."""
        return self._dispatch.books[1]

    @property
    def unreported(self) -> tuple[EngineId, ...]:
        """Engines that they may get, and that have told nothing of their work."""
        return tuple(load.engine for load in self.view.loads if load.report is None)

    def statistics(self) -> AdmissionStatistics:
        """The queue, now and since the start."""
        return self._queue.statistics()

    def retry_after(self, now: float) -> float:
        """Seconds in which all that wait now are gone."""
        return self._queue.retry_after(now)

    # Who comes and leaves.

    def put(self, flight: Flight, *, front: bool = False) -> None:
        """Let a flight wait.

        Args:
            flight: Which one.
            front: It had its turn before, and lost its place by no fault of its own.

        Raises:
            Overloaded: too many wait; never for one that was in front before.
        """
        age = 0.0 if self._late is None else self._late.age(self._prospect(flight, self._late))
        entry = flight.entry(age)
        if front:
            flight.ticket = self._queue.put_front(entry)
        else:
            beside = len(self) - len(self._queue)
            flight.ticket = self._queue.put(entry, trio.current_time(), beside=beside)
        self._waiting[entry.request_id] = flight
        self._pinned += flight.request.engine is not None
        self.look_again()

    def leave(self, flight: Flight) -> None:
        """Take a flight out of turn, if it is here: it wants no place any more."""
        request_id = flight.request.request_id
        if flight.ticket is not None:
            self._queue.withdraw(flight.ticket)
            self._forget(flight)
            self.look_again()
        elif self._away and (away := self._away.get(str(flight.request.engine))):
            away.pop(request_id, None)

    def recall(self, name: str) -> None:
        """Let those have their turn that are pinned to an engine: it is back, or gone for good."""
        for flight in self._away.pop(name, {}).values():
            self.put(flight, front=True)

    # Who goes.

    def admit(self, flight: Flight) -> int | None:
        """Where a flight that has just come goes at once; None: it is to be `put`."""
        pin = flight.request.engine
        if self._queue or not self._dispatch.has_room() or not self._dispatch.has_room(pin):
            return None
        if self._late is None:
            return ANYWHERE
        return self._offer(flight, self._late.open_pass(), self._late)

    def next(self) -> tuple[Flight, int] | None:
        """Take out the flight that goes next, and say where to; None: nobody can go now.

        It must be placed, or ended, before this is asked again.
        """
        if not self._dispatch.has_room():
            return None
        return self._next_early() if self._late is None else self._next_late(self._late)

    def look_again(self) -> None:
        """What was decided on those that wait holds no more."""
        self._pass = None

    def _next_early(self) -> tuple[Flight, int] | None:
        while self._queue:
            [ticket] = self._queue.in_turn(1)
            flight = self._take(ticket)
            if self._dispatch.has_room(flight.request.engine):
                return flight, ANYWHERE
            self._send_away(flight)
        return None

    def _next_late(self, late: LateDispatch) -> tuple[Flight, int] | None:
        while self._queue:
            if self._pass is None or self._as_of != late.moves:
                self._pass, self._as_of, self._has_sent = late.open_pass(), late.moves, False
                self._rest = self._to_offer()
            for ticket in self._rest:
                if self._pass.is_over:
                    return None
                flight = self._waiting[ticket.entry.request_id]
                if not late.has_room(flight.request.engine):
                    self._send_away(self._take(ticket))
                elif (index := self._offer(flight, self._pass, late)) is not None:
                    self._has_sent = True
                    return self._take(ticket), index
                elif flight.request.engine is not None:
                    self._held_for.add(flight.request.engine)
            if not self._has_sent:
                return None
            self._pass = None  # there may be room yet for those that were not looked at
        return None

    def _to_offer(self) -> Iterator[Ticket]:
        """Those that a new pass looks at."""
        self._held_for.clear()
        looked_at = 0
        for ticket in self._queue.in_turn(SCAN + self._pinned):
            if self._waiting[ticket.entry.request_id].request.engine in self._held_for:
                continue
            yield ticket
            if (looked_at := looked_at + 1) == SCAN:
                return

    def _offer(self, flight: Flight, to: Pass, late: LateDispatch) -> int | None:
        pin = flight.request.engine
        index = None if pin is None else late.index_of(pin)
        if pin is not None and index is None:
            return ANYWHERE  # there is no such engine, which `place` says
        return to.offer(self._prospect(flight, late), index)

    @staticmethod
    def _prospect(flight: Flight, late: LateDispatch) -> object:
        if flight.prospect is None:
            flight.prospect = late.prepare(flight.request)
        return flight.prospect

    def _take(self, ticket: Ticket) -> Flight:
        flight = self._waiting[ticket.entry.request_id]
        self._forget(flight)
        self._queue.take(ticket, trio.current_time())
        return flight

    def _forget(self, flight: Flight) -> None:
        """After it has left the queue, or as it does."""
        flight.ticket = None
        del self._waiting[flight.request.request_id]
        self._pinned -= flight.request.engine is not None

    def _send_away(self, flight: Flight) -> None:
        """It must not keep others waiting that may go anywhere."""
        away = self._away.setdefault(str(flight.request.engine), {})
        away[flight.request.request_id] = flight
