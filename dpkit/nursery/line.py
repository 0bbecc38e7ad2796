"""A line: who waits for a place, and who goes next, to where.

The one queue there is, however requests are bound. Bound early, whoever is first goes as soon as
there is any engine. Bound late, those that wait are offered to the dispatch in their turn, and one
may go before others that are held for busier engines. Whose they are, one client's or everybody's,
is nothing to it; it ends nobody.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio

from dpkit.balancer.admission import AdmissionQueue
from dpkit.balancer.dispatch import ANYWHERE
from dpkit.balancer.late import LateDispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dpkit.abc import Pass
    from dpkit.balancer.admission import AdmissionStatistics, Entry, Ticket
    from dpkit.balancer.dispatch import EarlyDispatch
    from dpkit.balancer.view import LoadView
    from dpkit.messages import EngineId, GenerateRequest
    from dpkit.names import Binding
    from dpkit.nursery.flight import Limits

_log = logging.getLogger(__name__)

SCAN = 32
"""As many are offered in a pass: those behind wait for the next one. With 8, 16 or 128 the 99th
percentile of the time to first token is the same on the traces tried. Those do not count that are
pinned to an engine for which a pinned one is held already: however many they are, others go."""


class Waiter(Protocol):
    """Who stands in a line."""

    ticket: Ticket | None
    """While it does, unless its engine is away."""
    prospect: object
    """What the policy wants to know of it, made when it is first wanted."""

    @property
    def request(self) -> GenerateRequest:
        """As an engine gets it."""

    @property
    def admitted_at(self) -> float:
        """When it came."""

    def entry(self, age: float = 0.0) -> Entry:
        """The request as the queue sees it."""


W = TypeVar("W", bound=Waiter)


class Line(Generic[W]):
    """Those that wait, those for engines that are away apart from the others.

    A request that the policy fails at holding goes at once, by a pick.

    Args:
        dispatch: Says where there is room.
        limits: How many may wait, and how long.
        send: Takes whoever goes, and the index of the engine; must place or end it at once.
        has_room: Says whether anybody may go.
    """

    def __init__(
        self,
        dispatch: EarlyDispatch,
        limits: Limits,
        send: Callable[[W, int], None],
        has_room: Callable[[], bool],
    ) -> None:
        self.has_room = has_room
        self._send = send
        self._filling = False
        self._queue = AdmissionQueue(limits.max_queued, patience=limits.queue_timeout)
        self._waiting: dict[str, W] = {}  # those in the queue
        self._away: dict[str, dict[str, W]] = {}  # pinned to engines that are not here now
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
        self._queue.max_queued, self._queue.patience = limits.max_queued, limits.queue_timeout
        self._late = dispatch if isinstance(dispatch, LateDispatch) else None
        self._dispatch = dispatch
        self.look_again()

    @property
    def binding(self) -> Binding:
        """When those that wait get an engine."""
        return self._dispatch.binding

    @property
    def waiting(self) -> Collection[str]:
        """Ids of those in the queue."""
        return self._waiting.keys()

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

    def put(self, waiter: W, *, front: bool = False) -> None:
        """Let somebody wait.

        Args:
            waiter: Who.
            front: It had its turn before, and lost its place by no fault of its own.

        Raises:
            Overloaded: too many wait; never for one that was in front before.
        """
        if front:  # it must find its place again, whatever a policy would say of it
            entry = waiter.entry()
            waiter.ticket = self._queue.put_front(entry)
        else:
            late = self._late
            entry = waiter.entry(0.0 if late is None else late.age(self._prospect(waiter, late)))
            beside = len(self) - len(self._queue)
            waiter.ticket = self._queue.put(entry, waiter.admitted_at, beside=beside)
        self._waiting[entry.request_id] = waiter
        self._pinned += waiter.request.engine is not None
        self.look_again()

    def leave(self, waiter: W) -> None:
        """Take somebody out of turn who is here: he wants no place any more."""
        request_id = waiter.request.request_id
        if waiter.ticket is not None:
            self._queue.withdraw(waiter.ticket)
            self._forget(waiter)
            self.look_again()
        elif self._away and (away := self._away.get(str(waiter.request.engine))):
            away.pop(request_id, None)

    def recall(self, name: str) -> None:
        """Let those have their turn that are pinned to an engine: it is back, or gone for good."""
        for waiter in self._away.pop(name, {}).values():
            self.put(waiter, front=True)

    # Who goes.

    def admit(self, waiter: W) -> int | None:
        """Where somebody who has just come goes at once; None: he is to be `put`."""
        pin = waiter.request.engine
        if self._queue or not self.has_room():
            return None
        if not (self._dispatch.has_room() and self._dispatch.has_room(pin)):
            return None
        if self._late is None:
            return ANYWHERE
        return self._offer(waiter, self._late.open_pass(), self._late)

    def fill(self) -> None:
        """Send whoever is next, for as long as there is room."""
        if self._filling:
            return  # called back from within: the loop goes on below
        self._filling = True
        try:
            while self and self.has_room() and (found := self.next()) is not None:
                self._send(*found)
        finally:
            self._filling = False

    def next(self) -> tuple[W, int] | None:
        """Take out whoever goes next, and say where to; None: nobody can go now.

        It must be placed, or ended, before this is asked again.
        """
        if not self._dispatch.has_room():
            return None
        return self._next_early() if self._late is None else self._next_late(self._late)

    def look_again(self) -> None:
        """What was decided on those that wait holds no more."""
        self._pass = None

    def _next_early(self) -> tuple[W, int] | None:
        while self._queue:
            [ticket] = self._queue.in_turn(1)
            waiter = self._take(ticket)
            if self._dispatch.has_room(waiter.request.engine):
                return waiter, ANYWHERE
            self._send_away(waiter)
        return None

    def _next_late(self, late: LateDispatch) -> tuple[W, int] | None:
        while self._queue:
            if self._pass is None or self._as_of != late.moves:
                self._pass, self._as_of, self._has_sent = late.open_pass(), late.moves, False
                self._rest = self._to_offer()
            for ticket in self._rest:
                if self._pass.is_over:
                    return None
                waiter = self._waiting[ticket.entry.request_id]
                if not late.has_room(waiter.request.engine):
                    self._send_away(self._take(ticket))
                elif (index := self._offer(waiter, self._pass, late)) is not None:
                    self._has_sent = True
                    return self._take(ticket), index
                elif waiter.request.engine is not None:
                    self._held_for.add(waiter.request.engine)
            if not self._has_sent:
                return None
            self._pass = None  # there may be room yet for those that were not looked at
        return None

    def _to_offer(self) -> Iterator[Ticket]:
        """Those that a new pass looks at."""
        self._held_for.clear()
        looked_at = 0
        for ticket in self._queue.in_turn(SCAN + self._pinned + self._stopped()):
            waiter = self._waiting[ticket.entry.request_id]
            if waiter.request.engine in self._held_for or not self._may_go(waiter):
                continue
            yield ticket
            if (looked_at := looked_at + 1) == SCAN:
                return

    def _may_go(self, waiter: W) -> bool:  # noqa: ARG002 - a hook
        """Whether this one may be sent, should there be room for it on an engine."""
        return True

    def _stopped(self) -> int:
        """How many at most may not."""
        return 0

    def _offer(self, waiter: W, to: Pass, late: LateDispatch) -> int | None:
        pin = waiter.request.engine
        index = None if pin is None else late.index_of(pin)
        if pin is not None and index is None:
            return ANYWHERE  # there is no such engine, which `place` says
        try:
            return late.offer(to, self._prospect(waiter, late), index)
        except Exception as error:  # noqa: BLE001 - whatever a policy raises
            name = waiter.request.request_id
            _log.error("request %s cannot be held, and is picked for: %s", name, error)
            self.look_again()
            return ANYWHERE  # if it fails at that as well, the reader is told

    @staticmethod
    def _prospect(waiter: W, late: LateDispatch) -> object:
        if waiter.prospect is None:
            waiter.prospect = late.prepare(waiter.request)
        return waiter.prospect

    def _take(self, ticket: Ticket) -> W:
        waiter = self._waiting[ticket.entry.request_id]
        self._forget(waiter)
        self._queue.take(ticket, trio.current_time())
        return waiter

    def _forget(self, waiter: W) -> None:
        """After it has left the queue, or as it does."""
        waiter.ticket = None
        del self._waiting[waiter.request.request_id]
        self._pinned -= waiter.request.engine is not None

    def _send_away(self, waiter: W) -> None:
        """It must not keep others waiting that may go anywhere."""
        away = self._away.setdefault(str(waiter.request.engine), {})
        away[waiter.request.request_id] = waiter
