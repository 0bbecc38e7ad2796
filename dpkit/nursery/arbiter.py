"""The arbiter of several clients that bind late: one queue and one set of books for all of them.

Each client by itself knows only what it sends: where KV is short, what one holds back for a long
prompt the next one takes. So whoever waits asks here (`Seat`), and is told when it is his turn, and
for which engine (`Grant`); the client then charges it in its own books, and sends it by its own
link. Only ids, sizes and names of blocks are looked at. A client that leaves takes its request out
of the queue; a grant that comes too late for that is given back at once.

One arbiter is one life: what it knows dies with it (`dpkit.nursery.arbitration`), and clients go on
without.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import trio
from attrs import define, evolve

from dpkit.balancer.dispatch import ANYWHERE
from dpkit.nursery.flight import Limits
from dpkit.nursery.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpkit.balancer.admission import Entry, Ticket
    from dpkit.balancer.dispatch import Placement, Why
    from dpkit.balancer.late import LateDispatch
    from dpkit.messages import EngineId, GenerateRequest
    from dpkit.nursery.flight import Flight
    from dpkit.nursery.guided import GuidedLine

UNLIMITED = Limits(max_queued=sys.maxsize)
"""Each client has refused by then whom it has no room for."""


class Grant(NamedTuple):
    """Whose turn it is may be sent."""

    engine: EngineId | None
    """The life of an engine that it is for; None: the client is to see for itself, and say what is
    wrong with it."""
    why: Why | None = None


SEE_FOR_YOURSELF = Grant(None)


@define(eq=False)
class Petition:
    """One request that waits for its turn, or has had it and is on an engine."""

    request: GenerateRequest  # by a name that no other client's has
    flight: Flight
    seat: Seat
    ticket: Ticket | None = None
    prospect: object = None
    placement: Placement | None = None

    @property
    def admitted_at(self) -> float:
        """When its client admitted it."""
        return self.flight.admitted_at

    def entry(self, age: float = 0.0) -> Entry:
        """The request as the queue sees it."""
        return evolve(self.flight.entry(age), request_id=self.request.request_id)


class Seat:
    """One client's place at an arbiter."""

    def __init__(self, arbiter: Arbiter, number: int, line: GuidedLine) -> None:
        self.line = line
        self.petitions: dict[str, Petition] = {}
        """By the names that its client has for them."""
        self._arbiter = arbiter
        self._number = number

    @property
    def is_crowded(self) -> bool:
        """Whether anybody waits, at whichever seat."""
        return bool(self._arbiter.line)

    def fill(self) -> None:
        """Grant what can be granted, to anybody."""
        self._arbiter.line.fill()

    def adopt(self, flight: Flight) -> None:
        """Count a flight that went before there was this arbiter, if it is on an engine."""
        if flight.engine is None:
            return
        petition = self._petition(flight)
        if self._arbiter.adopt(petition, flight.engine):
            self.petitions[flight.request.request_id] = petition

    def ask(self, flight: Flight, *, front: bool = False) -> None:
        """Let a flight wait for its turn, in front if it has had one."""
        petition = self._petition(flight)
        self._arbiter.line.put(petition, front=front)
        self.petitions[flight.request.request_id] = petition

    def admit(self, flight: Flight) -> Grant | None:
        """Let a flight go at once, if nobody waits; None: it is to `ask`."""
        petition = self._petition(flight)
        if (index := self._arbiter.line.admit(petition)) is None:
            return None
        return self._arbiter.charge(petition, index)

    def leave(self, request_id: str, output: Sequence[int] = (), *, finished: bool = False) -> None:
        """Forget a request, whether it waits or is on an engine. Idempotent.

        Args:
            request_id: Which.
            output: Its tokens so far.
            finished: The model ended it.
        """
        if (petition := self.petitions.pop(request_id, None)) is not None:
            self._arbiter.forget(petition, output, finished=finished)

    def on_answered(self, request_id: str) -> None:
        """A request has its first token."""
        petition = self.petitions.get(request_id)
        if petition is not None and petition.placement is not None:
            self._arbiter.dispatch.on_answered(petition.placement)

    def audit(self) -> Iterator[str]:
        """Every contradiction between its client's line and its petitions."""
        waiting = {name for name, each in self.petitions.items() if each.placement is None}
        if waiting != (queued := set(self.line.waiting)):
            who = f"client {self._number}"
            yield f"{sorted(queued)} wait at {who}, {sorted(waiting)} for it at the arbiter"
        for name, each in self.petitions.items():
            if each.placement is not None and each.flight.engine != each.placement.engine:
                granted = each.placement.engine
                yield f"{name} was granted {granted}, and is on {each.flight.engine}"

    def _petition(self, flight: Flight) -> Petition:
        name = f"{self._number}/{flight.request.request_id}"
        return Petition(evolve(flight.request, request_id=name), flight, self)


