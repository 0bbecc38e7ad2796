"""One request and its answer under way: the scope of its handler, and how it ended.

Knows nothing of connections but the responder that writes to one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from dpkit.serve.face import Ending
from dpkit.serve.heads import JSON, RETRY_AFTER, error_body
from dpkit.serve.site import CLIENT_CLOSED, Answered

if TYPE_CHECKING:
    from dpkit.serve.face import Handler, Request
    from dpkit.serve.responder import HttpResponder

_log = logging.getLogger(__name__)


@define(kw_only=True, eq=False)
class Exchange:
    """Made by a connection when a request has come."""

    request: Request
    responder: HttpResponder
    began_at: float
    ended_at: float | None = None
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    @property
    def is_answered(self) -> bool:
        """Whether the client has all of the answer, or soon will."""
        return self.responder.finished

    def cancel(self, ending: Ending) -> None:
        """Cancel the handler, unless the answer has ended; it may still clean up what it likes."""
        if self.responder.ending is None:
            self.responder.end(ending)
            self._scope.cancel()

    async def run(self, handler: Handler) -> None:
        """Have the handler answer, unless that is pointless; what it raises ends here."""
        responder = self.responder
        if responder.ending is not None:
            await trio.lowlevel.checkpoint()
            return
        with self._scope:
            try:
                await handler(self.request, responder)
            except Exception:  # noqa: BLE001 - of this request alone
                _log.exception("%s: the handler failed", self.request.id)
                responder.end(Ending.FAILED)
        if not responder.finished and responder.ending is None:
            _log.error("%s: the handler returned without having finished", self.request.id)
            responder.end(Ending.FAILED)

    def say_why(self) -> None:
        """Answer what the handler has left without an answer."""
        responder = self.responder
        responder.keep_alive = False
        if responder.ending is Ending.SHUTDOWN:
            body = error_body(503, "the server is stopping")
            responder.respond(503, (JSON, RETRY_AFTER), body)
        else:
            responder.respond(500, (JSON,), error_body(500, "the server failed at this request"))

    def answered(self) -> Answered:
        """How it ended; to be asked when it has."""
        status, ending = self.responder.status, self.responder.ending
        is_gone = status is None or ending in {Ending.CLIENT_GONE, Ending.STALLED}
        ended_at = self.ended_at if self.ended_at is not None else trio.current_time()
        return Answered(
            request=self.request,
            peer=self.request.peer,
            status=CLIENT_CLOSED if is_gone else status or CLIENT_CLOSED,
            ending=ending or Ending.SHUTDOWN,
            body_sent=self.responder.body_sent,
            seconds=ended_at - self.began_at,
        )
