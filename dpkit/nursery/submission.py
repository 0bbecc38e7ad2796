"""One request whose outputs go to a callable, at once: for servers that wake no task for a token.

A stream wakes its reader for each output, which costs more than all else that is done for it. Who
only writes each token where it belongs, into a socket or a file, needs no task of its own for that.
Spawns nothing and waits for nothing. Knows nothing of how an engine is picked.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING

import trio

from dpkit.logs import about
from dpkit.messages import EngineOutput, FinishReason
from dpkit.nursery.scribe import Scribe

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.balancer.dispatch import Placement
    from dpkit.messages import EngineId, GenerateRequest
    from dpkit.nursery.flights import Flights
    from dpkit.text.transcript import Transcript

    Sink = Callable[[EngineOutput], object]

_log = logging.getLogger(__name__)


class Submission:
    """A request under way; made by `Client.submit`, which has admitted it already.

    ::

        def sink(output):
            print(submission.take_text(), end="", flush=True)

        submission = client.submit("Once upon a time", sink=sink)

    The sink gets what each step of the engine adds, or several that waited to be read,
    synchronously, from whoever brings it: it must be quick and cannot wait, and a Ctrl-C waits
    until it is done. The last call, and only that one, has a `finish_reason`; by then the request
    counts nowhere any more. If it failed, `error` is why: what reading a stream would raise. The
    first call comes after `Client.submit` has returned, and none comes after `close`. The sink may
    call back: `close`, of this or another submission, and `Client.submit`.

    A sink that raises anything ends its own request and nothing else: the request is aborted, the
    sink is not called again, the log has the traceback, and the client's statistics count it.

    Resource handling:
        Whoever called `submit` should `close`, which does nothing if the request has ended. What is
        not closed goes on without its owner until it ends, or until the cluster does, whose last
        word is ClusterClosed.
    """

    __slots__ = (  # there may be many thousands, each of them touched for every token
        "__weakref__",
        "_flights",
        "_is_starting",
        "_refusal",
        "_scribe",
        "_sink",
        "_text_is_complete",
        "_unreadable",
        "_write",
        "_written",
        "cached_tokens",
        "delivered",
        "finish_reason",
        "placed_at",
        "placement",
        "request",
        "scans",
    )

    def __init__(
        self, flights: Flights, request: GenerateRequest, transcript: Transcript, sink: Sink
    ) -> None:
        self.request = request
        self.scans = bool(request.sampling.stop)
        self.finish_reason: FinishReason | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens that its first engine had in a cache; None: it has not said."""
        self.placement: Placement | None = None
        self.placed_at: float | None = None
        """When it got its first engine, on Trio's clock."""
        self._flights = flights
        self._scribe = Scribe(transcript) if self.scans else None
        self._write = transcript.feed if self._scribe is None else self._scribe.read
        self._sink: Sink | None = sink
        self.delivered: list[int] = []
        self._written = 0  # tokens whose text has been taken
        self._text_is_complete = False
        self._unreadable: Exception | None = None
        self._is_starting = True
        self._refusal: Exception | None = None

    def __repr__(self) -> str:
        here = "waiting" if self.placement is None else f"on {self.placement.engine}"
        state = self.finish_reason or ("closed" if self._sink is None else here)
        return f"<Submission {self.request_id}: {state}>"

    @property
    def request_id(self) -> str:
        """Unique among the requests in flight."""
        return self.request.request_id

    @property
    def engine(self) -> EngineId | None:
        """The incarnation that was charged with the request last; None: it still waits for one."""
        return None if self.placement is None else self.placement.engine

    @trio.lowlevel.enable_ki_protection  # Ctrl-C must not land between the charge and the caller
    def start(self) -> None:
        """Ask for a place; `Client.submit` does it, once.

        Raises:
            RequestRejected, Overloaded, Draining, ClusterClosed: it was refused; nothing was begun.
            DeadlineExceeded: its time is over already.
        """
        try:
            self._flights.begin(self)
        finally:
            self._is_starting = False
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            try:
                raise refusal
            finally:
                del refusal  # whose traceback must not lead to it

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """Let the sink alone from now on; abort the request if it is unfinished. Idempotent."""
        self._sink = None
        self._flights.end(self)

    def take_text(self) -> str:
        """The text that became certain since it was last taken; once finished, all that is left.

        Made when it is asked for, whether by the sink or later, and never if nobody asks; with stop
        strings it has been made by then.

        Raises:
            What the model's tokenizer raises when it cannot read the tokens. That ends the request
            as refused, this is its last word, and the sink is not called again. With stop strings
            the tokens were read on arrival, so the sink has been told.
        """
        if self._unreadable is not None:
            raise self._unreadable
        if self._text_is_complete:
            return ""
        self._text_is_complete = self.finish_reason is not None
        token_ids, self._written = self.delivered[self._written :], len(self.delivered)
        try:
            return self._write(token_ids, last=self._text_is_complete)
        except Exception as error:
            self._spoil(error)
            raise

    def _spoil(self, error: Exception) -> None:
        self._unreadable, self._sink = error, None
        self.finish_reason = self.finish_reason or FinishReason.ERROR
        self._flights.spoil(self)

    # What `Flights` drives, and users never call.

    def scan(self, output: EngineOutput) -> EngineOutput:
        """Look for stop strings, if `scans`."""
        return output if self._scribe is None else self._scribe.scan(output)

    def on_placed(self, placement: Placement) -> None:
        """The request has its engine, perhaps not its first one."""
        self.placement = placement
        if self.placed_at is None:
            self.placed_at = trio.current_time()

    def on_answered(self, output: EngineOutput) -> None:
        """Tokens come."""
        if self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens

    def deliver(self, output: EngineOutput) -> None:
        """Hand one engine output on."""
        if self._sink is None:
            return  # closed by another sink, on the way here
        try:
            self._sink(output)
        except BaseException as error:  # noqa: BLE001 - SystemExit too must not end an engine
            self._disown(error)

    def finish(self, output: EngineOutput) -> None:
        """Hand the last one on."""
        sink, self._sink = self._sink, None
        if sink is None:
            return
        self.finish_reason = output.finish_reason
        try:
            sink(output)
        except BaseException as error:  # noqa: BLE001 - likewise
            self._disown(error)

    def fail(self, reason: FinishReason, error: Exception) -> None:
        """There will be no more, and `error` is why."""
        if self._is_starting:
            self._sink, self._refusal = None, error
            return
        output = EngineOutput(request_id=self.request_id, finish_reason=reason, error=error)
        self.finish(self.scan(output))

    def _disown(self, error: BaseException) -> None:
        """Let go of a sink that raised by its own fault."""
        if error is self._unreadable:
            return
        self._sink = None
        _log.error(
            "request %s: its sink raised, so it ends here and now",
            self.request_id,
            exc_info=error,
            extra=about(request_id=self.request_id, engine=self.engine),
        )
        self._flights.disown(self, error)


def check_sink(sink: object) -> None:
    """Refuse what cannot be called, or would do nothing when it is.

    Raises:
        TypeError: it is no plain callable.
    """
    if not callable(sink):
        raise TypeError(f"sink must be a callable that takes an EngineOutput, not {sink!r}")
    if inspect.iscoroutinefunction(sink) or inspect.iscoroutinefunction(type(sink).__call__):
        raise TypeError(
            f"sink must be a plain function, and {sink!r} is async: it is called where nothing can "
            "be awaited; read a stream instead (`generate`), or hand on to a task what matters"
        )