class Arbiter:
    """One life of it.

    Args:
        dispatch: Keeps the books of all clients.
        on_failed: Told what its policy raised when nobody's request in particular was looked at.
    """

    def __init__(self, dispatch: LateDispatch, on_failed: Callable[[Exception], None]) -> None:
        self.dispatch = dispatch
        self.seats: list[Seat] = []
        self.line = Everybody(dispatch, self.seats, self._grant, on_failed)

    def __repr__(self) -> str:
        return f"<Arbiter of {len(self.seats)} clients: {len(self.line)} wait>"

    def seat(self, line: GuidedLine) -> Seat:
        """A place for one more client."""
        seat = Seat(self, len(self.seats), line)
        self.seats.append(seat)
        return seat

    def adopt(self, petition: Petition, engine: EngineId) -> bool:
        """Count a request that is on an engine already; False: nobody may be sent there now."""
        if (index := self.dispatch.books[1].find_life(engine)) is None:
            return False
        petition.placement = self.dispatch.place(petition.request, index, now=trio.current_time())
        if petition.flight.answered:
            self.dispatch.on_answered(petition.placement)
        return True

    def charge(self, petition: Petition, index: int) -> Grant:
        """Count a request whose turn it is where it goes."""
        if index == ANYWHERE:
            return SEE_FOR_YOURSELF
        try:
            placement = self.dispatch.place(petition.request, index, now=trio.current_time())
        except Exception:  # noqa: BLE001 - whatever a policy raises: the client's raises it to the reader
            self.line.look_again()
            return SEE_FOR_YOURSELF
        petition.placement = placement
        petition.seat.petitions[petition.flight.request.request_id] = petition
        return Grant(placement.engine, placement.why)

    def forget(self, petition: Petition, output: Sequence[int], *, finished: bool) -> None:
        """Take a request out of the queue, or off its engine's books."""
        if petition.placement is None:
            self.line.leave(petition)
        else:
            self.dispatch.release(petition.placement, output, finished=finished)

    def audit(self) -> Iterator[str]:
        """Every contradiction in the books of all, in words."""
        ledger, _ = self.dispatch.books
        yield from (f"the arbiter: {problem}" for problem in ledger.audit())
        petitions = [each for seat in self.seats for each in seat.petitions.values()]
        counted, granted = ledger.statistics().inflight, sum(bool(p.placement) for p in petitions)
        if counted != granted:
            yield f"the arbiter counts {counted} requests on engines, and granted {granted} of them"
        for seat in self.seats:
            yield from seat.audit()

    def _grant(self, petition: Petition, index: int) -> None:
        seat, request_id = petition.seat, petition.flight.request.request_id
        del seat.petitions[request_id]
        if not seat.line.on_grant(request_id, self.charge(petition, index)):
            seat.leave(request_id)


class Everybody(Line[Petition]):
    """The requests of all clients that wait. One that is full lets those of others go."""

    def __init__(
        self,
        dispatch: LateDispatch,
        seats: Sequence[Seat],
        send: Callable[[Petition, int], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(dispatch, UNLIMITED, send, lambda: True)
        self._seats = seats
        self._on_failed = on_failed

    def next(self) -> tuple[Petition, int] | None:
        """As of `Line`. What goes wrong is the arbiter's own, and no fault of who caused this."""
        try:
            return super().next()
        except Exception as error:  # noqa: BLE001 - whatever a policy raises
            self._on_failed(error)
            return None

    def _may_go(self, waiter: Petition) -> bool:
        return waiter.seat.line.has_room()

    def _stopped(self) -> int:
        return sum(len(seat.line) for seat in self._seats if not seat.line.has_room())
