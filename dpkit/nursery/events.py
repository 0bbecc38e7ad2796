"""What happened in a cluster, as a bounded ring of small frozen records.

Anyone may emit, synchronously; readers look at the ring, or have it written to a file. When nobody
writes as fast as things happen, the oldest records go and are counted. Each is logged as well, as
loud as it is rare: what engines do at INFO, what requests do at DEBUG. Knows nothing of who emits.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.messages import EngineId
    from dpkit.names import Cause, FinishReason

_log = logging.getLogger(__name__)

CAPACITY = 4096  # a burst of so many requests may end in one step before a writer gets its turn


class EventKind(enum.StrEnum):
    """What an event says."""

    ENGINE_READY = "engine_ready"
    ENGINE_STUCK = "engine_stuck"
    ENGINE_LOST = "engine_lost"
    ENGINE_DOWN = "engine_down"
    ENGINE_ABSENT = "engine_absent"
    COORDINATOR_LOST = "coordinator_lost"
    REQUEST_RETRIED = "request_retried"
    REQUEST_RESUMED = "request_resumed"
    REQUEST_TAKEN_BACK = "request_taken_back"
    RETRY_REFUSED = "retry_refused"
    REQUEST_ENDED = "request_ended"
    SINK_FAILED = "sink_failed"
    DRAINING = "draining"
    SCALED = "scaled"
    RELOADED = "reloaded"


_LEVELS = {
    EventKind.ENGINE_STUCK: logging.ERROR,
    EventKind.ENGINE_ABSENT: logging.WARNING,
    EventKind.REQUEST_RETRIED: logging.DEBUG,
    EventKind.REQUEST_RESUMED: logging.DEBUG,
    EventKind.REQUEST_TAKEN_BACK: logging.DEBUG,
    EventKind.RETRY_REFUSED: logging.DEBUG,
    EventKind.REQUEST_ENDED: logging.DEBUG,
    EventKind.SINK_FAILED: logging.DEBUG,  # logged by who called it, with its traceback
}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. Every admitted request has exactly one `REQUEST_ENDED`."""

    at: float
    """Trio's clock, in seconds."""
    kind: EventKind
    engine: EngineId | None = None
    request_id: str | None = None
    reason: FinishReason | None = None
    cause: Cause | None = None
    detail: str = ""

    def __str__(self) -> str:
        whom = [str(each) for each in (self.request_id, self.engine) if each is not None]
        why = [str(each) for each in (self.reason, self.cause, self.detail) if each]
        words = [self.kind.replace("_", " "), *whom]
        return f"{' '.join(words)}: {', '.join(why)}" if why else " ".join(words)


class EventLog:
    """The ring. Iterating gives what it still holds, oldest first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._emitted = 0
        self._read = 0
        self._lot = trio.lowlevel.ParkingLot()
        self.dropped = 0
        """Events that went before the writer had seen them."""

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._ring))

    def __len__(self) -> int:
        return len(self._ring)

    def emit(
        self,
        kind: EventKind,
        *,
        engine: EngineId | None = None,
        request_id: str | None = None,
        reason: FinishReason | None = None,
        cause: Cause | None = None,
        detail: str = "",
    ) -> None:
        """Add an event, stamped now; never blocks, never fails."""
        event = Event(
            at=trio.current_time(),
            kind=kind,
            engine=engine,
            request_id=request_id,
            reason=reason,
            cause=cause,
            detail=detail,
        )
        self._ring.append(event)
        level = _LEVELS.get(kind, logging.INFO)
        if _log.isEnabledFor(level):
            _log.log(level, "%s", event)
        self._emitted += 1
        if self._lot:
            self._lot.unpark()

    def unread(self) -> tuple[Event, ...]:
        """Events since the last call, for the one writer; those lost in between are counted."""
        count = self._emitted - self._read
        self._read = self._emitted
        self.dropped += max(0, count - len(self._ring))
        return tuple(self._ring)[max(0, len(self._ring) - count) :]

    async def wait_unread(self) -> None:
        """Wait until `unread` has something to give."""
        if self._emitted > self._read:
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()
