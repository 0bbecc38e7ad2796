"""What happened in a cluster, as a bounded ring of small frozen records.

Anyone may emit, synchronously; readers look at the ring, or have it written to a file. When nobody
writes as fast as things happen, the oldest records go and are counted. Knows nothing of who emits.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

import trio
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.messages import EngineId
    from dpkit.names import Cause, FinishReason

CAPACITY = 4096  # a burst of so many requests may end in one step before a writer gets its turn


class EventKind(enum.StrEnum):
    """What an event says."""

    ENGINE_READY = "engine_ready"
    ENGINE_STUCK = "engine_stuck"
    ENGINE_LOST = "engine_lost"
    ENGINE_DOWN = "engine_down"
    COORDINATOR_LOST = "coordinator_lost"
    REQUEST_RETRIED = "request_retried"
    REQUEST_RESUMED = "request_resumed"
    REQUEST_ENDED = "request_ended"
    DRAINING = "draining"
    SCALED = "scaled"
    RELOADED = "reloaded"


@frozen(kw_only=True)
class Event:
    """One thing that happened. Every admitted request has exactly one `REQUEST_ENDED`."""

    at: float
    """Trio's clock, in seconds."""
    kind: EventKind
    engine: EngineId | None = None
    request_id: str | None = None
    reason: FinishReason | None = None
    cause: Cause | None = None
    detail: str = ""


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
        self._ring.append(
            Event(
                at=trio.current_time(),
                kind=kind,
                engine=engine,
                request_id=request_id,
                reason=reason,
                cause=cause,
                detail=detail,
            )
        )
        self._emitted += 1
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
