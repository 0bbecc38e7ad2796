"""A client's side of a coordinator behind the wire, dpkit's or vLLM's: snapshots in, sizes out.

Hands each snapshot to whoever places requests (`Flights.on_snapshot`), which goes on without: while
the coordinator is away, clients place by their own counts and the last snapshot. Whoever enters
`open_subscription` owns the socket and runs `SnapshotSubscription.run`.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Never

import trio
import zmq
from attrs import frozen

from dpkit.errors import WireError
from dpkit.link.together import run_together
from dpkit.messages import Snapshot
from dpkit.wire.codec import SUBSCRIBE, ScaleElastic, decode_publish, encode_scale
from dpkit.wire.structs import share_of
from dpkit.wire.zsocket import open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from dpkit.wire.zsocket import Context, ZSocket

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class SubscriptionStatistics:
    """What was heard."""

    received: int
    """Messages, whatever they said."""
    ignored: int
    """Those that could not be read."""
    heard_at: float | None
    """When the last one came, on Trio's clock. None: none did."""
    connected: bool
    """Whether the coordinator is there."""


class SnapshotSubscription:
    """One subscription; made by `open_subscription`. All calls but `run` are synchronous."""

    def __init__(self, socket: ZSocket, tell: Callable[[Snapshot], object]) -> None:
        self._socket = socket
        self._tell = tell
        self._engines: int | None = None
        self._received = self._ignored = 0
        self._heard_at: float | None = None
        self._connected = False

    def __repr__(self) -> str:
        state = "connected" if self._connected else "nobody there"
        return f"<SnapshotSubscription to {self._socket.endpoint}: {state}, {self._received} heard>"

    def statistics(self) -> SubscriptionStatistics:
        """All counts, now."""
        return SubscriptionStatistics(
            received=self._received,
            ignored=self._ignored,
            heard_at=self._heard_at,
            connected=self._connected,
        )

    def scale(self, engines: int) -> None:
        """Tell the coordinator that there are so many engines now, those that have gone included.

        A coordinator that is not there, or is started anew, is told when it is.
        """
        self._engines = engines
        if self._connected:
            self._socket.send_nowait([encode_scale(ScaleElastic(engines))])

    async def run(self) -> Never:
        """Hear the coordinator until cancelled.

        Error handling:
            What `tell` raises comes out as it is. What the coordinator says ends nothing: what
            cannot be read is counted, and told in the log.
        """
        await run_together(
            partial(self._socket.pump, self._hear),
            partial(self._socket.watch_peers, on_connect=self._on_connect, on_drop=self._on_drop),
        )

    def _on_connect(self, _: str) -> None:
        self._connected = True
        if self._engines is not None:
            self.scale(self._engines)

    def _on_drop(self, endpoint: str) -> None:
        self._connected = False
        _log.warning("the coordinator at %s has gone: its last snapshot stands", endpoint)

    def _hear(self, frames: list[bytes]) -> None:
        self._received += 1
        self._heard_at = trio.current_time()
        try:
            snapshot = _snapshot(frames)
        except WireError as error:
            self._ignored += 1
            if not self._ignored & (self._ignored - 1):  # the first, the second, the fourth...
                _log.warning("a coordinator cannot be understood: %s", error)
        else:
            self._tell(snapshot)


def _snapshot(frames: list[bytes]) -> Snapshot:
    if len(frames) != 1:
        raise WireError(f"a coordinator's publish is one frame, not {len(frames)}")
    told = decode_publish(frames[0])
    loads = told.loads
    if loads is not None:  # vLLM's coordinator passes on whatever an engine said
        loads = tuple((waiting, running, share_of(usage)) for waiting, running, usage in loads)
    return Snapshot(
        loads=loads, current_wave=told.current_wave, engines_running=told.engines_running
    )


@asynccontextmanager
async def open_subscription(
    context: Context, address: str, tell: Callable[[Snapshot], object]
) -> AsyncGenerator[SnapshotSubscription]:
    """Subscribe to a coordinator; `run` it inside.

    Args:
        context: Whose socket it is to be.
        address: Where the coordinator publishes to clients, now or as soon as it is there.
        tell: Called with each snapshot, synchronously; rows are by rank.

    Resource handling:
        Leaving closes the socket at once; the coordinator keeps nothing of it. A coordinator that
        is started anew at that address is found again without help.

    Error handling:
        AddressFailed: that is no address.
    """
    async with open_zsocket(context, zmq.XSUB, connect=address, watch=True) as socket:
        socket.send_nowait([SUBSCRIBE])
        yield SnapshotSubscription(socket, tell)
