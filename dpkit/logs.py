"""What a log record is about, and how it is written: as a line of text, or as one JSON object.

Records of dpkit have two attributes of their own, `request_id` and `engine`, for any handler and
formatter that wants them. Whoever logs gives them (`extra=about(…)`); else they are those of the
task that logs, or of the thread that works for it. Sets nothing up: that is for programs.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("dpkit_request_id", default=None)
"""The request that this task serves."""

ENGINE: ContextVar[str | None] = ContextVar("dpkit_engine", default=None)
"""The engine whose life this task is, or which it was served by."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def about(
    *, request_id: str | None = None, engine: object = None, **fields: object
) -> dict[str, Any]:
    """What a record is about, as `extra` of a logger's methods.

    Args:
        request_id: None: that of the task.
        engine: Its name, or an incarnation; None: that of the task.
        fields: What else JSON has of it, each under its name. Text is in the message.
    """
    told: dict[str, Any] = {}
    if request_id is not None:
        told["request_id"] = request_id
    if engine is not None:
        told["engine"] = str(engine)
    if fields:
        told["fields"] = fields
    return told


def subject(record: logging.LogRecord) -> tuple[str | None, str | None]:
    """Request and engine that a record is about; for the thread, and the task, that logs it."""
    told = vars(record)
    return (
        told["request_id"] if "request_id" in told else REQUEST_ID.get(),
        told["engine"] if "engine" in told else ENGINE.get(),
    )


def name_subject(record: logging.LogRecord) -> bool:
    """Give a record its two attributes; a filter for handlers, which lets all pass."""
    record.request_id, record.engine = subject(record)
    return True


class TextFormatter(logging.Formatter):
    """A line for people, as `logging` has it; the traceback, if there is one, in lines below."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own
        """Name request and engine where nothing else in the line does."""
        line = super().formatMessage(record)
        missing = [each for each in subject(record) if each and each not in line]
        return f"{line} [{', '.join(missing)}]" if missing else line


class JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, and what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record, its traceback included."""
        request_id, engine = subject(record)
        told: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id,
            "engine": engine,
            **vars(record).get("fields", {}),
        }
        if traceback := traceback_of(record):
            told["traceback"] = traceback
        return json.dumps(told, ensure_ascii=False, default=str)


def traceback_of(record: logging.LogRecord) -> str:
    """The traceback of a record, as text; empty if it has none."""
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    return record.exc_text or ""


def _utc(moment: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
    return f"{whole}.{int(moment % 1 * 1000):03d}Z"
