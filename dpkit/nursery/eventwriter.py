"""The event log as a file: one JSON object a line, appended as things happen.

A line has the time of day (`time`, UTC) and Trio's (`at`, seconds, as in the events themselves).

A disk that is full or a path that cannot be written costs events, never requests: the writer says
so once, counts what it lost, and tries again every minute. Owns nothing but the path: the file is
opened for each batch, so it may be rotated at any time.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dpkit.nursery.events import Event, EventLog

RETRY_S = 60.0  # an operator needs minutes to make room; the log need not nag meanwhile

_log = logging.getLogger(__name__)


class EventWriter:
    """Writes one event log to one file."""

    def __init__(self, events: EventLog, path: Path) -> None:
        self.lost = 0
        """Events that could not be written."""
        self._events = events
        self._path = path
        # Trio's clock has no meaning outside its run; a line in a file must have one.
        self._epoch = time.time() - trio.current_time()
        self._failing = False
        self._writing = trio.Lock()  # the last flush must not overtake the one before it

    async def run(self) -> None:
        """Write until cancelled; a service task."""
        while True:
            await self._events.wait_unread()
            await self.flush()
            if self._failing:
                await trio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Write what has happened since the last time."""
        async with self._writing:
            if events := self._events.unread():
                await self._write(events)

    async def _write(self, events: Sequence[Event]) -> None:
        try:
            # Abandoned when the grace is over: a disk that hangs must not hang the shutdown.
            await trio.to_thread.run_sync(self._append, events, abandon_on_cancel=True)
        except OSError as error:
            self.lost += len(events)
            if not self._failing:
                _log.error("event log %s: %s; trying again every minute", self._path, error)
            self._failing = True
        else:
            self._failing = False

    def _append(self, events: Iterable[Event]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(self._fields(event))}\n" for event in events)

    def _fields(self, event: Event) -> dict[str, object]:
        """What an event says; what it leaves unsaid is left out."""
        moment = datetime.fromtimestamp(self._epoch + event.at, UTC)
        return {"time": moment.isoformat(timespec="microseconds")} | _said(event)


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
