"""When is which request's time over: a heap of moments that forgets what is no longer asked for.

Knows no clock: moments are numbers of one clock, whichever the caller reads. A request has one
moment at most.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

SLACK = 64
"""Discarded moments that may always lie in the heap; beyond, at most as many as there are live."""


class Deadlines:
    """The moments of many requests, the earliest at hand.

    Most requests end long before their deadline, so a discarded moment is left in the heap until it
    comes up, or until the discarded outnumber the rest: memory follows the live ones alone.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._moments: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self)}, the next at {self.next()}>"

    def __len__(self) -> int:
        return len(self._moments)

    def add(self, moment: float, request_id: str) -> None:
        """Set a request's moment; a second one replaces the first."""
        if self._moments.get(request_id) == moment:
            return
        self._moments[request_id] = moment
        heappush(self._heap, (moment, request_id))
        self._compact()

    def discard(self, request_id: str) -> None:
        """Forget a request's moment; unknown ids are ignored."""
        if self._moments.pop(request_id, None) is not None:
            self._compact()

    def next(self) -> float | None:
        """The earliest moment there is; None: there is none."""
        while self._heap and not self._is_live(*self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[str]:
        """Requests whose moment has come, the earliest first; each is told once and forgotten."""
        over = []
        while (moment := self.next()) is not None and moment <= now:
            _, request_id = heappop(self._heap)
            del self._moments[request_id]
            over.append(request_id)
        return over

    def _is_live(self, moment: float, request_id: str) -> bool:
        return self._moments.get(request_id) == moment

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._moments) + SLACK:
            self._heap = [(moment, request_id) for request_id, moment in self._moments.items()]
            heapify(self._heap)
