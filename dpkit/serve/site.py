"""What all connections of one server share: handler, limits, and who is told of every answer.

Knows nothing of sockets and tasks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, field, setters

from dpkit.logs import about
from dpkit.serve.heads import HeadWriter
from dpkit.serve.limits import HttpLimits, Room

if TYPE_CHECKING:
    from dpkit.serve.face import Ending, Handler, Quick, Request

_log = logging.getLogger(__name__)
_access = logging.getLogger("dpkit.serve.access")

CLIENT_CLOSED = 499
"""What logs and metrics say where no status was sent since nobody was there: nginx's number."""


# Frozen as `Request` is, since there is one of them for each request, too.
@define(kw_only=True, eq=False, on_setattr=setters.frozen)
class Answered:
    """One answer that has ended, for logs and metrics."""

    request: Request | None
    """None: what came was no request."""
    peer: str
    status: int
    """As sent; 499 if the client left before the answer was complete."""
    ending: Ending
    body_sent: int
    seconds: float
    """From the complete request to the end of its answer."""


Observer: TypeAlias = Callable[[Answered], None]


@define(kw_only=True, eq=False)
class Site:
    """Made by the server, for all its connections."""

    handler: Handler
    quick: Quick | None = None
    limits: HttpLimits = field(factory=HttpLimits)
    heads: HeadWriter = field(factory=HeadWriter)
    observer: Observer | None = None
    room: Room = field(init=False)
    answered: int = 0
    """Answers that have ended so far."""
    _prefix: str = field(factory=lambda: f"req-{os.urandom(6).hex()}-", init=False)
    _numbers: count[int] = field(factory=count, init=False)

    def __attrs_post_init__(self) -> None:
        self.room = Room(self.limits.max_bodies)

    def new_id(self) -> str:
        """Name a request whose client has not: unlike any other, here and elsewhere."""
        return f"{self._prefix}{next(self._numbers):x}"

    @property
    def has_listeners(self) -> bool:
        """Whether anybody wants to know of answers."""
        return self.observer is not None or _access.isEnabledFor(logging.INFO)

    def tell(self, answered: Answered) -> None:
        """Log an answer, and have the observer know. What the observer raises is its own affair."""
        if _access.isEnabledFor(logging.INFO):
            _access.info("%s", _line(answered), extra=_fields(answered))
        if self.observer is not None:
            try:
                self.observer(answered)
            except Exception:  # noqa: BLE001 - it is told, not asked
                _log.exception("the observer of answers failed")


def _fields(answered: Answered) -> dict[str, Any]:
    request = answered.request
    told = {} if request is None else {"method": request.method, "path": request.path}
    return about(
        request_id=None if request is None else request.id,
        peer=answered.peer,
        **told,
        status=answered.status,
        ending=answered.ending,
        bytes=answered.body_sent,
        seconds=round(answered.seconds, 6),
    )


def _line(answered: Answered) -> str:
    request = answered.request
    what = f"{request.id} {request.method} {request.path!r}" if request else "no request"
    return (
        f"{answered.peer} {what} {answered.status} {answered.ending} "
        f"{answered.body_sent} bytes {answered.seconds:.3f} s"
    )
