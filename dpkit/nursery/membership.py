"""Which engines may be picked, told to every client at the moment it changes.

Joins what the supervisor knows (lives begin and end) with what health says (ejected, on probation)
and keeps each client's view to just the pickable ones. Decides nothing itself: the arithmetic is
`dpkit.balancer.health`. All calls are synchronous but `keep_time`, a service task.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Collection

    from dpkit.abc import EngineLink
    from dpkit.balancer.coordinator import CoordinatorRules
    from dpkit.balancer.health import Ejection, Health, HealthStatistics
    from dpkit.messages import EngineId, Room
    from dpkit.nursery.inbox import Deliver, OnReport

    class MakeLink(Protocol):
        """Links somebody to a life of an engine."""

        def __call__(self, listener: Listener, /, *, hears_all: bool = False) -> EngineLink:
            """Make a link; `hears_all` is as `Life.link` has it."""


class Listener(Protocol):
    """What a link to an engine tells: a client, or somebody who only listens."""

    @property
    def deliver(self) -> Deliver:
        """Takes outputs."""

    @property
    def on_report(self) -> OnReport:
        """Takes reports."""


class Member(Listener, Protocol):
    """Who is told of the engines: a client, or the arbiter of several."""

    def connect(self, link: EngineLink, room: Room | None = None) -> None:
        """A life of an engine serves; what it can hold and do at once, if that is known."""

    def disconnect(self, engine: EngineId) -> None:
        """A life is over."""

    def expect(self, name: str) -> None:
        """An engine will come."""

    def dismiss(self, name: str) -> None:
        """An engine will not come back."""

    def offer(self, engine: EngineId, rank: int) -> None:
        """A life may be picked; `fill` comes when all know."""

    def withdraw(self, engine: EngineId) -> None:
        """A life may not be picked."""

    def fill(self) -> None:
        """Who waits may have room now."""


class Membership:
    """The engines that serve now, by incarnation.

    Args:
        health: Says who may be picked; told of every loss and success.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._rules: CoordinatorRules | None = None
        self._clients: list[Member] = []
        self._listeners: list[Listener] = []
        self._ranks: dict[EngineId, int] = {}
        self._lives: dict[int, EngineId] = {}  # the last of each rank, be it over
        self._offered: set[EngineId] = set()
        self._timer = trio.lowlevel.ParkingLot()
        self._looked_at = 0.0

    def __repr__(self) -> str:
        return f"<Membership: {len(self._offered)} of {len(self._ranks)} engines may be picked>"

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._offered

    @property
    def serving(self) -> Collection[EngineId]:
        """The lives that take requests, those that may not be picked for a while among them."""
        return self._ranks.keys()

    def inform(self, rules: CoordinatorRules) -> None:
        """Tell a coordinator who serves, now and from now on: it must not count the dead's load.

        Nor that of a life that takes nothing new, and tells of itself until it has finished.
        """
        self._rules = rules
        now = trio.current_time()
        for rank, engine in self._lives.items():
            rules.on_engine_started(now, engine, rank)
            if engine not in self._ranks:
                rules.on_engine_left(now, engine, rank)

    def statistics(self) -> HealthStatistics:
        """Engines by health, as of the last change; answers also when Trio is gone."""
        return self._health.statistics(self._looked_at)

    def use(self, rules: Ejection) -> None:
        """Judge by new rules from now on."""
        self._health.rules = rules

    def add_client(self, client: Member) -> None:
        """Keep a client's view from now on; before the first engine joins."""
        self._clients.append(client)

    def add_listener(self, listener: Listener) -> None:
        """Have what engines report heard by one more; before the first engine joins."""
        self._listeners.append(listener)

    def expect(self, name: str) -> None:
        """An engine belongs to the cluster and will come: requests may be pinned to it already."""
        for client in self._clients:
            client.expect(name)

    def dismiss(self, name: str) -> None:
        """An engine will not come back: pins to it are refused from now on."""
        self._health.forget(name)
        for client in self._clients:
            client.dismiss(name)

    def join(
        self, engine: EngineId, rank: int, make_link: MakeLink, room: Room | None = None
    ) -> None:
        """A life of an engine serves from now on; `make_link` links a client to it.

        `room` is what it can hold and do at once, if that is known.
        """
        for client in self._clients:
            client.connect(make_link(client), room)
        now = trio.current_time()
        self._ranks[engine] = rank
        self._lives[rank] = engine
        if self._rules is not None:
            self._rules.on_engine_started(now, engine, rank)
        self._health.on_ready(engine, now)
        for listener in self._listeners:
            make_link(listener, hears_all=True)
        self._refresh()

    def leave(self, engine: EngineId, *, lost: bool) -> None:
        """A life takes no more requests; `lost`: nor will it finish those it has. Idempotent."""
        if (rank := self._ranks.pop(engine, None)) is None:
            return
        now = trio.current_time()
        if self._rules is not None:
            self._rules.on_engine_left(now, engine, rank)
        if lost:
            self._health.on_lost(engine, now)
        else:
            self._health.on_left(engine)
        self._refresh()

    def forget(self, engine: EngineId) -> None:
        """A life is over and its requests have been told."""
        self.leave(engine, lost=False)
        for client in self._clients:
            client.disconnect(engine)

    def on_placed(self, engine: EngineId) -> None:
        """A request went there: if it is a probe, it is the only one, of all clients'."""
        if self._health.on_placed(engine):
            self._withdraw(engine)

    def on_success(self, engine: EngineId) -> None:
        """A request got its first token there: if it was a probe, the engine is well."""
        if self._health.on_success(engine):
            self._refresh()

    def on_inconclusive(self, engine: EngineId) -> None:
        """A request ended there before its first token, by no fault of the engine's."""
        if self._health.on_inconclusive(engine):
            self._refresh()

    async def keep_time(self) -> None:
        """Let ejected engines return when their time is over; until cancelled."""
        while True:
            change = self._health.next_change(trio.current_time())
            with trio.move_on_at(math.inf if change is None else change):
                await self._timer.park()
            self._refresh()

    def _refresh(self) -> None:
        """Bring every client's view in line with health, then let each place who waits.

        All views first: a client that places its requests may send the one probe that an engine on
        probation gets, which takes it out of the views of those that come after.
        """
        now = self._looked_at = trio.current_time()
        pickable = {engine for engine in self._ranks if self._health.may_pick(engine, now)}
        for engine in sorted(self._offered - pickable):
            self._withdraw(engine)
        for engine in sorted(pickable - self._offered, key=self._ranks.__getitem__):
            self._offered.add(engine)
            for client in self._clients:
                client.offer(engine, self._ranks[engine])
        for client in self._clients:
            client.fill()
        self._timer.unpark_all()

    def _withdraw(self, engine: EngineId) -> None:
        self._offered.discard(engine)
        for client in self._clients:
            client.withdraw(engine)
