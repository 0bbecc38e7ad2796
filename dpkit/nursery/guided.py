"""One client's line, and whose turn it is there: its own dispatch says so, or everybody's arbiter.

While there is an arbiter (`dpkit.nursery.arbiter`), it is told of all that wait here, and whoever
it says goes. All of them stand here nevertheless: when it is gone, the line goes on by itself, by a
dispatch that binds early, and nobody has lost his place. Ends nobody: `Flights` does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dpkit.balancer.dispatch import ANYWHERE
from dpkit.names import Binding
from dpkit.nursery.flight import Flight
from dpkit.nursery.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dpkit.balancer.dispatch import EarlyDispatch
    from dpkit.nursery.arbiter import Grant, Seat
    from dpkit.nursery.flight import Limits

_log = logging.getLogger(__name__)


class GuidedLine(Line[Flight]):
    """Flights of one client that wait. Arguments as of `Line`; `flights` are all of this client."""

    def __init__(
        self,
        dispatch: EarlyDispatch,
        limits: Limits,
        send: Callable[[Flight, int], None],
        has_room: Callable[[], bool],
        flights: Mapping[str, Flight],
    ) -> None:
        super().__init__(dispatch, limits, send, has_room)
        self.seat: Seat | None = None
        """At the arbiter there is; None: there is none now."""
        self._flights = flights

    def __bool__(self) -> bool:
        """Whether somebody waits who may have a turn, anybody's at the arbiter."""
        return super().__bool__() if self.seat is None else self.seat.is_crowded

    @property
    def binding(self) -> Binding:
        """When its flights get an engine, as things are now."""
        return super().binding if self.seat is None else Binding.LATE

    def attend(self, seat: Seat) -> None:
        """Follow an arbiter from now on; `fill` when all clients do."""
        for name in list(self._away):
            self.recall(name)
        self.seat = seat
        for flight in self._flights.values():
            seat.adopt(flight)
        for ticket in self._queue.in_turn(len(self._queue)):
            waiting = self._waiting[ticket.entry.request_id]
            seat.ask(waiting, front=self._queue.is_back(ticket))

    def desert(self) -> None:
        """Go on without one; `fill` when all clients do."""
        self.seat = None
        self.look_again()

    # What a client does.

    def fill(self) -> None:
        """Send whoever is next, for as long as there is room."""
        if self.seat is None:
            super().fill()
        else:
            self.seat.fill()

    def next(self) -> tuple[Flight, int] | None:
        """As of `Line`; if the policy fails at it, whoever is first goes where that picks."""
        try:
            return super().next()
        except Exception as error:  # noqa: BLE001 - whatever a policy raises
            _log.error("nobody can be held, and whoever is first is picked for: %s", error)
            self.look_again()
            return self._next_early()

    def admit(self, waiter: Flight) -> int | None:
        """Where a flight that has just come goes at once; None: it is to be `put`."""
        if self.seat is None:
            return super().admit(waiter)
        grant = self.seat.admit(waiter) if self.has_room() else None
        return None if grant is None else self._index(waiter, grant)

    def put(self, waiter: Flight, *, front: bool = False) -> None:
        """Let a flight wait; see `Line.put`."""
        super().put(waiter, front=front)
        if self.seat is not None:
            try:
                self.seat.ask(waiter, front=front)
            except BaseException:  # a policy's bug must not leave anybody here who waits in vain
                super().leave(waiter)
                raise

    def leave(self, waiter: Flight) -> None:
        """Take a flight out of turn, wherever it waits: it wants no place any more."""
        super().leave(waiter)
        if self.seat is not None:
            self.seat.leave(waiter.request.request_id)

    def on_answered(self, flight: Flight) -> None:
        """One that went from here has its first token."""
        if self.seat is not None:
            self.seat.on_answered(flight.request.request_id)

    def on_released(self, flight: Flight, *, finished: bool) -> None:
        """One that went from here is on its engine no more."""
        if self.seat is not None:
            request_id = flight.request.request_id
            self.seat.leave(request_id, flight.delivered, finished=finished)

    # What its arbiter says.

    def on_grant(self, request_id: str, grant: Grant) -> bool:
        """It is a request's turn; False: that does not wait here any more."""
        if (flight := self._waiting.get(request_id)) is None or flight.ticket is None:
            return False
        self._send(self._take(flight.ticket), self._index(flight, grant))
        return True

    def _index(self, flight: Flight, grant: Grant) -> int:
        """The engine in this client's own view; by its own policy, if it knows none such."""
        index = None if grant.engine is None else self._dispatch.books[1].find_life(grant.engine)
        flight.why = None if index is None else grant.why
        return ANYWHERE if index is None else index
