"""An HTTP/1.1 server on Trio: accepts connections, keeps their times, stops in phases.

`serve_http` is an ordinary task for any nursery. It knows nothing of what is served: a handler
answers. It owns the listeners that it is given and all connections; nothing of them is left when
it has returned or was cancelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from attrs import frozen

from dpkit.serve.accept import accept
from dpkit.serve.connection import Connection, Phase
from dpkit.serve.heads import HeadWriter
from dpkit.serve.limits import HttpLimits
from dpkit.serve.site import Site
from dpkit.serve.transport import SocketTransport
from dpkit.serve.watch import Watch

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from dpkit.serve.face import Handler, Quick
    from dpkit.serve.listeners import Listener
    from dpkit.serve.site import Observer
    from dpkit.serve.transport import Transport

_LAST_WORDS = 1.0
"""Seconds that streams have, after they were cancelled, to send a last event."""
_TURNED_AWAY = 64
"""Connections beyond the limit that are told so at the same time; others are just closed."""

_CROWDED = 0.1
"""Seconds for which nobody looks for idle connections again if there were none."""


@frozen(kw_only=True)
class HttpStatistics:
    """What a server has and had."""

    connections: int
    idle: int
    """Connections between requests."""
    answering: int
    """Requests under way."""
    accepted: int
    """Connections so far."""
    turned_away: int
    """Connections beyond `max_connections` so far."""
    answered: int
    """Requests so far, refused ones too."""
    unsent: int
    """Bytes that wait for clients to read."""
    bodies: int
    """Bytes of request bodies."""


async def serve_http(
    handler: Handler,
    listeners: Sequence[Listener],
    *,
    quick: Quick | None = None,
    limits: HttpLimits | None = None,
    name: str = "dpkit",
    observer: Observer | None = None,
    task_status: trio.TaskStatus[HttpServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve HTTP until `HttpServer.stop`.

    Args:
        handler: Answers requests, each in a task of its connection's.
        listeners: From `open_listeners`.
        quick: Asked before the handler, where a request came by itself; what it answers costs no
            task a turn, as probes should not.
        limits: What clients may have; None: the defaults.
        name: What the ``Server`` header says; empty: there is none.
        observer: Told of every answer when it has ended, for logs and metrics. It must not wait.
        task_status: ``nursery.start`` returns the `HttpServer` once clients can connect.

    Resource handling:
        Closes the listeners and every connection, whichever way it ends. When cancelled it is gone
        at once; for an orderly end call `HttpServer.stop`, upon which it returns.

    Error handling:
        What a handler or a client does wrong is its request's or its connection's affair.
    """
    site = Site(
        handler=handler,
        quick=quick,
        limits=limits if limits is not None else HttpLimits(),
        heads=HeadWriter(name.encode("ascii")),
        observer=observer,
    )
    await HttpServer(site, listeners).run(task_status)


