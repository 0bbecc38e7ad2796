"""How a handler's failure, silence or cancellation becomes an answer, and an answer a record.

Knows nothing of connections but the responder that writes to one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from dpkit.logs import ENGINE, REQUEST_ID, about
from dpkit.serve.face import Ending
from dpkit.serve.heads import JSON, RETRY_AFTER, error_body
from dpkit.serve.site import CLIENT_CLOSED, Answered

if TYPE_CHECKING:
    from dpkit.serve.face import Handler, Quick
    from dpkit.serve.responder import HttpResponder

_log = logging.getLogger(__name__)


async def handle(handler: Handler, responder: HttpResponder) -> None:
    """Have the handler answer; what it raises ends here, but for cancellations and the like."""
    REQUEST_ID.set(responder.request.id)
    ENGINE.set(None)  # until the handler knows; its task serves one request after another
    try:
        await handler(responder.request, responder)
    except Exception:  # noqa: BLE001 - of this request alone
        _note_failure(responder)
    _note_silence(responder)


def answer_nowait(quick: Quick | None, responder: HttpResponder) -> bool:
    """Answer without waiting, if `quick` does; what it raises ends here."""
    if quick is None:
        return False
    try:
        if not quick(responder.request, responder):
            return False
    except Exception:  # noqa: BLE001 - of this request alone
        _note_failure(responder)
    _note_silence(responder)
    return True


def _note_failure(responder: HttpResponder) -> None:
    request_id = responder.request.id
    _log.exception("%s: the handler failed", request_id, extra=about(request_id=request_id))
    responder.end(Ending.FAILED)


def _note_silence(responder: HttpResponder) -> None:
    if not responder.is_finished and responder.ending is None:
        _log.error("%s: the handler returned without having finished", responder.request.id)
        responder.end(Ending.FAILED)


def say_why(responder: HttpResponder) -> None:
    """Answer what the handler has left without an answer."""
    responder.keep_alive = False
    if responder.ending is Ending.FAILED:
        responder.respond(500, (JSON,), error_body(500, "the server failed at this request"))
    else:
        body = error_body(503, "the server is stopping")
        responder.respond(503, (JSON, RETRY_AFTER), body)


def record(responder: HttpResponder) -> Answered:
    """How an answer has ended."""
    status, ending = responder.status, responder.ending or Ending.SHUTDOWN
    if status is None or ending is Ending.CLIENT_GONE or ending is Ending.STALLED:
        status = CLIENT_CLOSED
    ended_at = responder.ended_at
    if ended_at is None:
        ended_at = trio.current_time()
    return Answered(
        request=responder.request,
        peer=responder.request.peer,
        status=status,
        ending=ending,
        body_sent=responder.body_sent,
        seconds=ended_at - responder.began_at,
    )
