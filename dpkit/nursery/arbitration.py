"""Arbiters, one after the other, for the clients of one cluster: with each life of the coordinator.

A client that is alone needs none, nor do clients that bind early. While there is none, each binds
early by its own books, which it keeps all the time; who waits by then goes at once. A new arbiter
begins with what the clients tell it: who waits, and what is on which engine. All calls are
synchronous, and each changes all clients at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from dpkit.nursery.arbiter import Arbiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpkit.abc import EngineLink
    from dpkit.balancer.dispatch import EarlyDispatch
    from dpkit.balancer.late import LateDispatch
    from dpkit.messages import EngineId, EngineOutput, Room, Snapshot, StepReport
    from dpkit.nursery.flight import Limits
    from dpkit.nursery.flights import Flights

    Dispatches = tuple[Sequence[EarlyDispatch | None], LateDispatch | None]


class Arbitration:
    """The arbiters of one cluster. It is told of engines as clients are, after all of them.

    Args:
        make_dispatch: Makes the books of a life; None: these clients need no arbiter.
    """

    def __init__(self, make_dispatch: Callable[[], LateDispatch | None]) -> None:
        self.arbiter: Arbiter | None = None
        """The present one."""
        self.on_failed: Callable[[Exception], None] = lambda _: None
        """Called with what went wrong in a life; must see to it that this is closed."""
        self._make_dispatch = make_dispatch
        self._clients: Sequence[Flights] = ()
        self._is_open = False

    def __repr__(self) -> str:
        return f"<Arbitration: {self.arbiter or 'none'}>"

    @property
    def is_up(self) -> bool:
        """Whether there is one."""
        return self.arbiter is not None

    def serve(self, clients: Sequence[Flights]) -> None:
        """Begin, for these clients."""
        self._clients = clients
        self.open()

    # Lives.

    def open(self) -> None:
        """Let there be an arbiter, if one is needed.

        Error handling:
            What its policy raises; `close` it then.
        """
        self._is_open = True
        self._begin(self._make_dispatch())
        self._fill_all()

    def close(self) -> None:
        """The arbiter is gone, and what it knew: clients go on without. Idempotent."""
        self._is_open = False
        self._end()
        self._fill_all()

    def use(self, limits: Limits, dispatches: Dispatches | None) -> None:
        """Let clients go on with new limits, and perhaps by another policy.

        Args:
            limits: What each admits.
            dispatches: One for each, and the books of their new arbiter, if they need one. None:
                they keep what they have.
        """
        each, everybody = dispatches or ([None] * len(self._clients), None)
        if dispatches is not None:
            self._end()
        elif self.arbiter is not None:
            self.arbiter.line.look_again()  # whoever was full may not be any more
        for flights, dispatch in zip(self._clients, each, strict=True):
            flights.use(limits, dispatch)
        if self._is_open:
            try:
                self._begin(everybody)
            except Exception as error:  # noqa: BLE001 - of a policy; the switch itself is made
                self.on_failed(error)
        self._fill_all()

    def _begin(self, dispatch: LateDispatch | None) -> None:
        if dispatch is None:
            return
        arbiter = self.arbiter = Arbiter(dispatch, self.on_failed)
        known = self._clients[0].books[1]  # all of them have the same engines
        arbiter.line.view.steps_together = known.steps_together
        for load in known.loads:
            dispatch.add(load.engine, load.rank, load.room)
        for name in known.names:
            dispatch.expect(name)
        for flights in self._clients:
            flights.line.attend(arbiter.seat(flights.line))

    def _end(self) -> None:
        self.arbiter = None
        for flights in self._clients:
            flights.line.desert()

    def _fill_all(self) -> None:
        for flights in self._clients:
            flights.fill()

    def audit(self) -> Iterator[str]:
        """Every contradiction between clients and the present arbiter, in words."""
        if self.arbiter is not None:
            yield from self.arbiter.audit()

    # Engines come and go, and tell of their work.

    def connect(self, link: EngineLink, room: Room | None = None) -> None:
        """Nothing: clients send, by links of their own."""

    def disconnect(self, engine: EngineId) -> None:
        """Likewise."""

    def expect(self, name: str) -> None:
        """Let requests wait that are pinned to an engine that will come."""
        if self.arbiter is not None:
            self.arbiter.dispatch.expect(name)

    def dismiss(self, name: str) -> None:
        """Let those go that are pinned to an engine that will not come back: to be refused."""
        if self.arbiter is not None:
            self.arbiter.dispatch.forget(name)
            self.arbiter.line.recall(name)
            self.fill()

    def offer(self, engine: EngineId, rank: int) -> None:
        """Let an engine be picked; `fill` when all know."""
        if self.arbiter is not None:
            known = self._clients[0].books[1]  # of which this one was told just now
            room = next(load.room for load in known.loads if load.engine == engine)
            self.arbiter.dispatch.add(engine, rank, room)
            self.arbiter.line.recall(engine.name)

    def withdraw(self, engine: EngineId) -> None:
        """Let an engine be picked no more."""
        if self.arbiter is not None:
            self.arbiter.dispatch.remove(engine)

    def fill(self) -> None:
        """Grant what can be granted."""
        if self.arbiter is not None:
            self.arbiter.line.fill()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the coordinator's newest snapshot."""
        if self.arbiter is not None:
            self.arbiter.dispatch.on_snapshot(snapshot, now=trio.current_time())

    @trio.lowlevel.enable_ki_protection
    def on_report(self, engine: EngineId, report: StepReport) -> None:
        """Take an engine's own word, which all clients have by now, each with its own counts."""
        if (arbiter := self.arbiter) is None:
            return
        heard = [(flights, flights.books[1].report_of(engine)) for flights in self._clients]
        ahead = sum(each.sent - each.acknowledged for _, each in heard if each is not None)
        news = replace(report, sent=ahead, acknowledged=0)
        arbiter.dispatch.on_report(engine, news, now=trio.current_time())
        # All look before one asks: a local engine answers at once, and then more may be sent there,
        # of which these reports do not tell.
        asks = [flights.relief(engine, each) for flights, each in heard if each is not None]
        for ask in asks:
            ask()
        self.fill()

    def deliver(self, engine: EngineId, output: EngineOutput) -> None:
        """Nothing: by this link nobody sends."""
