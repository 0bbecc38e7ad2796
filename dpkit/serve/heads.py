"""Heads and bodies that the server itself writes: status lines, Date, Server, errors.

Knows nothing of connections.
"""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpkit.serve.face import Headers

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = (b"content-type", b"application/json")
RETRY_AFTER = (b"retry-after", b"1")
_LINES = {int(each): b"HTTP/1.1 %d %b\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}
_OWN = {b"date", b"server", b"connection", b"transfer-encoding", b"x-request-id"}
_NO_BODY = {204, 304}
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class HeadWriter:
    """Writes heads of answers.

    Args:
        server: Value of the ``Server`` header; empty: none.
    """

    def __init__(self, server: bytes = b"dpkit") -> None:
        self._server = b"server: %b\r\n" % server if server else b""
        self._second = 0
        self._common = b""
        self._starts: dict[int, bytes] = {}

    def write(self, status: int, headers: Headers, own: bytes) -> bytes:
        """Status line and headers, with the empty line.

        Args:
            status: From 200 on.
            headers: The handler's.
            own: Complete lines of the connection's.

        Raises:
            ValueError: a header is the server's own, or would be read as several.
        """
        now = int(time.time())  # the world's time: it is for others to read
        if now != self._second:
            self._begin_second(now)
        start = self._starts.get(status) or self._start(status)
        return b"%b%b%b\r\n" % (start, _lines(headers) if headers else b"", own)

    def _begin_second(self, now: int) -> None:
        self._second = now
        date = formatdate(now, usegmt=True).encode()
        self._common = b"date: %b\r\n%b" % (date, self._server)
        self._starts.clear()

    def _start(self, status: int) -> bytes:
        line = _LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
        self._starts[status] = start = line + self._common
        return start


def _lines(headers: Headers) -> bytes:
    for name, _ in headers:
        if name in _OWN:
            raise ValueError(f"{name.decode()} is for the server to say")
    lines = b"".join([b"%b: %b\r\n" % each for each in headers])
    count = len(headers)
    if lines.count(b"\n") != count or lines.count(b"\r") != count or b"\0" in lines:
        raise ValueError(f"a header has a line break or NUL in it: {headers!r}")
    return lines


def has_body(status: int) -> bool:
    """Whether an answer with that status may have one."""
    return status not in _NO_BODY


def error_fields(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """What an error says under ``error``, in the form that clients of OpenAI's API understand."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def error_body(status: int, message: str) -> bytes:
    """The whole body of an error of the server's own."""
    return json.dumps({"error": error_fields(status, message)}).encode()
