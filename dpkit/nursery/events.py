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

from dpkit.logs import about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpkit.messages import EngineId
    from dpkit.names import Cause, FinishReason

    Observer = Callable[["Event"], object]

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


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a request was, once it has ended. Moments are on Trio's clock."""

    rank: int | None
    """Of the engine that had it last; None: none had it."""
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    admitted_at: float
    placed_at: float | None
    """On its first engine."""
    first_token_at: float | None


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
    figures: Figures | None = None
    """Of a request that has ended."""

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
        self.observers: list[Observer] = []
        """Told of each event at once. They must be quick; what one raises is logged."""
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
        self.add(
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

    def add(self, event: Event) -> None:
        """Add an event; never blocks, never fails."""
        self._ring.append(event)
        level = _LEVELS.get(event.kind, logging.INFO)
        if _log.isEnabledFor(level):
            of = about(request_id=event.request_id, engine=event.engine)
            _log.log(level, "%s", event, extra=of)
        self._emitted += 1
        if self._lot:
            self._lot.unpark()
        for observer in self.observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - whatever it raises
                _log.exception("an observer of events failed")

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
