"""The frontends of one engine: what they ask goes into its inbox, what they are owed goes out.

Stands between frames and a busy loop: the loop delivers into one port per frontend and says when a
step is over; each port then sends all of it in one envelope. All synchronous, on Trio's thread.
Owns no socket and no task. Requests keep the ids that they have on the wire.

An answer goes to the frontend by whose connection the question came: a request's own word on which
frontend it is from (`client_index`) can only agree.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dpkit.errors import DpkitError
from dpkit.link.control import TAKE_BACK, Control
from dpkit.link.port import Port
from dpkit.messages import EngineStats, StepWork
from dpkit.nursery.inbox import duplicate
from dpkit.wire.codec import MAX_MESSAGE_BYTES, Abort, Add, decode_input, encode_envelope
from dpkit.wire.convert import from_wire
from dpkit.wire.reports import stats_to_wire
from dpkit.wire.structs import Envelope, RequestError, UtilityAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpkit.engine.waves import Word
    from dpkit.link.port import Send
    from dpkit.nursery.busyloop import BusyLoop
    from dpkit.nursery.inbox import Inbox
    from dpkit.wire.structs import SchedulerStats, UtilityCall, WireRequest

_PAUSED = RequestError(
    code="engine_paused",
    message="the engine is paused and takes no requests until it is resumed",
    retryable=True,
)
_SHUTTING_DOWN = "Server shutting down"  # vLLM's words


class Frontends:
    """All frontends of one life of one engine.

    Give `publish` and `flush` to the `BusyLoop`, then the loop to `serve`, and `connect`.

    Args:
        rank: The engine's.
        inbox: The busy loop's.
        limit: Bytes of the largest message that is read.
    """

    def __init__(self, rank: int, inbox: Inbox, *, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._rank = rank
        self._inbox = inbox
        self._limit = limit
        self._ports: list[Port] = []
        self.coordinator: Send | None = None
        """How the coordinator is told of counts and waves; None while there is none."""
        self._leaving: dict[str, Port] = {}  # aborted, and the engine has still to hear of it
        self._counts_changed = False
        self._told_step: StepWork | None = None
        self._is_stopping = False
        self._loop: BusyLoop
        self._control: Control

    def __repr__(self) -> str:
        return f"<Frontends of rank {self._rank}: {self._ports}>"

    def serve(self, loop: BusyLoop) -> None:
        """Stand before this busy loop."""
        self._loop = loop
        self._control = Control(loop, end_all=self._end_all, is_idle=self._is_idle)
        if loop.lockstep is not None:
            loop.lockstep.say = self._tell_wave

    def connect(self, ports: Iterable[Send]) -> None:
        """Say how frontends are told, in the order of their indices."""
        self._ports = [Port(index, self._rank, send) for index, send in enumerate(ports)]
        self._inbox.senders += (port.sender for port in self._ports)

    @property
    def is_deserted(self) -> bool:
        """Whether no frontend is left."""
        return not any(port.is_open for port in self._ports)

    # -- What comes in -----------------------------------------------------------------------------

    def receive(self, index: int, frames: Sequence[bytes]) -> None:
        """Do what a message of a frontend says.

        Raises:
            WireError: it cannot be read; `expel` who sent it.
        """
        port, message = self._ports[index], decode_input(frames, limit=self._limit)
        if isinstance(message, Add):
            self._add(port, message.request)
        elif isinstance(message, Abort):
            self._abort(port, message.request_ids)
        else:
            self._call(port, message.call)
        if port.has_news:
            port.flush(self._stats())

    def _add(self, port: Port, wire: WireRequest) -> None:
        request_id = wire.request_id
        port.sender.sent += 1
        if any(request_id in each for each in self._ports):
            self._end(port, request_id, duplicate(request_id))
        elif self._is_stopping or wire.abort_immediately:
            self._end(port, request_id)
        elif self._control.paused:
            self._end(port, request_id, _PAUSED)
        else:
            try:
                self._inbox.submit(from_wire(wire), port.deliver)
            except DpkitError as error:
                self._end(port, request_id, error)
            else:
                port.hold(wire)
                if self._loop.lockstep is not None:
                    self._loop.lockstep.note_request(wire.current_wave)

    def _end(
        self, port: Port, request_id: str, error: Exception | RequestError | None = None
    ) -> None:
        """End a request that has come, or one of that id that is here already.

        A frontend that uses an id twice takes the end of the one for the end of the other.
        """
        if request_id in port:
            self._inbox.abort(request_id, port.deliver)
        port.end(request_id, error)

    def _abort(self, port: Port, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id not in port:
                continue  # it has ended meanwhile, or was never this frontend's
            port.release(request_id)
            if self._inbox.abort(request_id, port.deliver):
                port.acknowledge(request_id)
            else:
                self._leaving[request_id] = port

    def _call(self, port: Port, call: UtilityCall) -> None:
        visit = port.visit

        def answer(value: Any = None, *, failure: str | None = None) -> None:
            result = None if failure is not None else (None, value)
            if port.visit == visit:  # else whoever is there now has not called
                port.answer(UtilityAnswer(call.call_id, failure, result))

        if self._is_stopping:
            answer(failure=_SHUTTING_DOWN)
        elif call.method == TAKE_BACK:
            answer(self._take_back(port, call.args))
        else:
            self._control.call(call.method, call.args, answer)

    def _take_back(self, port: Port, args: Sequence[Any]) -> list[str]:
        """Give requests up for whoever asked for them; whatever else is asked means none."""
        asked = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else ()
        theirs = [each for each in asked if isinstance(each, str) and each in port]
        taken = self._inbox.take_back(theirs, port.deliver)
        for request_id in taken:
            port.release(request_id)
        return taken

    # -- What goes out: the busy loop's hooks ------------------------------------------------------

    def publish(self, _stats: EngineStats) -> None:
        """Note that the counts are worth a message, which `flush` sends."""
        self._counts_changed = True

    def flush(self, aborted: Iterable[str]) -> None:
        """Send what the drain or the step that is over has brought, and acknowledge its aborts.

        Changed counts go to every frontend, not only, as vLLM's do, to the first: each of them
        chooses engines by what it has heard itself. So does what is left of a long prompt.
        """
        for request_id in aborted:
            port = self._leaving.pop(request_id, None)
            if port is not None and request_id not in port:  # else it has come anew by the same id
                port.acknowledge(request_id)
        last = self._loop.last_step
        # A long prompt takes steps that bring no output and change no count, but leave less to do.
        has_prefilled = last is not self._told_step and last.prefill_tokens > 0
        self._told_step = last
        self._send(even_numbers=self._counts_changed or has_prefilled)
        self._control.go_on()

    def _send(self, *, even_numbers: bool) -> None:
        told = [port for port in self._ports if even_numbers or port.has_news]
        if not told:
            return
        stats = self._stats()
        for port in told:
            port.flush(stats)
        if even_numbers:
            self._counts_changed = False
            self.tell_coordinator(stats)

    def tell_coordinator(self, stats: SchedulerStats | None = None) -> None:
        """Tell the coordinator the counts, if there is one; None: those of now."""
        if self.coordinator is not None:
            stats = self._stats() if stats is None else stats
            numbers = Envelope(self._rank, scheduler_stats=stats, timestamp=time.monotonic())
            self.coordinator(encode_envelope(numbers))

    def _tell_wave(self, word: Word) -> None:
        """Tell the coordinator; while there is none, nobody."""
        if self.coordinator is not None:
            envelope = Envelope(
                self._rank,
                timestamp=time.monotonic(),
                start_wave=word.start_wave,
                wave_complete=word.wave_complete,
            )
            self.coordinator(encode_envelope(envelope))

    def _stats(self) -> SchedulerStats:
        loop, core = self._loop, self._loop.statistics()
        wave, step = loop.stamp
        stats = EngineStats(
            engine=loop.engine,
            index=self._rank,
            seq=0,  # the wire keeps the order
            waiting=core.waiting,
            running=core.running,
            kv_cache_usage=core.kv_cache_usage,
            current_wave=wave,
            step_counter=step,
            report=loop.report(),
        )
        return stats_to_wire(stats, core)

    # -- Ends --------------------------------------------------------------------------------------

    def forget(self, index: int) -> None:
        """A frontend has gone: drop its requests, and say nothing more to it until it is `back`."""
        port = self._ports[index]
        for request_id in port.held:
            self._inbox.abort(request_id, port.deliver)
        self._leaving = {each: left for each, left in self._leaving.items() if left is not port}
        port.close()

    def back(self, index: int) -> None:
        """A frontend that had gone is there again."""
        self._ports[index].is_open = True

    def expel(self, index: int, error: Exception) -> None:
        """A frontend cannot be understood: its requests end with `error`, and it is told no more.

        It is told that the engine is dead, which for this frontend it is.
        """
        port = self._ports[index]
        for request_id in port.held:
            self._end(port, request_id, error)
        if port.has_news:
            port.flush(self._stats())
        port.say_dead()

    def stop(self) -> None:
        """End in order: every request as aborted, those that still come too, and then the loop."""
        self._is_stopping = True
        self._end_all()
        self._inbox.close()

    def die(self) -> None:
        """Tell everybody what the busy loop has delivered at its end, and that it was the end."""
        self._send(even_numbers=False)
        for port in self._ports:
            port.say_dead()

    def _end_all(self) -> None:
        for port in self._ports:
            for request_id in port.held:
                self._end(port, request_id)
        self._send(even_numbers=False)

    def _is_idle(self) -> bool:
        lockstep = self._loop.lockstep
        if lockstep is not None and not lockstep.is_paused:
            return False  # the others have still to agree
        held = any(port.held for port in self._ports)
        return not held and not any(self._loop.core.get_request_counts())