class HttpServer:
    """A server that runs; `serve_http` makes it."""

    def __init__(self, site: Site, listeners: Sequence[Listener]) -> None:
        self.addresses = tuple(each.address for each in listeners)
        """Where it listens, with the ports that were picked."""
        self._site = site
        self._listeners = listeners
        self._connections: set[Connection] = set()
        self._accepted = 0
        self._turned_away = 0
        self._crowded_until = 0.0
        self._arrivals = trio.lowlevel.ParkingLot()
        self._departures = trio.lowlevel.ParkingLot()
        self._watch = Watch()
        self._stopping = trio.Event()
        self._grace = trio.CancelScope()
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        state = "stopping" if self._stopping.is_set() else "serving"
        where = ", ".join(self.addresses)
        return f"<HttpServer at {where}: {state}, {len(self._connections)} connections>"

    def statistics(self) -> HttpStatistics:
        """Look at it as it is now."""
        phases = [each.phase for each in self._connections]
        return HttpStatistics(
            connections=len(phases),
            idle=phases.count(Phase.IDLE),
            answering=phases.count(Phase.ANSWERING),
            accepted=self._accepted,
            turned_away=self._turned_away,
            answered=self._site.answered,
            unsent=sum(each.unsent for each in self._connections),
            bodies=self._site.room.used,
        )

    def stop(self, deadline: float) -> None:
        """Stop in phases, and have `serve_http` return; does not wait.

        Now: no connection is accepted any more, idle ones are closed, each other one ends with the
        answer to its request. At the deadline: what is not answered is cancelled; a stream may send
        a last event. A second later: all is closed.

        Args:
            deadline: By Trio's clock. Of several calls the earliest counts.
        """
        self._grace.deadline = min(self._grace.deadline, deadline)
        if not self._stopping.is_set():
            self._stopping.set()
            for listener in self._listeners:
                listener.close()
            for connection in tuple(self._connections):
                connection.retire()

    async def run(self, task_status: trio.TaskStatus[HttpServer]) -> None:
        """Serve until `stop`, as `serve_http` says."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch.run)
                nursery.start_soon(self._sweep)
                for listener in self._listeners:
                    nursery.start_soon(accept, listener, self)
                await self._serve_in(nursery, task_status)
                nursery.cancel_scope.cancel()
        finally:
            for listener in self._listeners:
                listener.close()
            self._watch.close()

    async def _serve_in(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[HttpServer]
    ) -> None:
        self._nursery = nursery
        try:
            task_status.started(self)
            await self._stopping.wait()
            await self._wind_up()
        finally:
            self._nursery = None  # who connects while it ends is turned away

    async def _wind_up(self) -> None:
        with self._grace:
            await self._wait_empty()
        for connection in tuple(self._connections):
            connection.abandon()
        with trio.move_on_after(_LAST_WORDS):
            await self._wait_empty()

    async def _wait_empty(self) -> None:
        while self._connections:
            await self._departures.park()

    async def _sweep(self) -> None:
        """Keep the connections' times: one timer for all costs less than one timer for each."""
        while True:
            while not self._connections:
                await self._arrivals.park()
            await trio.sleep(self._site.limits.tick)
            now = trio.current_time()
            for connection in tuple(self._connections):
                connection.sweep(now)

    def admit(self, raw: socket.socket, peer: str) -> None:
        """Serve a client, as `connect` does; takes the socket over, which is non-blocking."""
        patience = self._site.limits.send_timeout
        self.connect(SocketTransport(raw, peer, self._watch, patience))

    def connect(self, transport: Transport) -> None:
        """Serve a client, or tell it that there are too many; takes the transport over."""
        self._accepted += 1
        beyond = len(self._connections) - self._site.limits.max_connections
        if self._nursery is None or self._stopping.is_set() or beyond >= _TURNED_AWAY:
            self._turned_away += 1
            transport.close(reset=True)
            return
        connection = Connection(transport, self._site)
        if beyond >= 0 and not self.make_room():
            self._turned_away += 1
            connection.is_one_too_many = True
        self._connections.add(connection)
        self._arrivals.unpark()
        self._nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._departures.unpark_all()

    def make_room(self, *, idle_for: float = 0.0) -> bool:
        """Close some of the connections that have been idle the longest; whether there were any.

        Several at a time, and no look for some while if there were none: a crowd at the door must
        not have us look at all connections for each of its members.

        Args:
            idle_for: Spare those that have been idle for less, in seconds.
        """
        now = trio.current_time()
        if now < self._crowded_until:
            return False
        latest = now - idle_for + self._site.limits.idle_timeout
        idle = [(each.idle_until, each) for each in self._connections]
        ranked = sorted(
            ((until, each) for until, each in idle if until is not None and until <= latest),
            key=lambda pair: pair[0],
        )
        if not ranked:
            self._crowded_until = now + _CROWDED
            return False
        for _, connection in ranked[: max(1, len(self._connections) // 64)]:
            connection.close()
        return True
