"""A link to an engine in this process: one append to its inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpkit.messages import EngineId, GenerateRequest
    from dpkit.nursery.inbox import Deliver, Inbox
    from dpkit.nursery.meter import Meter


class LocalLink:
    """Implements `dpkit.abc.EngineLink`; owns nothing.

    Args:
        engine: The incarnation at the other end.
        inbox: Its input.
        deliver: Where its outputs go: a client's `deliver`.
        meter: Told of aborts; None: nobody measures them.
    """

    def __init__(
        self, engine: EngineId, inbox: Inbox, deliver: Deliver, meter: Meter | None = None
    ) -> None:
        self.engine = engine
        self._inbox = inbox
        self._deliver = deliver
        self._meter = meter

    def __repr__(self) -> str:
        return f"<LocalLink to {self.engine}>"

    def submit(self, request: GenerateRequest) -> None:
        """Hand a request over; it is seen at the engine's next drain."""
        self._inbox.submit(request, self._deliver)

    def abort(self, request_id: str) -> None:
        """Ask the engine to drop a request; unknown ids are ignored."""
        was_queued = self._inbox.abort(request_id, self._deliver)
        if self._meter is not None and not was_queued:
            self._meter.abort(request_id)
