"""A coordinator on real sockets, and peers of it that say what a test wants."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
import zmq
from attrs import define, field, frozen

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.link.coordinator import open_coordinator
from dpkit.link.snapshots import open_subscription
from dpkit.wire.address import AddressFailed
from dpkit.wire.codec import SUBSCRIBE, decode_from_coordinator, encode_envelope
from dpkit.wire.structs import Envelope, SchedulerStats
from dpkit.wire.zsocket import open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.link.coordinator import WireCoordinator
    from dpkit.link.snapshots import SnapshotSubscription
    from dpkit.messages import Snapshot
    from dpkit.wire.codec import CoordinatorReady
    from dpkit.wire.coordinator import CoordinatorAddresses
    from dpkit.wire.structs import StartWave
    from dpkit.wire.zsocket import Context, ZSocket

    Loads = tuple[tuple[int, int, float], ...]

PATIENCE_S = 10.0


@frozen
class Engine:
    """An engine as a coordinator sees it: what it hears by, and what it says by."""

    rank: int
    hears: ZSocket
    says: ZSocket

    def tell(self, waiting: int, running: int = 0, usage: float = 0.0, **options: Any) -> None:
        """Tell the counts."""
        stats = SchedulerStats(
            num_waiting_reqs=waiting, num_running_reqs=running, kv_cache_usage=usage, **options
        )
        self.say(Envelope(self.rank, scheduler_stats=stats))

    def start_wave(self, wave: int) -> None:
        """Say that a request has begun a wave."""
        self.say(Envelope(self.rank, start_wave=wave))

    def complete_wave(self, wave: int) -> None:
        """Say that nobody has work any more."""
        self.say(Envelope(self.rank, wave_complete=wave))

    def say(self, envelope: Envelope) -> None:
        """Say anything that an engine may."""
        self.says.send_nowait(encode_envelope(envelope))

    async def hear(self) -> CoordinatorReady | StartWave:
        """Wait for the next message."""
        with trio.fail_after(PATIENCE_S):
            return decode_from_coordinator(await self.hears.receive())


@asynccontextmanager
async def open_engine(
    context: Context, addresses: CoordinatorAddresses, rank: int = 0
) -> AsyncIterator[Engine]:
    """Have an engine of that rank subscribe."""
    async with (
        open_zsocket(context, zmq.XSUB, connect=addresses.back_publish) as hears,
        open_zsocket(context, zmq.PUSH, connect=addresses.back_output) as says,
    ):
        hears.send_nowait([SUBSCRIBE])
        yield Engine(rank, hears, says)


@define(eq=False)
class Client:
    """A client that remembers what it was told."""

    subscription: SnapshotSubscription
    heard: list[Snapshot] = field(factory=list)
    _news: trio.Event = field(factory=trio.Event)

    def tell(self, snapshot: Snapshot) -> None:
        """Take a snapshot, as `Flights.on_snapshot` does."""
        self.heard.append(snapshot)
        self._news.set()

    @property
    def loads(self) -> Loads:
        """The newest that were told; empty before the first."""
        told = [snapshot.loads for snapshot in self.heard if snapshot.loads is not None]
        return told[-1] if told else ()

    @property
    def waiting(self) -> list[int]:
        """Of each engine."""
        return [load[0] for load in self.loads]

    async def wait(self, found: Callable[[], bool]) -> None:
        """Wait until something is true, which only a snapshot can make it."""
        with trio.fail_after(PATIENCE_S):
            while not found():
                await self._news.wait()
                self._news = trio.Event()

    async def wait_heard(self) -> None:
        """Wait for the first."""
        await self.wait(lambda: bool(self.heard))

    async def wait_loads(self, *loads: tuple[int, int, float]) -> None:
        """Wait until the engines have these loads."""
        await self.wait(lambda: self.loads == loads)

    async def wait_waiting(self, *waiting: int) -> None:
        """Wait until the engines have so many waiting."""
        await self.wait(lambda: self.waiting == list(waiting))


@asynccontextmanager
async def open_client(context: Context, address: str) -> AsyncIterator[Client]:
    """Have dpkit's own client side subscribe, and hear."""

    def tell(snapshot: Snapshot) -> None:
        client.tell(snapshot)

    async with (
        open_subscription(context, address, tell) as subscription,
        trio.open_nursery() as nursery,
    ):
        client = Client(subscription)
        nursery.start_soon(subscription.run)
        yield client
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_served(
    context: Context, engines: int = 2, *, waves: bool = False, **options: Any
) -> AsyncIterator[WireCoordinator]:
    """Have a coordinator serve; it publishes each 10 ms, as tests have no time."""
    rules = CoordinatorRules(
        engines, now=trio.current_time(), interval=0.01, wave_coordination=waves
    )
    async with (
        open_coordinator(context, rules, **options) as coordinator,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(coordinator.run)
        yield coordinator
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_again(
    context: Context, addresses: CoordinatorAddresses, engines: int = 2
) -> AsyncIterator[WireCoordinator]:
    """Have a coordinator serve where one did before, as soon as its sockets are really closed."""
    async with AsyncExitStack() as stack:
        while True:
            try:
                served = open_served(context, engines, bind=addresses)
                coordinator = await stack.enter_async_context(served)
                break
            except AddressFailed:
                await trio.sleep(0.001)
        yield coordinator


async def settle(found: Callable[[], bool]) -> None:
    """Wait until something is true that comes over the wire and sets no event."""
    while not found():
        await trio.lowlevel.checkpoint()
