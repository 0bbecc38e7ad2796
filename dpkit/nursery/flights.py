"""Every request of one client, from admission to its one terminal event.

One synchronous state machine: queued, placed, ended. Whatever happens (an output, a lost engine, a
reader that leaves, a deadline, a drain) is one call that changes all the books at once and returns;
the only thing a request ever waits for is its place, in its own task. Knows engines only as links,
and nothing of prompts or text. Who waits, and who goes next, is `dpkit.nursery.line`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import trio

from dpkit.balancer.retries import RetryBudget
from dpkit.errors import ClusterClosed, EngineLost, describe
from dpkit.names import Binding, Cause, FinishReason
from dpkit.nursery.alarms import Alarms
from dpkit.nursery.events import EventKind
from dpkit.nursery.flight import Flight, cause_of, cut_off, has_budget, lateness, refusal, too_long
from dpkit.nursery.guided import GuidedLine
from dpkit.nursery.inbox import duplicate
from dpkit.nursery.meter import FirstTokens
from dpkit.nursery.rescue import Rescue, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dpkit.abc import EngineLink
    from dpkit.balancer.dispatch import EarlyDispatch, Placement
    from dpkit.balancer.ledger import Ledger
    from dpkit.balancer.view import LoadView
    from dpkit.errors import DpkitError
    from dpkit.messages import EngineId, EngineOutput, Room, Snapshot, StepReport
    from dpkit.nursery.events import EventLog
    from dpkit.nursery.flight import Limits, Receiver, RequestStatistics
    from dpkit.nursery.membership import Membership


class Flights:
    """The table of one client's requests; all methods are for Trio's thread, none waits."""

    def __init__(
        self, dispatch: EarlyDispatch, *, limits: Limits, membership: Membership, events: EventLog
    ) -> None:
        self.causes: Counter[Cause] = Counter()
        """Requests ended, by cause; each is counted once."""
        self.placed = 0
        """Requests on engines, now."""
        self.started = self.retried = self.resumed = self.late_outputs = self.sinks_failed = 0
        self.retries, self.first_tokens = RetryBudget(), FirstTokens()
        self._dispatch = dispatch
        self._limits = limits
        self._membership, self._events = membership, events
        self._links: dict[EngineId, EngineLink] = {}
        self._rooms: dict[EngineId, Room] = {}
        self._flights: dict[str, Flight] = {}
        self.line = GuidedLine(dispatch, limits, self._send, self._has_room, self._flights)
        """Who waits for a place."""
        self.rescue = Rescue(self._flights, self._links, self._rooms, self._place_anew, self.fill)
        self._alarms = Alarms()
        self._refusal: type[DpkitError] | None = None
        self._idle = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._flights) - self.placed

    def use(self, limits: Limits, dispatch: EarlyDispatch | None) -> None:
        """Go on with new limits, and perhaps another dispatch; `fill` when all clients do."""
        self._limits = limits
        if dispatch is not None:
            dispatch.picks = self._dispatch.picks  # counted since the start, whoever picks
            self._dispatch = dispatch
            dispatch.take_over()
            for flight in self._flights.values():
                flight.prospect = None  # of a policy that is gone
        self.line.use(self._dispatch, limits)

    @property
    def picks(self) -> Mapping[str, Mapping[int, int]]:
        """Requests placed so far, by rule and by rank."""
        return self._dispatch.picks

    @property
    def books(self) -> tuple[Ledger, LoadView]:
        """What it knows of its engines; a dispatch for `use` must be of these."""
        return self._dispatch.books

    def placed_on(self, engine: EngineId) -> Iterator[str]:
        """Ids of the requests that one life of an engine has."""
        return (name for name, flight in self._flights.items() if flight.engine == engine)

    def statistics(self) -> tuple[RequestStatistics, ...]:
        """Every request under way, oldest first."""
        return tuple(flight.statistics() for flight in self._flights.values())

    # Engines come and go.

    def connect(self, link: EngineLink, room: Room | None = None) -> None:
        """Make a life of an engine reachable, which holds and does so much, if that is known."""
        self._links[link.engine] = link
        if room is not None:
            self._rooms[link.engine] = room

    def disconnect(self, engine: EngineId) -> None:
        """Forget a life of an engine; its requests have been told."""
        self._links.pop(engine, None)
        self._rooms.pop(engine, None)
        self.rescue.forget(engine)

    def expect(self, name: str) -> None:
        """Let requests wait that are pinned to an engine that will come."""
        self._dispatch.expect(name)

    def dismiss(self, name: str) -> None:
        """Refuse requests that are pinned to an engine that will not come back."""
        self._dispatch.forget(name)
        self.line.recall(name)
        self.fill()

    def offer(self, engine: EngineId, rank: int) -> None:
        """Let the policy pick an engine; `fill` when all clients know."""
        self._dispatch.add(engine, rank, self._rooms.get(engine))
        self.line.recall(engine.name)

    def withdraw(self, engine: EngineId) -> None:
        """Let the policy pick an engine no more; what it holds is not touched."""
        self._dispatch.remove(engine)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the coordinator's newest snapshot."""
        self._dispatch.on_snapshot(snapshot, now=trio.current_time())

    @trio.lowlevel.enable_ki_protection
    def on_report(self, engine: EngineId, report: StepReport) -> None:
        """Take an engine's own word: it may have room now. Called by links, on Trio's thread."""
        self._dispatch.on_report(engine, report, now=trio.current_time())
        if self.line.seat is None:  # else the arbiter hears of it too, and acts on it
            self.relief(engine, report)()  # before more is sent, of which it does not tell
            if self.line:
                self.fill()

    def relief(self, engine: EngineId, report: StepReport) -> Callable[[], None]:
        """What asks for what waits on an engine that has just told that it is short of memory."""
        is_late, moves = self.line.binding is Binding.LATE, self._limits.moves
        return self.rescue.look(engine, report, self.books, moves=moves) if is_late else nothing

    # A request's life.

    @trio.lowlevel.enable_ki_protection
    def begin(self, receiver: Receiver) -> None:
        """Admit a request, and place it at once if there is room.

        Raises:
            RequestRejected: its id is in flight, or it can never be placed.
            Overloaded: the queue is full.
            ClusterClosed, Draining: nothing is admitted any more.
        """
        request = receiver.request
        if self._refusal is not None:
            raise refusal(self._refusal, request.request_id)
        if request.request_id in self._flights:
            raise duplicate(request.request_id)
        times_out_at = trio.current_time() + self._limits.queue_timeout
        flight = Flight(receiver, request, self._limits.retries, times_out_at, self.first_tokens)
        error = too_long(request, self._limits)
        index = self.line.admit(flight) if error is None else None
        if index is None and error is None:
            self.line.put(flight)
        self._flights[request.request_id] = flight
        self.started += 1
        if error is not None:
            self._fail(flight, FinishReason.ERROR, Cause.REFUSED, error)
        else:
            self.fill() if index is None else self._send(flight, index)
        self._set_alarm(flight)

    @trio.lowlevel.enable_ki_protection
    def deliver(self, engine: EngineId, output: EngineOutput) -> None:
        """Route one output to its receiver; called by links, on Trio's thread, for every token."""
        flight = self._flights.get(output.request_id)
        if flight is None or (flight.engine is not engine and flight.engine != engine):
            self.late_outputs += 1
            return
        if output.error is not None and self._try_elsewhere(flight, output.error):
            return
        is_first = bool(output.token_ids) and not flight.answered
        if is_first and flight.placement is not None:
            flight.answer(output)
            self._dispatch.on_answered(flight.placement)
            self.line.on_answered(flight)
        receiver = flight.receiver
        receiver.delivered += output.token_ids
        if output.finish_reason is None and not receiver.scans:
            receiver.deliver(output)
        else:
            self._finish(flight, output)
        if is_first:  # now others may be sent there, and that may find the engine gone
            self._membership.on_success(engine)
            self.fill()  # of an engine that does not report, this is the news

    def _finish(self, flight: Flight, output: EngineOutput) -> None:
        """Deliver what ends its request, or may: once its receiver hears it, the books say so."""
        seen = flight.receiver.scan(output) if flight.receiver.scans else output
        if seen.finish_reason is None:
            flight.receiver.deliver(seen)
            return
        if self._is_under_way(flight):
            if output.finish_reason is None:
                self._abort(flight)
            self._conclude(flight, seen.finish_reason, cause_of(output, seen))
        flight.receiver.finish(seen)
        self.fill()

    @trio.lowlevel.enable_ki_protection
    def end(self, receiver: Receiver) -> None:
        """Withdraw or abort a request that is unfinished: nobody wants it any more. Idempotent."""
        self._leave(receiver, FinishReason.ABORT, Cause.CLIENT)

    @trio.lowlevel.enable_ki_protection
    def spoil(self, receiver: Receiver) -> None:
        """End a request whose tokens cannot be turned into text. Idempotent."""
        self._leave(receiver, FinishReason.ERROR, Cause.REFUSED)

    def _leave(self, receiver: Receiver, reason: FinishReason, cause: Cause) -> None:
        flight = self._flights.get(receiver.request.request_id)
        if flight is not None and flight.receiver is receiver:
            self._stop(flight, reason, cause)
            self.fill()

    @trio.lowlevel.enable_ki_protection
    def disown(self, receiver: Receiver, error: BaseException) -> None:
        """Take note that a receiver failed at its own work, and end its request. Idempotent."""
        self.sinks_failed += 1
        name, what = receiver.request.request_id, describe(error)
        self._events.emit(EventKind.SINK_FAILED, request_id=name, detail=what)
        self.end(receiver)

    # The end of many at once, and of those that are late.

    @trio.lowlevel.enable_ki_protection
    def refuse(self, error: type[DpkitError]) -> None:
        """Admit nothing any more; what is under way goes on."""
        self._refusal = error

    @trio.lowlevel.enable_ki_protection
    def abort_all(self, cause: Cause) -> None:
        """End whatever is under way; readers get the error of `refuse`."""
        # Those that wait first: else the end of one on an engine would place them there.
        for flight in sorted(self._flights.values(), key=lambda f: f.placement is not None):
            error = cut_off(self._refusal, flight)
            self._fail(flight, FinishReason.ABORT, cause, error)

    async def wait_idle(self) -> None:
        """Wait until nothing is under way."""
        while self._flights:
            await self._idle.park()

    async def keep_time(self) -> None:
        """End requests at their deadlines and queue time-outs; a service task, until cancelled."""
        await self._alarms.keep(self._on_time)

    def _on_time(self, request_ids: Sequence[str]) -> None:
        now = trio.current_time()
        for request_id in request_ids:
            # The end of one makes room for others, which may turn out to be late as well.
            if (flight := self._flights.get(request_id)) is not None:
                self._expire(flight, now)
        self.fill()

    def _expire(self, flight: Flight, now: float) -> None:
        if (late := lateness(flight, now, self._limits, self.line.retry_after(now))) is not None:
            self._fail(flight, FinishReason.ERROR, *late)

    def _set_alarm(self, flight: Flight) -> None:
        """Have `keep_time` look at a request at the moment that is next for it, if there is one."""
        if self._is_under_way(flight):
            self._alarms.set(flight.alarm, flight.request.request_id)

    # Places.

    def fill(self) -> None:
        """Place whoever is next in line, for as long as there is room."""
        self.line.fill()

    def _has_room(self) -> bool:
        return (most := self._limits.max_inflight) is None or self.placed < most

    def _send(self, flight: Flight, index: int) -> None:
        """Place a request now, unless it is too late: it must not waste a step."""
        now, deadline = trio.current_time(), flight.request.deadline
        if deadline is not None and now >= deadline:
            self.line.look_again()
            self._expire(flight, now)
            return
        try:
            placement = self._dispatch.place(flight.request, index, now=now, why=flight.why)
        except Exception as error:  # noqa: BLE001 - the reader's to handle, whatever a policy raises
            self.line.look_again()
            self._fail(flight, FinishReason.ERROR, Cause.REFUSED, error)
            return
        request_id, engine = flight.request.request_id, placement.engine
        flight.place(placement, now)
        self.placed += 1
        self._alarms.discard(request_id)
        self._set_alarm(flight)
        flight.receiver.on_placed(placement)
        self._membership.on_placed(engine)
        self._submit(flight, placement)

    def _submit(self, flight: Flight, placement: Placement) -> None:
        """Hand a request to its engine, which may answer, and be done, before this returns."""
        try:
            self._links[placement.engine].submit(flight.request)
        except Exception as error:  # noqa: BLE001 - the reader's to handle, whatever a link raises
            if flight.placement is not placement:
                return  # it was answered all the same, or has gone elsewhere already
            if self._try_elsewhere(flight, error):
                return
            cause = Cause.ENGINE_LOST if isinstance(error, EngineLost) else Cause.REFUSED
            self._fail(flight, FinishReason.ERROR, cause, error)

    def _try_elsewhere(self, flight: Flight, error: Exception) -> bool:
        """Place a request of a lost engine anew, if it may be; that engine is no candidate now."""
        may_go = flight.may_go_elsewhere(resume=self._limits.resume)
        if not may_go or not isinstance(error, EngineLost) or self._refusal is ClusterClosed:
            return False
        if not has_budget(flight, error, self.retries, self._events, self._limits, of=len(self)):
            return False
        flight.retry()
        self.resumed += bool(flight.delivered)
        self.retried += not flight.delivered
        kind = EventKind.REQUEST_RESUMED if flight.delivered else EventKind.REQUEST_RETRIED
        self._requeue(flight, kind, self._limits.queue_timeout)
        self.fill()
        return True

    def _place_anew(self, engine: EngineId, flight: Flight) -> None:
        """Its engine has given it up, as it was asked to; what has begun waits as long as there."""
        patience_s = math.inf if flight.delivered else self._limits.queue_timeout
        self._requeue(flight, EventKind.REQUEST_TAKEN_BACK, patience_s)
        if not flight.answered:
            self._membership.on_inconclusive(engine)

    def _requeue(self, flight: Flight, kind: EventKind, patience_s: float) -> None:
        """Let a request have its turn again, before those that never had one."""
        self._leave_engine(flight)
        flight.go_elsewhere(trio.current_time() + patience_s)
        self._events.emit(kind, request_id=flight.request.request_id)
        self.line.put(flight, front=True)
        self._set_alarm(flight)

    # Ends.

    def _is_under_way(self, flight: Flight) -> bool:
        return self._flights.get(flight.request.request_id) is flight

    def _stop(self, flight: Flight, reason: FinishReason, cause: Cause) -> None:
        """End a request from this side: withdraw it from the queue, or abort it."""
        self._abort(flight)
        self._conclude(flight, reason, cause)

    def _abort(self, flight: Flight) -> None:
        if flight.engine is not None and (link := self._links.get(flight.engine)):
            link.abort(flight.request.request_id)

    def _fail(self, flight: Flight, reason: FinishReason, cause: Cause, error: Exception) -> None:
        if self._is_under_way(flight):
            self._stop(flight, reason, cause)
            flight.receiver.fail(reason, error)

    def _leave_engine(self, flight: Flight, *, finished: bool = False) -> None:
        if flight.placement is not None:
            placement, flight.placement, flight.engine = flight.placement, None, None
            self.placed -= 1
            self._dispatch.release(placement, flight.delivered, finished=finished)
            self.line.on_released(flight, finished=finished)

    def _conclude(self, flight: Flight, reason: FinishReason, cause: Cause) -> None:
        """The one terminal event of a request."""
        request_id, engine = flight.request.request_id, flight.engine
        event = flight.ended(reason, cause)
        self._leave_engine(flight, finished=cause in {Cause.STOP, Cause.LENGTH})
        self.line.leave(flight)
        del self._flights[request_id]
        self._alarms.discard(request_id)
        self.retries.ended(trio.current_time())
        self.causes[cause] += 1
        self._events.add(event)
        if engine is not None and not flight.answered:
            self._membership.on_inconclusive(engine)  # which may place others, and call anybody
        if not self._flights:
            self._idle.unpark_all()
