"""One client's link to an engine on the wire, by a connection that links of several clients share.

Knows what its client's requests are called on the wire, and how many it has sent; the rest is
`dpkit.link.zmq`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.messages import EngineOutput
from dpkit.names import FinishReason
from dpkit.wire.reports import report_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.link.zmq import WireConnection
    from dpkit.messages import EngineId, GenerateRequest
    from dpkit.nursery.inbox import Deliver, OnReport
    from dpkit.wire.structs import SchedulerStats


class ZmqLink:
    """Implements `dpkit.abc.EngineLink`; owns nothing.

    Args:
        connection: To the incarnation at the other end.
        deliver: Where the outputs go: a client's `deliver`.
        on_report: Where the engine's reports go; None: nowhere.
        hears_all: Whether that means each, where several are read together, and not the last alone.
    """

    def __init__(
        self,
        connection: WireConnection,
        deliver: Deliver,
        on_report: OnReport | None = None,
        *,
        hears_all: bool = False,
    ) -> None:
        self.engine = connection.engine
        self.deliver = deliver
        self.sent = 0
        """Requests handed over, refused ones included."""
        self.acknowledged = 0
        """The first so many of them are reckoned with in what the engine said last."""
        self._on_report = on_report
        self._hears_all = hears_all
        connection.links.append(self)
        self._connection = connection
        self._wire_ids: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<ZmqLink to {self.engine}>"

    def submit(self, request: GenerateRequest) -> None:
        """Send a request."""
        self.sent += 1
        if (wire_id := self._connection.submit(request, self)) is not None:
            self._wire_ids[request.request_id] = wire_id

    def abort(self, request_id: str) -> None:
        """Ask the engine to drop a request; unknown ids are ignored."""
        if (wire_id := self._wire_ids.pop(request_id, None)) is not None:
            self._connection.abort(wire_id)

    def take_back(
        self, request_ids: Sequence[str], on_taken: Callable[[EngineId, Sequence[str]], object]
    ) -> None:
        """Ask for requests that the engine does not run; its answer comes later."""
        wire_ids = [self._wire_ids[each] for each in request_ids if each in self._wire_ids]
        self._connection.take_back(wire_ids, on_taken)

    # The other half of the connection.

    def report(self, stats: SchedulerStats, *, is_settled: bool, is_newest: bool) -> None:
        """Take the engine's word on its work.

        Args:
            stats: The engine's.
            is_settled: Whether it knows of all that was sent to it.
            is_newest: Whether there is no newer word yet.
        """
        if self._on_report is None or not (is_newest or self._hears_all):
            return
        acknowledged = self.sent if is_settled else self.acknowledged
        report = report_from_wire(stats, sent=self.sent, acknowledged=acknowledged)
        if report is not None:
            self._on_report(self.engine, report)

    def forget(self, request_id: str) -> None:
        """A request has its last output, or is about to have it."""
        self._wire_ids.pop(request_id, None)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error."""
        self.forget(request_id)
        self.deliver(
            self.engine,
            EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error),
        )
