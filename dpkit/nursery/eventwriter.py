"""The event log as a file: one JSON object a line, appended as things happen.

A line has the time of day (`time`, UTC) and Trio's (`at`, seconds, as in the events themselves).
What becomes of a bad disk is `dpkit.nursery.filewriter`'s.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import trio

from dpkit.nursery.events import Event
from dpkit.nursery.filewriter import FileWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dpkit.nursery.events import EventLog


class EventWriter(FileWriter[Event]):
    """Writes one event log to one file."""

    what = "event log"

    def __init__(self, events: EventLog, path: Path) -> None:
        super().__init__(path)
        self._events = events
        # Trio's clock has no meaning outside its run; a line in a file must have one.
        self._epoch = time.time() - trio.current_time()

    async def _wait_unread(self) -> None:
        await self._events.wait_unread()

    def _unread(self) -> Sequence[Event]:
        return self._events.unread()

    def _line(self, record: Event) -> str:
        """What an event says; what it leaves unsaid is left out."""
        moment = datetime.fromtimestamp(self._epoch + record.at, UTC)
        return json.dumps({"time": moment.isoformat(timespec="microseconds")} | _said(record))


def _said(event: Event) -> dict[str, object]:
    said = {
        "at": event.at,
        "event": event.kind,
        "engine": None if event.engine is None else str(event.engine),
        "request_id": event.request_id,
        "reason": event.reason,
        "cause": event.cause,
        "detail": event.detail or None,
    }
    return {key: value for key, value in said.items() if value is not None}
