"""The head's end of one life of an engine on the wire: requests out, outputs in, who holds what.

One connection a life, with sockets of its own: what comes from an earlier life comes to nobody.
Links of several clients share it; the ids on the wire are made here, unique for that life. Works
with dpkit's engines and with vLLM's alike. Waits for nothing: whoever owns the sockets pumps.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import trio
from msgspec import UNSET

from dpkit.errors import EngineLost, RequestRejected, WireError
from dpkit.link.held import Held
from dpkit.link.progress import Progress
from dpkit.link.takes import Takes
from dpkit.names import FinishReason
from dpkit.nursery.inbox import lost
from dpkit.nursery.meter import Meter
from dpkit.wire.codec import (
    Abort,
    Add,
    EngineDead,
    Utility,
    decode_output,
    encode_input,
    rank_identity,
)
from dpkit.wire.convert import output_from_wire, to_wire
from dpkit.wire.structs import SchedulerStats, UtilityCall
from dpkit.wire.zsocket import PeerGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpkit.link.takes import OnTaken
    from dpkit.link.wirelink import ZmqLink
    from dpkit.messages import EngineId, GenerateRequest
    from dpkit.wire.structs import (
        EngineReport,
        Envelope,
        UtilityAnswer,
        WireOutput,
        WireRequest,
    )
    from dpkit.wire.zsocket import ZSocket

PROGRESS = "dpkit_progress"
"""The call that a dpkit engine answers at once, in the middle of a step too."""

PIECE = 32
"""Outputs of one message that are taken in before others may have a turn."""

ENDING = "is shutting down, by no order from here"


class WireConnection:
    """One life of an engine as its head sees it.

    Args:
        engine: The incarnation at the other end.
        rank: Its rank, by which the socket knows it.
        socket: A ROUTER that the engine has connected to.
        limit: Bytes that one message may have, in either direction.
        on_stats: Called with every word of the engine on its load, after the outputs beside it.
        on_gone: Called when a request cannot be sent, since the engine's end is not there any more:
            it must be picked no more when this returns.
    """

    reader = "an engine in a process"
    limit_key = "engines.process.max_message"
    """What errors say of `limit`, and of whom it is."""

    def __init__(
        self,
        engine: EngineId,
        rank: int,
        socket: ZSocket,
        *,
        limit: int,
        on_stats: Callable[[SchedulerStats], None],
        on_gone: Callable[[EngineLost], None] = lambda _: None,
    ) -> None:
        self.engine = engine
        self.stats = SchedulerStats()
        """The engine's newest word on its load."""
        self.closed = False
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the engine has nothing of ours left."""
        self.current_wave = 0
        """Of engines that step together: the newest that is known here; requests say it."""
        self.progress = Progress()
        self.meter = Meter()
        """Told of every step that tells of requests here, and of every abort."""
        self.report: EngineReport | None = None
        """What the engine has done, if it is counted here: dpkit's engines say it themselves."""
        self.has_untold = False  # clients know not what the engine said last of its work
        self.late_outputs = 0
        """Outputs of requests that had been aborted by then; nobody gets them."""
        self._identity = rank_identity(rank)
        self._socket = socket
        self._limit = limit
        self.links: list[ZmqLink] = []
        # Whose request was sent when, for those that the engine has not yet reckoned with. None:
        # it does not tell, as vLLM's do not.
        self._unreckoned: deque[tuple[ZmqLink, int]] | None = deque()
        self._reckoned = 0
        self._takes = Takes(engine)
        self._numbers = count()
        self._on_stats = on_stats
        self._on_gone = on_gone
        self._held: dict[str, Held] = {}
        self.is_lost = False  # and who held something has been told
        self._aborting: set[str] = set()  # the engine has not yet said that it has dropped them

    def __repr__(self) -> str:
        return f"<WireConnection to {self.engine}: {len(self._held)} requests>"

    @property
    def held(self) -> list[str]:
        """Ids of the requests that the engine has and whose clients have not left."""
        return [held.request_id for held in self._held.values()]

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing of ours, aborted requests among it."""
        return not self._held and not self._aborting

    # To the engine.

    def submit(self, request: GenerateRequest, link: ZmqLink) -> str | None:
        """Send a request; returns what it is called on the wire, None if it has been refused.

        Raises:
            EngineLost: this life takes no more requests.
            RequestRejected: it cannot be put into a message, or is too large for one.
        """
        if self.closed:
            raise EngineLost(
                f"request {request.request_id} came too late: its engine takes no more requests",
                engine=self.engine,
                request_id=request.request_id,
            )
        wire_id = f"{request.request_id}-{next(self._numbers):x}"
        asked = self._write(request, wire_id)
        frames = encode_input(Add(asked))
        self._refuse_large(request, sum(map(len, frames)))
        try:
            self._send(frames, f"request {request.request_id}")
        except EngineLost as error:
            self._on_gone(error)
            raise
        if self._unreckoned is not None:
            self._unreckoned.append((link, link.sent))
        sampling = request.sampling
        tells_more = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        is_plain = not (tells_more or sampling.stop)
        self._held[wire_id] = Held(request.request_id, asked, link, is_plain)
        return wire_id

    def _write(self, request: GenerateRequest, wire_id: str) -> WireRequest:
        return to_wire(request, wire_id=wire_id, current_wave=self.current_wave)

    def _refuse_large(self, request: GenerateRequest, size: int) -> None:
        """Refuse what the engine would not read: it would drop this connection, and all on it."""
        if size > self._limit:
            raise RequestRejected(
                f"request {request.request_id} takes {size:,} bytes, and {self._limit:,} are the "
                f"most that {self.reader} reads ({self.limit_key})",
                request_id=request.request_id,
            )

    def abort(self, wire_id: str) -> None:
        """Have the engine drop a request; what it still says of it reaches nobody. Idempotent."""
        if (held := self._held.pop(wire_id, None)) is None:
            return
        held.kept = ()
        self._aborting.add(wire_id)
        self.meter.abort(wire_id)
        try:
            self._send(encode_input(Abort((wire_id,))), wire_id)
        except EngineLost:  # gone, and the request with it; whoever watches the process says so
            self.meter.forget(wire_id)
            self._settle(wire_id)

    def take_back(self, wire_ids: Sequence[str], on_taken: OnTaken) -> None:
        """Ask for requests that the engine does not run; its answer is handed on when it comes."""
        call = self._takes.make(wire_ids)
        with suppress(EngineLost):  # gone, and whoever watches the process says so
            self._send(encode_input(Utility(call)), call.method)
            self._takes.expect(call, on_taken)

    def ask_progress(self) -> None:
        """Ask the engine how far it is, unless it still owes an answer."""
        if (call_id := self.progress.ask()) is not None:
            call = UtilityCall(client_index=0, call_id=call_id, method=PROGRESS)
            with suppress(EngineLost):  # likewise
                self._send(encode_input(Utility(call)), PROGRESS)

    def _send(self, frames: Sequence[bytes], what: str) -> None:
        try:
            self._socket.send_nowait([self._identity, *frames])
        except (PeerGone, trio.ClosedResourceError, trio.BrokenResourceError) as error:
            raise EngineLost(
                f"engine {self.engine} is gone: {what} could not be sent to it",
                engine=self.engine,
            ) from error

    # From the engine.

    def take(self, frames: list[bytes], kept: list[Held] | None = None) -> Iterator[None] | None:
        """Take in one message; of one with many outputs, some at each step of what is returned.

        Args:
            frames: Of the message.
            kept: Where to put requests whose tokens nobody has been told of, as there is more to
                take in already; None: everybody is told.

        Raises:
            WireError: it cannot be read, or says what no engine may say to a client.
            EngineLost: the engine says that it is dead, or dying.
        """
        self.progress.heard()
        message = decode_output(frames, limit=self._limit)
        if isinstance(message, EngineDead):
            raise EngineLost(f"engine {self.engine} met an error", engine=self.engine)
        if message.utility_output is not None:
            self._take_answer(message.utility_output)
            return None
        parts = self._take_batch(message, kept)
        if len(message.outputs) > PIECE:
            return parts
        for _ in parts:
            pass
        return None

    def _take_answer(self, answer: UtilityAnswer) -> None:
        if (given := self._takes.find(answer)) is None:
            self.progress.answered(answer)
        else:
            self._take_given(*given)

    def _take_given(self, wire_ids: Sequence[str], on_taken: OnTaken) -> None:
        """The engine has given requests up, and says nothing more of them."""
        taken = []
        for wire_id in wire_ids:
            if (held := self._held.get(wire_id)) is not None and held.kept:
                held.tell()  # wherever it goes on, it goes on after these
            if (held := self._held.pop(wire_id, None)) is not None:
                held.link.forget(held.request_id)
                taken.append(held.request_id)
            else:
                self._settle(wire_id)  # left meanwhile: the abort is not acknowledged
        on_taken(self.engine, taken)
        self._note_idle()

    def _take_batch(  # noqa: PLR0912 - a call for every token costs more than it tidies
        self, envelope: Envelope, kept: list[Held] | None
    ) -> Iterator[None]:
        if envelope.wave_complete is not None or envelope.start_wave is not None:
            said = f"engine {self.engine} spoke of waves to a client, not a coordinator"
            raise WireError(said, engine=self.engine)
        if envelope.scheduler_stats is not None:
            self.stats = envelope.scheduler_stats
            self.progress.counted(self.stats.step_counter)
        find = self._held.get
        tokens, prompts = len(envelope.outputs), list[int]()
        for number, output in enumerate(envelope.outputs, start=1):
            held = find(output.request_id)
            if held is None:
                self._take_late(output.request_id)
                tokens -= 1
                continue
            if output.finish_reason is not None or not held.is_brief:
                self._take_output(output, held)
            elif kept is None:
                held.tell(output.new_token_ids)  # the shortest way: it comes for every token
            else:
                held.keep(output.new_token_ids, kept)
            if not held.begun:
                held.begin(output.new_token_ids)
                tokens -= not held.begun
                prompts += [len(held.asked.prompt_token_ids or ())] * held.begun
            if not number % PIECE:
                yield
                if self.is_lost:  # meanwhile, and all have been told
                    return
        self.meter.step(tokens, prompts)
        for wire_id in envelope.finished_requests or ():
            self._take_end(wire_id)
        if envelope.scheduler_stats is not None:
            self._on_stats(self.stats)
            self.tell_work(is_newest=kept is None)
        elif envelope.outputs:
            self._unreckoned = None  # whoever tells does so with every output

    def tell_work(self, *, is_newest: bool) -> None:
        """Hand on how much work the engine says that it has; not the newest: more has come."""
        self.has_untold = not is_newest
        told, unreckoned = self.stats.dpkit, self._unreckoned
        if told is UNSET or unreckoned is None:
            self._unreckoned = None
            return
        while unreckoned and self._reckoned < told.acknowledged:
            self._reckoned += 1
            link, number = unreckoned.popleft()
            link.acknowledged = number
        for link in self.links:
            link.report(self.stats, is_settled=not unreckoned, is_newest=is_newest)

    def _take_output(self, output: WireOutput, held: Held) -> None:
        if held.kept:
            held.tell()
            if output.request_id not in self._held:  # that was enough for the client
                self._take_late(output.request_id)
                return
        told = output_from_wire(output, held.asked, request_id=held.request_id, engine=self.engine)
        if isinstance(told.error, EngineLost):  # it is dying: no other may be placed there
            raise told.error
        if told.finish_reason is FinishReason.ABORT:  # by nobody here, so it is about to end
            self._take_refusal(output.request_id)
            return
        if told.finish_reason is not None:
            del self._held[output.request_id]
            held.link.forget(held.request_id)
        held.link.deliver(self.engine, told)
        if told.finish_reason is not None:
            self._note_idle()

    def _take_refusal(self, wire_id: str) -> None:  # noqa: ARG002 - whichever it is
        """The engine has ended a request that nobody has aborted."""
        raise EngineLost(f"engine {self.engine} {ENDING}", engine=self.engine)

    def _take_late(self, wire_id: str) -> None:
        if wire_id not in self._aborting:
            raise WireError(
                f"engine {self.engine} told of request {wire_id[:80]!r}, which it does not have",
                engine=self.engine,
            )
        self.late_outputs += 1

    def _take_end(self, wire_id: str) -> None:
        """The engine has nothing of this id any more."""
        if wire_id in self._held:
            self._take_loss(wire_id)
        self._settle(wire_id)

    def _take_loss(self, wire_id: str) -> None:
        """The engine has nothing of this id any more, and has not said how it ended."""
        raise WireError(
            f"engine {self.engine} dropped request {self._held[wire_id].request_id} without a word",
            engine=self.engine,
        )

    def _settle(self, wire_id: str) -> None:
        self._aborting.discard(wire_id)
        self.meter.freed((wire_id,))
        self._note_idle()

    def _note_idle(self) -> None:
        if self.is_idle:
            self.on_idle()

    def fail_all(self, cause: Exception, said: str) -> None:
        """Tell every request that is here that its engine is lost."""
        self.is_lost = True
        held = list(self._held.values())
        self._held.clear()
        self._aborting.clear()
        self.meter.end()
        self._takes.clear()
        for each in held:
            if each.kept:
                each.tell()
            name = each.request_id
            each.link.fail(name, lost(self.engine, name, said, cause))

    def contradictions(self) -> Iterator[str]:
        """What the engine said of an idle moment that is not idle."""
        if not self.is_idle:
            return  # what is under way between here and there cannot be told from a mistake
        stats = self.stats
        if stats.num_running_reqs or stats.num_waiting_reqs:
            count_ = stats.num_running_reqs + stats.num_waiting_reqs
            yield f"{self.engine} says that it has {count_} requests, and is charged with none"
        elif stats.kv_cache_usage:
            share = f"{stats.kv_cache_usage:.1%}"
            yield f"{self.engine} says that {share} of its blocks are held, and has no requests"
