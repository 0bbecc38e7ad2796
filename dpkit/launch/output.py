"""What a process writes to its stdout and stderr: relayed to `logging`, and its last lines kept.

Knows nothing of processes: it reads a pipe.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque

import trio

from dpkit.launch.records import MARK, read_record
from dpkit.logs import about

KEPT = 50
"""Lines kept: a crash in native code is told by some thirty, and the first ones say most."""

LONGEST = 4096
"""Bytes of a line; a longer one is cut in pieces, so that a flood without line ends stays small."""

LONGEST_RECORD = 128 * 1024
"""The same of a log record, which is one line with its traceback."""

_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?=[: ])")

_CHUNK = 64 * 1024
_BURST = 16  # chunks taken without a checkpoint: the pipe's own size, and what comes meanwhile


class Output:
    """The reading end of a process's output. Lines go to the logger `dpkit.worker.NAME`.

    Log records of dpkit come out as records, each with its level and its traceback. Other lines
    have the level they begin with, as lines of `logging` do, or are warnings, which unconfigured
    logging shows on the host's own stderr: what is written there is meant to be seen.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        os.set_blocking(descriptor, False)
        self.lines: deque[str] = deque(maxlen=KEPT)
        self._descriptor = descriptor
        self._name = name
        self._logger = logging.getLogger(f"dpkit.worker.{name}")
        self._rest = b""

    async def relay(self) -> None:
        """Relay until nobody has the other end any more."""
        while self.drain():
            await trio.lowlevel.wait_readable(self._descriptor)

    def drain(self) -> bool:
        """Relay what is there; False: nothing will come any more."""
        for _ in range(_BURST):
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                self._take(b"\n" if self._rest else b"")
                return False
            self._take(data)
        return True

    def close(self) -> None:
        """Close the descriptor; nobody may be in `relay` any more."""
        os.close(self._descriptor)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > (LONGEST_RECORD if self._rest.startswith(MARK) else LONGEST):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if not self._relay_record(line):
                self._relay_text(line)

    def _relay_text(self, line: bytes) -> None:
        for start in range(0, max(len(line), 1), LONGEST):
            text = line[start : start + LONGEST].decode(errors="replace")
            self.lines.append(text)
            self._logger.log(_level_of(text), "%s", text, extra=about(engine=self._name))

    def _relay_record(self, line: bytes) -> bool:
        if (told := read_record(line)) is None:
            return False
        self.lines.extend(told.lines())
        if self._logger.isEnabledFor(told.level):
            record = self._logger.makeRecord(
                self._logger.name, told.level, "", 0, "%s: %s", (told.logger, told.message), None
            )
            record.request_id, record.engine = told.request_id, self._name
            record.exc_text = told.traceback or None
            self._logger.handle(record)
        return True


def _level_of(line: str) -> int:
    found = _LEVEL.match(line)
    return logging.getLevelNamesMapping()[found[0]] if found else logging.WARNING
