"""A log as a file: lines appended in a thread, as they come.

A disk that is full or a path that cannot be written costs lines, never requests: the writer says so
once, counts what it lost, and tries again every minute. Owns nothing but the path: the file is
opened for each batch, so it may be rotated at any time. Knows nothing of what the lines say.
"""

from __future__ import annotations

import abc
import logging
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

RETRY_S = 60.0  # an operator needs minutes to make room; the log need not nag meanwhile

Record = TypeVar("Record")

_log = logging.getLogger(__name__)


class FileWriter(abc.ABC, Generic[Record]):
    """Writes one log to one file."""

    what: ClassVar[str]
    """What the log is called when it cannot be written."""
    header: ClassVar[str] = ""
    """The first line of a new file."""
    pause_s: ClassVar[float] = 0.0
    """From one batch to the next, at least."""

    def __init__(self, path: Path) -> None:
        self.lost = 0
        """Records that could not be written."""
        self._path = path
        self._failing = False
        self._writing = trio.Lock()  # the last flush must not overtake the one before it

    @abc.abstractmethod
    async def _wait_unread(self) -> None:
        """Wait until there is something to write."""

    @abc.abstractmethod
    def _unread(self) -> Sequence[Record]:
        """What has come since the last call."""

    @abc.abstractmethod
    def _line(self, record: Record) -> str:
        """A record's line; called in a thread."""

    async def run(self) -> None:
        """Write until cancelled; a service task."""
        while True:
            await self._wait_unread()
            await self.flush()
            await trio.sleep(RETRY_S if self._failing else self.pause_s)

    async def flush(self) -> None:
        """Write what has come since the last time."""
        async with self._writing:
            if records := self._unread():
                await self._write(records)

    async def _write(self, records: Sequence[Record]) -> None:
        try:
            # Abandoned when the grace is over: a disk that hangs must not hang the shutdown.
            await trio.to_thread.run_sync(self._append, records, abandon_on_cancel=True)
        except OSError as error:
            self.lost += len(records)
            if not self._failing:
                _log.error("%s %s: %s; trying again every minute", self.what, self._path, error)
            self._failing = True
        else:
            self._failing = False

    def _append(self, records: Iterable[Record]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            if self.header and not file.tell():
                file.write(f"{self.header}\n")
            file.writelines(f"{self._line(record)}\n" for record in records)
