"""What lives at the other end of a wire have in common, whoever starts the engine and wherever.

A life has tasks that pump, watch and ask; they end together. Whatever one of them raises ends this
life, and no other: an engine that dies, hangs, or says what cannot be read. `RemoteLife` and
`JoinedLife` say how a life begins.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Never

import trio
from attrs import evolve
from msgspec import UNSET
from msgspec.structs import replace

from dpkit.errors import DpkitError, EngineLost, WireError, reason
from dpkit.link.wirelink import ZmqLink
from dpkit.nursery.life import broken_down
from dpkit.nursery.meter import Meter
from dpkit.wire.codec import rank_identity
from dpkit.wire.reports import statistics_from_wire, stats_from_wire
from dpkit.wire.structs import EngineReport, SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from collections.abc import Set as AbstractSet

    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.engine.limits import EngineLimits
    from dpkit.engine.publish import PublishGate
    from dpkit.link.zmq import WireConnection
    from dpkit.messages import EngineId, EngineStats, StepReport
    from dpkit.nursery.gathering import Round
    from dpkit.nursery.inbox import Deliver, OnReport
    from dpkit.wire.zsocket import ZSocket


class WireLife(abc.ABC):
    """A `dpkit.nursery.life.Life` on the wire; `run` is its task.

    Args:
        engine: The incarnation this life is known by.
        index: Of the engine in the cluster, by which its stats are known.
        rank: By which the engine is known on the wire.
        limits: What it is to have, or has.
        publish: Takes its stats, synchronously. None: nothing is published.
        gate: Says when the counts have changed enough to be published.
        on_lost: Told that this life is over, before its requests are.
    """

    is_interruptible = True  # whatever the engine does, nobody here waits for it
    last_words_s: float
    """How long after the drop of its connection an engine is still heard, or its end explained."""

    def __init__(
        self,
        *,
        engine: EngineId,
        index: int,
        rank: int,
        limits: EngineLimits,
        publish: Callable[[EngineStats], None] | None,
        gate: PublishGate,
        on_lost: Callable[[Exception], None],
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.cause: Exception | None = None
        self._index = index
        self._rank = rank
        self._publish = publish
        self._gate = gate
        self._on_lost = on_lost
        self._seq = 0
        self._closed = False
        self.meter = Meter()
        self._connection: WireConnection | None = None
        self._finished = trio.Event()
        self._scope = trio.CancelScope()

    @property
    @abc.abstractmethod
    def model_class(self) -> str:
        """The model by its name in the config: its class lives elsewhere."""

    @property
    def lost_with_its_group(self) -> bool:
        """As of `Life`."""
        return False

    @property
    @abc.abstractmethod
    def pid(self) -> int | None:
        """As of `Life`."""

    @property
    @abc.abstractmethod
    def step_started_at(self) -> float | None:
        """As of `Life`."""

    @property
    @abc.abstractmethod
    def delay(self) -> str:
        """As of `Life`."""

    async def run(self) -> None:
        """Live, until closed and nothing is left to do; what ends it earlier comes out."""
        try:
            with self._scope:
                await self._live()
            self._note_end_of_scope()
        except Exception as error:  # noqa: BLE001 - raised below, as its first cause
            self._end_with(error)
        except BaseException:  # a cancellation, perhaps in a group
            self.lose(EngineLost(f"engine {self.engine} was stopped", engine=self.engine))
            raise
        finally:
            self.close()
            self.ended.set()
        if self.cause is not None:
            self._explain()
            raise self.cause

    @abc.abstractmethod
    async def _live(self) -> None:
        """Begin, serve, and return once `_finished` is set."""

    async def _live_on(self, nursery: trio.Nursery, round_: Round | None) -> None:
        """Until it has finished, in step with its group if it has one; then end its tasks."""
        if round_ is not None:
            nursery.start_soon(self._guard, round_.wait_for_fault)
        await self._finished.wait()
        if round_ is not None:
            await round_.finish(self._rank)
        nursery.cancel_scope.cancel()

    def _note_end_of_scope(self) -> None:  # noqa: B027 - a hook
        """Judge a life whose scope was cancelled: by `close`, or at a deadline."""

    def _explain(self) -> None:  # noqa: B027 - a hook
        """Say more of the cause, where only that it ended is known yet."""

    @trio.lowlevel.enable_ki_protection
    async def _guard(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run one of this life's tasks; what it raises ends the life, and goes into no group."""
        try:
            await task(*args)
        except Exception as error:  # noqa: BLE001 - it comes out of `run`
            self._end_with(self._judge(error))

    def _judge(self, error: Exception) -> Exception:
        """What ended this life: what the world did as it is, all else as the bug that it is."""
        if isinstance(error, DpkitError) or not self.ready.is_set():
            return error
        return broken_down(self.engine, error)

    def _attach(self, connection: WireConnection) -> None:
        self._connection = connection
        connection.meter = self.meter
        connection.on_idle = self._note_idle
        connection.closed = self._closed

    def _begin(self) -> None:
        """The engine serves from now on."""
        self.ready.set()
        self._note_idle()  # it may have been closed already

    def _give_up(self, cause: EngineLost) -> None:
        """A request met the end of this life before its watchers did."""
        self._end_with(cause)

    def _refuse(self, frames: list[bytes]) -> None:
        """Take what comes where nothing may: once it is ready, an engine speaks by one socket."""
        if frames[0] == rank_identity(self._rank):  # else a stranger's
            raise WireError(
                f"engine {self.engine} broke the protocol: it is ready, and introduces itself anew",
                engine=self.engine,
            )

    async def _watch_link(self, socket: ZSocket, most: int, key: str) -> None:
        """End this life when the engine's end of a socket is gone: what was under way is lost.

        Args:
            socket: Opened to be watched.
            most: Bytes of one message: for more, libzmq drops a peer without another sign.
            key: What says so.
        """

        def refuse(_: str) -> Never:
            raise WireError(
                f"engine {self.engine} dropped its connection, or was dropped for a message of "
                f"more than {most:,} bytes ({key})",
                engine=self.engine,
            )

        try:
            await socket.watch_peers(on_drop=refuse)
        except WireError:
            # Most often its process has ended, and there is more to be known, or heard.
            await trio.sleep(self.last_words_s)
            raise

    def _on_stats(self, stats: SchedulerStats) -> None:
        running, waiting = stats.num_running_reqs, stats.num_waiting_reqs
        if self._publish is None or not self._gate.due(running, waiting, stats.kv_cache_usage):
            return
        self._seq += 1
        self._publish(self._read(stats))

    def _note_idle(self) -> None:
        ends_well = self._closed and self.cause is None
        if ends_well and self._connection is not None and self._connection.is_idle:
            self._finished.set()

    # The end.

    def close(self) -> None:
        """Take nothing new, and end when what is there is finished; idempotent."""
        self._closed = True
        if self._connection is not None:
            self._connection.closed = True
            self._note_idle()
        elif not self.ready.is_set():
            self._scope.cancel()  # there is nothing to finish, and a start may take minutes

    def lose(self, cause: Exception) -> None:
        """Give this life up, whatever it does; idempotent."""
        self._end_with(cause)

    def abandon(self) -> None:  # noqa: B027 - there is nothing to do
        """Nothing: no call of this process is stuck in such an engine."""

    def _end_with(self, cause: Exception) -> None:
        self._tell(cause)
        self._scope.cancel()

    @trio.lowlevel.enable_ki_protection
    def _tell(self, cause: Exception) -> None:
        """This life is over: first whoever places requests is told, then the requests are."""
        if self.cause is not None:
            return
        self.cause = cause
        self.close()
        self._on_lost(cause)
        if self._connection is not None:
            self._connection.fail_all(cause, reason(cause))

    # What is known of it.

    def link(
        self, deliver: Deliver, on_report: OnReport | None = None, *, hears_all: bool = False
    ) -> ZmqLink:
        """A link to this life for one client."""
        assert self._connection is not None, "an engine is linked when it is ready"  # noqa: S101
        return ZmqLink(self._connection, deliver, on_report, hears_all=hears_all)

    def statistics(self) -> EngineCoreStatistics:
        """What the engine has done since its birth, by its newest word."""
        told = statistics_from_wire(self._stats)
        assert told is not None, "`_stats` has all counts"  # noqa: S101
        if self.cause is None:
            return told
        return evolve(told, running=0, waiting=0, kv_cache_usage=0.0, free_blocks=told.num_blocks)

    def report(self) -> StepReport:
        """How much work its requests are, by its newest word."""
        report = self._read(self._stats).report
        assert report is not None, "`_stats` has one"  # noqa: S101
        return report

    def audit(self, charged: AbstractSet[str]) -> Iterator[str]:
        """What is charged to it against what was sent there, and against its own word when idle."""
        held = set(self._connection.held) if self._connection is not None else set()
        yield from (f"{name} is charged to {self.engine}, which lost it" for name in charged - held)
        yield from (f"{name} is on {self.engine}, charged to nobody" for name in held - charged)
        if self._connection is not None and self.cause is None:
            yield from self._connection.contradictions()

    @property
    def _stats(self) -> SchedulerStats:
        connection = self._connection
        said = SchedulerStats() if connection is None else connection.stats
        if said.dpkit is UNSET:  # nothing has been said yet, or the engine does not say this
            blocks = self.limits.num_blocks
            counted = None if connection is None else connection.report
            said = replace(
                said, dpkit=counted or EngineReport(free_blocks=blocks, num_blocks=blocks)
            )
        return said

    def _read(self, stats: SchedulerStats) -> EngineStats:
        return stats_from_wire(stats, engine=self.engine, index=self._index, seq=self._seq)
