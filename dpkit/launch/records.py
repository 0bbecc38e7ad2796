"""How a process's log records get to the head: a line of its output each, traceback included.

The head takes them for records again, with their level, request and engine (`dpkit.launch.output`).
What else a process writes is text, as before. Knows nothing of pipes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from dpkit.logs import subject, traceback_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = b"\x1e"
"""Begins a line that is a record: no text does."""

_MOST = 8_000
"""Characters of a message, and of a traceback, that are sent: the beginning of the former, the end
of the latter, which says what happened."""


class Record(msgspec.Struct, omit_defaults=True):
    """A log record on its way."""

    level: int
    logger: str
    message: str
    request_id: str | None = None
    traceback: str = ""

    def lines(self) -> Iterator[str]:
        """What is shown of it where there are only lines."""
        level = logging.getLevelName(self.level)
        yield from f"{level} {self.logger}: {self.message}".splitlines()
        yield from self.traceback.splitlines()


class RecordFormatter(logging.Formatter):
    """Writes records for the head."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        request_id, _ = subject(record)
        told = Record(
            level=record.levelno,
            logger=record.name,
            message=record.getMessage()[:_MOST],
            request_id=request_id,
            traceback=traceback_of(record)[-_MOST:],
        )
        return (MARK + _encode(told)).decode()


def read_record(line: bytes) -> Record | None:
    """The record that a line is; None: it is none, or damaged."""
    if not line.startswith(MARK):
        return None
    try:
        return _decoder.decode(line[len(MARK) :])
    except (msgspec.DecodeError, UnicodeDecodeError):  # half of one, of a process that was killed
        return None


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Record)
