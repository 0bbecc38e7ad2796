"""The head's end of one life of an engine that joined: vLLM's own, or dpkit's by the same wire.

Beyond `dpkit.link.zmq` it does what vLLM's frontend does before an engine sees a request, keeps the
counts that such an engine does not tell, and waits for nothing that an engine may forget: neither
an answer nor the word that an aborted request is dropped. Waits only in `call`; whoever owns the
sockets pumps and looks at the clock.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field
from msgspec.structs import replace

from dpkit.engine.checks import find_problem
from dpkit.errors import EngineLost, RequestRejected, WireError
from dpkit.link.zmq import ENDING, WireConnection
from dpkit.logs import about
from dpkit.messages import EngineOutput
from dpkit.names import FinishReason
from dpkit.wire.codec import Abort, EngineDead, Utility, decode_output, encode_input
from dpkit.wire.foreign import to_vllm
from dpkit.wire.structs import EngineReport, FinishCode, UtilityCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dpkit.engine.limits import EngineLimits
    from dpkit.link.held import Held
    from dpkit.link.takes import OnTaken
    from dpkit.link.wirelink import ZmqLink
    from dpkit.messages import EngineId, GenerateRequest, ModelSpec
    from dpkit.wire.structs import Envelope, SchedulerStats, UtilityAnswer, WireOutput, WireRequest
    from dpkit.wire.zsocket import ZSocket

QUESTION = "is_scheduler_paused"
"""A call that every engine answers, at no cost, between two steps: the only sign of life."""

SHUTTING_DOWN = "Server shutting down"
"""What every call of an engine is answered that has been told to end."""

_FINISHED = {FinishCode.STOP, FinishCode.LENGTH}

_log = logging.getLogger(__name__)


@define(eq=False)
class _Call:
    """A utility call that has no answer yet."""

    answered: trio.Event = field(factory=trio.Event)
    answer: UtilityAnswer | None = None


class ForeignConnection(WireConnection):
    """One life of an engine that joined, as its head sees it.

    Args:
        engine: The incarnation at the other end.
        rank: By which the socket knows it.
        socket: A ROUTER that the engine has connected to.
        limits: What the engine said that it can hold.
        spec: What is known of the model here: its end tokens above all.
        limit: Bytes that one message may have, in either direction.
        on_stats: As of `WireConnection`.
        on_gone: As of `WireConnection`.
        on_leaving: Called when the engine has said that it takes nothing new: it must be picked no
            more when this returns. What it has it may still finish.
    """

    reader = "an engine that joined"
    limit_key = "engines.vllm.max_message"

    def __init__(
        self,
        engine: EngineId,
        rank: int,
        socket: ZSocket,
        *,
        limits: EngineLimits,
        spec: ModelSpec,
        limit: int,
        on_stats: Callable[[SchedulerStats], None],
        on_gone: Callable[[EngineLost], None],
        on_leaving: Callable[[], None],
    ) -> None:
        super().__init__(engine, rank, socket, limit=limit, on_stats=on_stats, on_gone=on_gone)
        self._counts = EngineReport(free_blocks=limits.num_blocks, num_blocks=limits.num_blocks)
        self.report = self._counts
        self.unacknowledged = 0
        """Aborted requests of which the engine never said that it has dropped them."""
        self.is_leaving = False
        """It has said that it takes nothing new."""
        self.asked_at: float | None = None
        """When the question was asked that has no answer yet."""
        self.newest_step: Callable[[], tuple[int, int]] | None = None
        """Of engines that step together: the newest wave and step of any of them. vLLM's tell it
        with what their coordinator hears, and not beside outputs."""
        self._on_leaving = on_leaving
        self._limits = limits
        self._spec = spec
        self._eos_token_ids = frozenset(i for i in spec.eos_token_ids if i < spec.vocab_size)
        self._calls: dict[int, _Call] = {}
        self._call_ids = count(1)
        self._question = 0  # the id of the newest one
        self._aborted_at: dict[str, float] = {}  # in the order of time

    # To the engine.

    def submit(self, request: GenerateRequest, link: ZmqLink) -> str | None:
        """Send a request; one that can never be served is refused here, as engines do."""
        problem = find_problem(request, self._limits, self._spec)
        if problem is None or self.closed:
            return super().submit(request, link)
        self._counts.requests_refused += 1
        request_id = request.request_id
        error = RequestRejected(f"cannot serve request: {problem}", request_id=request_id)
        link.deliver(
            self.engine,
            EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error),
        )
        return None

    def _write(self, request: GenerateRequest, wire_id: str) -> WireRequest:
        """Complete a request, as nobody does behind this."""
        return to_vllm(
            request,
            wire_id=wire_id,
            eos_token_ids=self._eos_token_ids,
            arrival_time=time.time(),
            current_wave=self.current_wave,
        )

    def abort(self, wire_id: str) -> None:
        """Have the engine drop a request; what it still says of it reaches nobody. Idempotent."""
        if wire_id in self._held:
            self._counts.requests_aborted += 1
            self._aborted_at[wire_id] = trio.current_time()
        super().abort(wire_id)

    def take_back(self, wire_ids: Sequence[str], on_taken: OnTaken) -> None:  # noqa: ARG002 - none is
        """Get none: such an engine drops what it is told to, but does not say how far it was."""
        on_taken(self.engine, ())

    def forget_aborted(self, before: float) -> None:
        """Wait no more for the word that requests are dropped that were aborted before a time.

        An engine that has forgotten them would keep this life from ever being idle.
        """
        while self._aborted_at:
            wire_id, when = next(iter(self._aborted_at.items()))
            if when > before:
                return
            if not self.unacknowledged:
                _log.warning(
                    "engine %s does not say that it has dropped the aborted request %r: "
                    "nobody waits for that any more (engines.vllm.abort_timeout)",
                    *(self.engine, wire_id),
                    extra=about(request_id=wire_id, engine=self.engine),
                )
            self.unacknowledged += 1
            self.meter.forget(wire_id)
            self._settle(wire_id)

    def ask(self) -> None:
        """Ask for a sign of life, unless the last question has no answer yet."""
        if self.asked_at is None:
            self._question = next(self._call_ids)
            self.asked_at = trio.current_time()
            with suppress(EngineLost):  # whoever watches the socket says so
                self._send_call(self._question, QUESTION)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine and wait for its answer, for as long as that takes.

        Error handling:
            EngineLost: the engine is gone, or could not do it; the message has its words.
        """
        call_id, call = next(self._call_ids), _Call()
        self._calls[call_id] = call
        try:
            self._send_call(call_id, method, *args)
            await call.answered.wait()
        finally:
            del self._calls[call_id]
        answer = call.answer
        if answer is None or answer.failure_message is not None:
            said = "it is lost" if answer is None else answer.failure_message
            raise EngineLost(
                f"engine {self.engine} did not answer to {method}: {said}", engine=self.engine
            )
        return answer.result[1] if answer.result is not None else None

    def tell(self, words: str) -> None:
        """Have words stand in the engine's log, which keeps the name of a method it has not."""
        with suppress(EngineLost):
            self._send_call(next(self._call_ids), words)

    def _send_call(self, call_id: int, method: str, *args: Any) -> None:
        call = UtilityCall(client_index=0, call_id=call_id, method=method, args=args)
        self._send(encode_input(Utility(call)), method)

    # From the engine.

    def take_counts(self, frames: list[bytes]) -> None:
        """Take in what the engine tells its coordinator: its load, whenever that changes.

        Raises:
            WireError: it cannot be read, or is no load.
        """
        message = decode_output(frames, limit=self._limit)
        stats = None if isinstance(message, EngineDead) else message.scheduler_stats
        if stats is None:
            raise WireError(
                f"engine {self.engine} steps together with others (then write "
                "coordinator.wave_coordination = true), or tells its coordinator what no engine "
                "does that steps by itself",
                engine=self.engine,
            )
        self.take_load(stats)

    def take_load(self, stats: SchedulerStats) -> None:
        """Take in the engine's load, as it has told a coordinator."""
        self.stats = stats
        self._on_stats(stats)

    def _take_answer(self, answer: UtilityAnswer) -> None:
        if answer.failure_message == SHUTTING_DOWN:
            self._leave()
        if answer.call_id == self._question:
            self.asked_at = None
        elif (call := self._calls.get(answer.call_id)) is not None:
            call.answer = answer
            call.answered.set()

    def _take_batch(self, envelope: Envelope, kept: list[Held] | None) -> Iterator[None]:
        if self.newest_step is not None and (stats := envelope.scheduler_stats) is not None:
            wave, step = self.newest_step()
            envelope.scheduler_stats = replace(stats, current_wave=wave, step_counter=step)
        self._count(envelope.outputs)
        stats = envelope.scheduler_stats
        if stats is not None and (prefixes := stats.prefix_cache_stats) is not None:
            self._counts.prefix_query_tokens += prefixes.queries
            self._counts.prefix_hit_tokens += prefixes.hits
        return super()._take_batch(envelope, kept)

    def _count(self, outputs: Iterable[WireOutput]) -> None:
        """Count what a message brings; it is taken in afterwards, so who begins has not yet."""
        report, begun, ended = self._counts, set[str](), set[str]()
        for output in outputs:
            wire_id = output.request_id
            held = self._held.get(wire_id)
            if held is None or wire_id in ended:
                continue
            report.output_tokens += len(output.new_token_ids)
            if output.new_token_ids and not held.begun and wire_id not in begun:
                begun.add(wire_id)
                report.prompt_tokens += len(held.asked.prompt_token_ids or ())
            if output.finish_reason is not None:
                ended.add(wire_id)
                report.requests_finished += output.finish_reason in _FINISHED

    def _take_refusal(self, wire_id: str) -> None:
        """The engine has been told to end: it takes nothing new, and may finish what it has.

        vLLM's do so for as long as they are told to, and else end all they have in this way.
        """
        self._leave()
        self._lose(wire_id, ENDING)

    def _leave(self) -> None:
        if not self.is_leaving:
            self.is_leaving = self.closed = True
            self._on_leaving()
            self._note_idle()

    def _take_late(self, wire_id: str) -> None:  # noqa: ARG002 - whichever it is
        """An output of a request that has ended here, or never was: nobody gets it.

        Engines need not agree with us on what they have, and vLLM's own frontends let it pass.
        """
        self.late_outputs += 1

    def _take_loss(self, wire_id: str) -> None:
        """Only that request is lost; vLLM's frontend, too, lets the others go on."""
        what = "dropped it without a word"
        of = about(request_id=wire_id, engine=self.engine)
        _log.warning("engine %s, request %s: it %s", self.engine, wire_id, what, extra=of)
        self._lose(wire_id, what)

    def _lose(self, wire_id: str, why: str) -> None:
        """Have one request lost, and no other."""
        held = self._held.pop(wire_id)
        if held.kept:
            held.tell()
        error = EngineLost(
            f"engine {self.engine} was lost to request {held.request_id}: it {why}",
            engine=self.engine,
            request_id=held.request_id,
        )
        held.link.fail(held.request_id, error)
        self._note_idle()

    def _settle(self, wire_id: str) -> None:
        self._aborted_at.pop(wire_id, None)
        super()._settle(wire_id)

    def _note_idle(self) -> None:
        """Whoever has nothing of ours has nothing: an engine's only client is its head.

        vLLM's engines tell their load beside outputs, and none when the last request was aborted.
        """
        if self.is_idle:
            idle = replace(self.stats, num_running_reqs=0, num_waiting_reqs=0, kv_cache_usage=0.0)
            if idle != self.stats:
                self.stats = idle
                self._on_stats(idle)
        super()._note_idle()

    def fail_all(self, cause: Exception, said: str) -> None:
        """Tell every request that is here, and whoever waits for an answer.

        The engine is asked to drop them, if it is still there: it may have been given up for what
        it said, and would compute for nobody.
        """
        if self._held:
            with suppress(EngineLost):
                self._send(encode_input(Abort(tuple(self._held))), "an abort")
        self._aborted_at.clear()
        for call in self._calls.values():
            call.answered.set()
        super().fail_all(cause, said)

    def contradictions(self) -> Iterator[str]:
        """None: the numbers of such an engine may be old, and are not kept against it."""
        return iter(())
