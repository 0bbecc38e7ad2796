"""One frontend as an engine sees it: which requests are its own, and what it is still to be told.

What one step brings goes out together, in one envelope; knows the wire's rules for envelopes, and
nothing of sockets but a function that sends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import UNSET

from dpkit.nursery.inbox import Sender
from dpkit.wire.codec import ENGINE_DEAD, encode_envelope
from dpkit.wire.convert import error_to_wire, output_to_wire
from dpkit.wire.structs import Envelope, FinishCode, WireOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.messages import EngineId, EngineOutput
    from dpkit.wire.structs import RequestError, SchedulerStats, UtilityAnswer, WireRequest

    Send = Callable[[Sequence[bytes]], None]


class Port:
    """What goes to one frontend.

    Args:
        index: Its place in the engine's list of frontends.
        rank: The engine's.
        send: Puts the frames of a message on their way; never waits.
    """

    def __init__(self, index: int, rank: int, send: Send) -> None:
        self.index = index
        self.is_open = True
        """Whether there is somebody to tell; if not, what is said is dropped."""
        self.visit = 0
        """How many have been here, one after the other, and have gone."""
        self._rank = rank
        self.sender = Sender()
        self._send = send
        self._held: dict[str, WireRequest] = {}
        self._entries: list[WireOutput] = []
        self._finished: list[str] = []

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Port of frontend {self.index}: {state}, {len(self._held)} requests>"

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of its requests that have not ended."""
        return tuple(self._held)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell but numbers."""
        return bool(self._entries or self._finished)

    def hold(self, wire: WireRequest) -> None:
        """Take note of a new request."""
        self._held[wire.request_id] = wire

    def release(self, request_id: str) -> None:
        """Forget a request; nothing is said of it."""
        del self._held[request_id]

    def acknowledge(self, request_id: str) -> None:
        """Say, with the next envelope, that the engine has dropped a request as it was asked to."""
        self._finished.append(request_id)

    def deliver(self, _engine: EngineId, output: EngineOutput) -> None:
        """Take an output of the engine, for the next envelope: what the busy loop is given."""
        self._add(output_to_wire(output, self._held[output.request_id]))

    def end(self, request_id: str, error: Exception | RequestError | None = None) -> None:
        """Have a request end, known or not: with an error, or else as aborted."""
        if error is None:
            last = WireOutput(request_id, (), finish_reason=FinishCode.ABORT)
        else:
            told = error_to_wire(error) if isinstance(error, Exception) else error
            last = WireOutput(request_id, (), finish_reason=FinishCode.ERROR, error=told)
        self._add(last)

    def _add(self, entry: WireOutput) -> None:
        self._entries.append(entry)
        if entry.finish_reason is not None:
            self._finished.append(entry.request_id)
            self._held.pop(entry.request_id, None)

    def flush(self, stats: SchedulerStats) -> None:
        """Send what there is, and how the engine does: one envelope, never an empty one.

        The stats are changed: they are to tell this frontend of its own requests.
        """
        if stats.dpkit is not UNSET:
            stats.dpkit.sent, stats.dpkit.acknowledged = self.sender.sent, self.sender.acknowledged
        entries, finished = self._entries, self._finished
        self._entries, self._finished = [], []
        self._tell(
            Envelope(
                self._rank,
                entries,
                scheduler_stats=stats,
                timestamp=time.monotonic(),
                finished_requests=finished or None,
            )
        )

    def answer(self, answer: UtilityAnswer) -> None:
        """Send the answer to a utility call, at once and by itself."""
        self._tell(Envelope(self._rank, timestamp=time.monotonic(), utility_output=answer))

    def say_dead(self) -> None:
        """Say that this engine will say nothing more, and say nothing more."""
        if self.is_open:
            self._send([ENGINE_DEAD])
        self.close()

    def close(self) -> None:
        """Drop what is to be told, and all that is still said: nobody is there."""
        self.is_open = False
        self.visit += 1
        self.sender.sent = self.sender.acknowledged = 0  # whoever comes next counts anew
        self._held.clear()
        self._entries.clear()
        self._finished.clear()

    def _tell(self, envelope: Envelope) -> None:
        if self.is_open:
            self._send(encode_envelope(envelope))
