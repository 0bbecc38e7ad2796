"""One request at its client: an ``async with`` block that owns a ledger entry and a mailbox.

Opens no scope and spawns nothing, so a stream may be opened in one task and read or closed in
another. Every way out is synchronous: an ``await`` between a cancelled reader and the release of
its engine is how in-flight counts leak. Knows nothing of how an engine is picked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import trio

from dpkit.errors import InternalError, untraced
from dpkit.messages import Completion, EngineOutput, Output
from dpkit.names import FinishReason
from dpkit.nursery.mailbox import Mailbox
from dpkit.nursery.scribe import Scribe

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

    from dpkit.balancer.dispatch import Placement
    from dpkit.messages import EngineId, GenerateRequest, TokenLogprob
    from dpkit.nursery.flights import Flights
    from dpkit.text.transcript import Transcript


class OutputStream:
    """The outputs of one request; made by `Client.generate`.

    ::

        async with client.generate("Once upon a time") as stream:
            async for output in stream:
                print(output.text, end="")

    Entering waits for a place, which is no wait while there is room; picking an engine and charging
    it is one synchronous step. Leaving, by whatever way, aborts the request if it is unfinished and
    releases the engine, exactly once, without a checkpoint. `text`, `token_ids` and the logprobs
    hold all that was read so far and stay readable.

    Entering raises what the request was refused with: RequestRejected, Overloaded, Draining or
    ClusterClosed; DeadlineExceeded if its time was over before it had a place.

    Tokens become text when they are read, while the engine works on the next ones. Those of a
    request with stop strings do when they arrive: whether and when somebody reads must not decide
    how long the engine runs.
    """

    __slots__ = (  # there may be many thousands, each of them touched for every token
        "__weakref__",
        "_ended_at",
        "_failure",
        "_first_token_at",
        "_flights",
        "_is_open",
        "_mailbox",
        "_placed",
        "_read_failure",
        "_scribe",
        "_started_at",
        "_texts",
        "_tokens_read",
        "_write",
        "cached_tokens",
        "deliver",
        "delivered",
        "finish_reason",
        "logprobs",
        "placement",
        "prompt_logprobs",
        "request",
        "scans",
    )

    def __init__(self, flights: Flights, request: GenerateRequest, transcript: Transcript) -> None:
        self.request = request
        self.scans = bool(request.sampling.stop)
        self.delivered: list[int] = []
        self._tokens_read = 0
        self._is_open = False
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cached_tokens: int | None = None
        """Prompt tokens that its first engine had in a cache; None: it has not said."""
        self.finish_reason: FinishReason | None = None
        self.placement: Placement | None = None
        self._flights = flights
        self._scribe = Scribe(transcript) if self.scans else None
        self._write = transcript.feed if self._scribe is None else self._scribe.read
        self._texts: list[str] = []
        self._mailbox = Mailbox(request.request_id)
        self.deliver = self._mailbox.put_nowait
        self._placed: trio.lowlevel.ParkingLot | None = None  # who waits for a place
        self._failure: Exception | None = None
        self._read_failure: Exception | None = None  # the same, once the reader has come to it
        self._started_at = self._first_token_at = self._ended_at = math.nan

    def __repr__(self) -> str:
        state = self.finish_reason or ("new" if self.placement is None else f"on {self.engine}")
        return f"<OutputStream {self.request_id}: {state}, {len(self.token_ids)} tokens>"

    @property
    def request_id(self) -> str:
        """Unique among the requests in flight."""
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all that was read so far, in a list of your own."""
        return self.delivered[: self._tokens_read]

    @property
    def text(self) -> str:
        """The text of all that was read so far."""
        if len(self._texts) > 1:  # joined when asked for: by and by would take quadratic time
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def engine(self) -> EngineId:
        """The incarnation that was charged with the request; known once the block is entered."""
        if self.placement is None:
            raise RuntimeError("the stream has no engine yet: enter it with `async with` first")
        return self.placement.engine

    @trio.lowlevel.enable_ki_protection  # Ctrl-C must not land between the charge and the block
    async def __aenter__(self) -> Self:
        if not math.isnan(self._started_at):
            raise RuntimeError(f"request {self.request_id} was started already; make a new stream")
        self._started_at = trio.current_time()
        await trio.lowlevel.checkpoint()
        await self._enter()
        return self

    async def _enter(self) -> None:
        self._flights.begin(self)
        if self.placement is None and self._failure is None:
            await self._wait_placed()
        if self._failure is not None:
            failure = self._failure
            self.close()
            try:
                raise failure
            finally:
                del failure  # whose traceback must not lead to it

    async def _wait_placed(self) -> None:
        self._placed = trio.lowlevel.ParkingLot()
        try:
            await self._placed.park()
        except BaseException:  # cancelled in the queue, or just when it was placed
            self.close()
            raise

    @trio.lowlevel.enable_ki_protection  # nor between the end of the block and the release
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """Abort the request if it is unfinished and let its engine go; idempotent.

        What ``async with`` does on the way out. A task parked in `__anext__` gets
        ClosedResourceError.
        """
        self._flights.end(self)
        self._mailbox.close()
        self._failure = None
        if self._read_failure is not None:
            self._read_failure = untraced(self._read_failure)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Output]:
        """Wait for the next output: all that became ready since the last one.

        Raises:
            RequestRejected: the request can never fit the engine.
            EngineLost: its engine was lost, and it could not go on elsewhere; what was read before
                stays in `text` and `token_ids`.
            DeadlineExceeded: the request's own deadline passed.
            ClusterClosed, Draining: the cluster was left, or its time to finish was over.
            ClosedResourceError: the stream was closed, by this task or another.
            BusyResourceError: another task is reading it.
            What the model's tokenizer raises when it cannot read the tokens; the request ends.
            What a request failed with is raised again by every later call.
        """
        if not self._is_open:
            self._refuse_to_read()
        return self._mailbox.take(self._read)

    def _read(self, received: EngineOutput) -> Output:
        token_ids, reason = received.token_ids, received.finish_reason
        self._tokens_read += len(token_ids)
        if reason is not None:
            self.finish_reason = reason  # now: what cannot be read has ended as well
            self._is_open = False
        if logprobs := received.logprobs:
            self.logprobs += logprobs
        if prompt_logprobs := received.prompt_logprobs:
            self.prompt_logprobs += prompt_logprobs
        try:
            if text := self._write(token_ids, last=reason is not None):
                self._texts.append(text)
        except Exception as error:
            if received.error is None:
                self._spoil(error)
                raise
        if reason is not None and received.error is not None:
            self._read_failure = received.error
            del received  # likewise
            raise self._read_failure
        return Output(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
        )

    def _refuse_to_read(self) -> None:
        if self.placement is None:
            raise RuntimeError("nothing was asked yet: enter the stream with `async with` first")
        if self._read_failure is not None:
            raise self._read_failure
        raise StopAsyncIteration

    async def read_all(self) -> Completion:
        """Read to the end and return the whole; errors as for the outputs one by one."""
        async for _ in self:
            pass
        return self.completion()

    @trio.lowlevel.enable_ki_protection
    async def complete(self) -> Completion:
        """Enter, read all and leave, at one checkpoint less; errors as for these."""
        self._started_at = trio.current_time()
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            await self._enter()
            return await self.read_all()
        finally:
            self.close()

    def _spoil(self, error: Exception) -> None:
        """The tokenizer's own: the reader's to handle."""
        self.finish_reason = self.finish_reason or FinishReason.ERROR
        self._is_open = False
        self._read_failure = error
        self._flights.spoil(self)

    # What `Flights` drives, and users never call.

    def scan(self, output: EngineOutput) -> EngineOutput:
        """Look for stop strings, if `scans`."""
        return output if self._scribe is None else self._scribe.scan(output)

    def on_placed(self, placement: Placement) -> None:
        """The request has its engine, perhaps not its first one."""
        self.placement = placement
        self._is_open = True
        self._wake_entering()

    def fail(self, reason: FinishReason, error: Exception) -> None:
        """There will be no more, and `error` is why."""
        self._failure = error
        self._wake_entering()
        output = EngineOutput(request_id=self.request_id, finish_reason=reason, error=error)
        self.finish(self.scan(output))

    def _wake_entering(self) -> None:
        if self._placed is not None:
            self._placed.unpark_all()

    def on_answered(self, output: EngineOutput) -> None:
        """Tokens come."""
        if self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
        if math.isnan(self._first_token_at):
            self._first_token_at = trio.current_time()

    def finish(self, output: EngineOutput) -> None:
        """Take the last output."""
        self._ended_at = trio.current_time()
        self._mailbox.put_nowait(output)

    def completion(self) -> Completion:
        """The whole request in one object, once it has finished.

        Times are those of delivery, not of reading: a slow reader does not make an engine slow.
        What a request failed with is raised here too.
        """
        if self._read_failure is not None:
            raise self._read_failure
        if self.finish_reason is None or self.placement is None:
            raise InternalError(f"request {self.request_id} has not finished: read it to its end")
        return Completion(
            request_id=self.request_id,
            text=self.text,
            token_ids=tuple(self.delivered[: self._tokens_read]),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason,
            engine=self.placement.engine,
            ttft_s=self._first_token_at - self._started_at,
            latency_s=self._ended_at - self._started_at,
        )
