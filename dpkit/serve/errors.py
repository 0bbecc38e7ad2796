"""What goes wrong, as clients of OpenAI's API hear it: a status, a body, and when to try again.

Knows no route and no socket. A bug of ours, or of a class that somebody brought, is told to the
log; the client hears that there was one, and which request it was. Only of a policy it hears all.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec

from dpkit.errors import ClusterClosed, DpkitError, PolicyFailed, TryLater, plural
from dpkit.logs import about
from dpkit.serve.heads import JSON, error_fields

if TYPE_CHECKING:
    from dpkit.serve.face import Headers, Responder

SHUTDOWN = "shutdown"
"""Code of what a server says that is stopping."""

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""What is said to a client whose engine was lost, say: the others take it at once."""

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: Of HTTP.
        message: For people.
        code: For programs: what it is, in one word.
        param: The field of the request that is wrong.
        retry_after: Seconds after which it may be tried again.
        headers: More of them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self._retry_after = retry_after
        self._headers = tuple(headers)

    @property
    def headers(self) -> Headers:
        """Of the answer."""
        headers = [JSON, *self._headers]
        if self._retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self._retry_after))))
        return headers

    @property
    def fields(self) -> dict[str, Any]:
        """What stands under ``error``."""
        return error_fields(self.status, str(self), code=self.code, param=self.param)

    @property
    def body(self) -> bytes:
        """The whole body."""
        return _encode({"error": self.fields})

    def answer(self, responder: Responder) -> None:
        """Be the answer, which nothing was said of yet."""
        responder.respond(self.status, self.headers, self.body)


def bad_request(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """What is asked for cannot be had as it was asked."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception, request_id: str, param: str | None = None) -> ApiError:
    """What a client hears of an exception; what is nobody's word to it goes to the log.

    Args:
        error: What was raised.
        request_id: Of its request.
        param: The field that is wrong, if it is the request that is.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PolicyFailed):  # says whose bug it is; where, a debug record has told
        _log.error("request %s failed: %s", request_id, error, extra=about(request_id=request_id))
    elif not isinstance(error, DpkitError) or error.http_status == 500:
        of = about(request_id=request_id)
        _log.error("request %s failed", request_id, exc_info=error, extra=of)
        return ApiError(
            500, f"request {request_id} failed within the server; its log says why", code="internal"
        )
    if isinstance(error, ClusterClosed):  # whose words are for who embeds a cluster
        message = "the server is stopping; ask again elsewhere or later"
        return ApiError(503, message, code=SHUTDOWN, retry_after=_RETRY_S)
    retry_after = None
    if isinstance(error, TryLater):
        retry_after = error.retry_after
    elif error.retryable:
        retry_after = _RETRY_S
    return ApiError(
        error.http_status, str(error), code=_code(error), param=param, retry_after=retry_after
    )


def cut_off(tokens: int, *, code: str = SHUTDOWN, retry_after: float = _RETRY_S) -> ApiError:
    """What a client hears whose answer was under way when the server had to stop.

    Args:
        tokens: How many were generated.
        code: As `ApiError` has it.
        retry_after: Seconds, likewise.
    """
    return ApiError(
        503,
        f"the server is stopping: the answer was cut off after {plural(tokens, 'token')}; "
        "ask again elsewhere or later",
        code=code,
        retry_after=retry_after,
    )


def _code(error: DpkitError) -> str:
    """``EngineLost`` is ``engine_lost``."""
    name = type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]
