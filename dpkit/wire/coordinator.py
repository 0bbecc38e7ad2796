"""The three sockets of a coordinator, and their addresses: what it binds, and peers connect to.

Knows nothing of what goes over them. Whoever enters `open_coordinator_sockets` owns the sockets
until it leaves; `dpkit.link.coordinator` does, and serves.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import zmq
from attrs import frozen

from dpkit.wire.zsocket import open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dpkit.wire.zsocket import Context, ZSocket

LOOPBACK = "tcp://127.0.0.1:*"

BACKLOG = 100
"""Snapshots that wait for a client who takes none: ten seconds of them. Those that follow are not
kept for it, as each says all that the ones before it did."""

MAX_WORD_BYTES = 4 * 2**20
"""Counts of an engine are a kilobyte; of vLLM's, with all that they can tell, some more."""


@frozen(kw_only=True)
class CoordinatorAddresses:
    """Where a coordinator listens."""

    back_publish: str
    """Engines subscribe there: `coordinator_input` of an INIT."""
    back_output: str
    """Engines send counts and waves there: `coordinator_output`."""
    front: str
    """Clients subscribe there: `frontend_stats_publish_address`."""

    @classmethod
    def at(cls, bind: str) -> CoordinatorAddresses:
        """Make three addresses of one.

        Args:
            bind: ``tcp://HOST:*`` picks three ports; ``tcp://HOST:PORT`` is that port and the next
                two; ``ipc://DIRECTORY`` is three sockets in a directory that exists.
        """
        names = ("back_publish", "back_output", "front")
        host, _, port = bind.rpartition(":")
        if bind.startswith("ipc://"):
            ends = [f"{bind.rstrip('/')}/{name}" for name in names]
        elif port.isdecimal():
            ends = [f"{host}:{int(port) + offset}" for offset in range(3)]
        else:
            ends = [bind] * 3
        return cls(**dict(zip(names, ends, strict=True)))


@frozen(kw_only=True)
class CoordinatorSockets:
    """What a coordinator has bound."""

    to_engines: ZSocket
    """An XPUB, which drops nothing; each engine that subscribes or goes is a message."""
    from_engines: ZSocket
    """A PULL."""
    to_clients: ZSocket
    """An XPUB, likewise, but for clients that take nothing."""

    @property
    def addresses(self) -> CoordinatorAddresses:
        """Where they listen, with the ports that were picked."""
        return CoordinatorAddresses(
            back_publish=self.to_engines.endpoint,
            back_output=self.from_engines.endpoint,
            front=self.to_clients.endpoint,
        )


@asynccontextmanager
async def open_coordinator_sockets(
    context: Context, bind: str | CoordinatorAddresses = LOOPBACK
) -> AsyncGenerator[CoordinatorSockets]:
    """Bind the sockets of a coordinator.

    Args:
        context: Whose sockets they are to be.
        bind: As for `CoordinatorAddresses.at`; or three addresses: those of a coordinator that has
            ended are found again by its peers. Peers must be able to reach them as they are
            written, so not ``tcp://0.0.0.0:*``.

    Error handling:
        AddressFailed: one of the addresses cannot be bound.
    """
    addresses = CoordinatorAddresses.at(bind) if isinstance(bind, str) else bind
    async with AsyncExitStack() as stack:

        async def open_at(address: str, kind: zmq.SocketType, **options: Any) -> ZSocket:
            entered = open_zsocket(
                context, kind, bind=address, max_message_bytes=MAX_WORD_BYTES, **options
            )
            return await stack.enter_async_context(entered)

        yield CoordinatorSockets(
            to_engines=await open_at(addresses.back_publish, zmq.XPUB),
            from_engines=await open_at(addresses.back_output, zmq.PULL),
            to_clients=await open_at(addresses.front, zmq.XPUB, max_queued=BACKLOG, lossy=True),
        )
