"""Bad lines: what is sent over one may be lost, doubled, late, out of order, or stuck for a while.

For the stats on their way to the coordinator and for the link between a client and an engine. All
chances come from a source that is passed in, all times from Trio's clock, so a run can be repeated.
Knows nothing of what it carries.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from dpkit.errors import DpkitError
from dpkit.messages import EngineOutput
from dpkit.names import FinishReason

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from dpkit.abc import EngineLink
    from dpkit.messages import EngineId, EngineStats, GenerateRequest
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.inbox import Deliver


@frozen(kw_only=True)
class LineFaults:
    """How bad a line is. Shares are from 0 to 1, times are seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """Longest delay; each message draws its own."""
    reorder: bool = False
    """Whether a message with a shorter delay overtakes."""


class Line:
    """Carries synchronous calls, badly.

    Args:
        rng: Where its chances come from.
        faults: How bad it is; may be replaced at any time (`faults`).

    Resource handling:
        A line with delays or stalls needs `run` as a task; one without delivers inside of `send`.
    """

    def __init__(self, rng: random.Random, faults: LineFaults | None = None) -> None:
        self.faults = faults or LineFaults()
        self.lost = self.doubled = 0
        self._rng = rng
        self._under_way: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._latest = 0.0
        self._stalled = False
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<Line {self.faults}: {len(self._under_way)} under way, {self.lost} lost>"

    def send(self, deliver: Callable[[], object]) -> None:
        """Have `deliver` called at the other end: now, later, twice, or never."""
        if self._rng.random() < self.faults.loss:
            self.lost += 1
            return
        self._post(deliver)
        if self._rng.random() < self.faults.duplicate:
            self.doubled += 1
            self._post(deliver)

    def stall(self) -> None:
        """Keep everything back until `resume`."""
        self._stalled = True

    def resume(self) -> None:
        """Deliver what was kept back, and go on."""
        self._stalled = False
        self._changed.set()

    async def run(self) -> None:
        """Deliver what is late when its time has come; until cancelled."""
        while True:
            self._changed = trio.Event()
            due = float("inf") if self._stalled or not self._under_way else self._under_way[0][0]
            with trio.move_on_at(due):
                await self._changed.wait()
            while self._under_way and not self._stalled:
                if self._under_way[0][0] > trio.current_time():
                    break
                heapq.heappop(self._under_way)[2]()

    def _post(self, deliver: Callable[[], object]) -> None:
        at = trio.current_time() + self._rng.random() * self.faults.delay
        if not self.faults.reorder:
            at = self._latest = max(at, self._latest)
        if at <= trio.current_time() and not self._under_way and not self._stalled:
            deliver()
            return
        heapq.heappush(self._under_way, (at, next(self._numbers), deliver))
        self._changed.set()


class FaultyLink:
    """An `EngineLink` over two bad lines.

    Args:
        make_link: Makes the link at the far end, from where its outputs shall go.
        deliver: Where outputs go in the end: a client's `deliver`.
        there: Carries requests and aborts.
        back: Carries outputs.
    """

    def __init__(
        self, make_link: Callable[[Deliver], EngineLink], deliver: Deliver, there: Line, back: Line
    ) -> None:
        self._link = make_link(self._return)
        self.engine = self._link.engine
        self._deliver = deliver
        self._there = there
        self._back = back

    def submit(self, request: GenerateRequest) -> None:
        """Send a request on its way. A refusal at the far end comes back as an output."""
        self._there.send(lambda: self._submit(request))

    def abort(self, request_id: str) -> None:
        """Send an abort on its way."""
        self._there.send(lambda: self._link.abort(request_id))

    def take_back(
        self,
        request_ids: Sequence[str],  # noqa: ARG002 - none is
        on_taken: Callable[[EngineId, Sequence[str]], object],
    ) -> None:
        """Get none: a lost answer would leave a request with nobody."""
        on_taken(self.engine, ())

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self._link.submit(request)
        except DpkitError as error:
            output = EngineOutput(
                request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error
            )
            self._return(self.engine, output)

    def _return(self, engine: EngineId, output: EngineOutput) -> None:
        self._back.send(lambda: self._deliver(engine, output))


def put_stats_on(cluster: Cluster, line: Line) -> None:
    """Let a running cluster's stats travel over a line from now on."""
    fanin = cluster._fanin  # noqa: SLF001 - a seam for tests only, so no part of the cluster's face

    def carry(stats: EngineStats) -> None:
        line.send(lambda: fanin.arrive(stats))

    fanin.carry = carry
