"""One life of an engine in a process of its own, from the launch to the last word.

Owns everything that this life has here: sockets, the process, and the tasks that pump, watch and
ask. They end together: a process that dies, hangs, or says what cannot be read ends its own life,
and no other. The process itself is started and reaped by a launcher (`dpkit.launch`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Never

import trio
from attrs import evolve
from msgspec import UNSET
from msgspec.structs import replace

from dpkit.errors import (
    DpkitError,
    EngineLost,
    InternalError,
    LaunchFailed,
    WireError,
    describe,
    reason,
)
from dpkit.launch.gist import gist
from dpkit.link.zmq import WireConnection, ZmqLink
from dpkit.wire.codec import rank_identity
from dpkit.wire.reports import statistics_from_wire, stats_from_wire
from dpkit.wire.structs import EngineReport, SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from collections.abc import Set as AbstractSet

    from dpkit.abc import Worker
    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.engine.publish import PublishGate
    from dpkit.messages import EngineId, EngineStats, StepReport
    from dpkit.nursery.hosts import EngineHost
    from dpkit.nursery.inbox import Deliver
    from dpkit.wire.frontend import FrontendSockets
    from dpkit.wire.zsocket import ZSocket

ASK_EVERY_S = 1.0
"""How often an engine is asked how far it is, or a quarter of `step_timeout` if that is less."""

_DEATH_S = 0.5
"""Longer than it takes from the end of a process until its parent knows."""


class RemoteLife:
    """A `dpkit.nursery.life.Life` in another process; `run` is its task.

    Args:
        engine: The incarnation this life is known by.
        rank: Of the engine in the cluster.
        host: Starts the process, and binds the sockets.
        publish: Takes its stats, synchronously. None: nothing is published.
        gate: Says when the counts have changed enough to be published.
        on_lost: Told that this life is over, before its requests are.
    """

    is_interruptible = True  # whatever it does, its process can be killed

    def __init__(
        self,
        *,
        engine: EngineId,
        rank: int,
        host: EngineHost,
        publish: Callable[[EngineStats], None] | None,
        gate: PublishGate,
        on_lost: Callable[[Exception], None],
    ) -> None:
        self.engine = engine
        self.limits = host.limits
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.cause: Exception | None = None
        self._rank = rank
        self._host = host
        self._ask_every = min(ASK_EVERY_S, host.group.supervision.step_timeout / 4)
        self._publish = publish
        self._gate = gate
        self._on_lost = on_lost
        self._seq = 0
        self._closed = False
        self._connection: WireConnection | None = None
        self._worker: Worker | None = None
        self._is_explained = True  # how its process ended is said in its cause, or is beside it
        self._finished = trio.Event()
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "ready" if self.ready.is_set() else "starting"
        where = "" if self._worker is None else f" in process {self._worker.pid}"
        return f"<RemoteLife {self.engine}: {state}{where}>"

    @property
    def model_class(self) -> str:
        """The model by its name in the config: its class lives elsewhere."""
        return self._host.group.model

    @property
    def pid(self) -> int | None:
        """Of the process; None: it has none yet."""
        return None if self._worker is None else self._worker.pid

    @property
    def step_started_at(self) -> float | None:
        """When what the engine is at began, as far as it has said."""
        if self._connection is None or self.cause is not None:
            return None
        return self._connection.progress.step_started_at

    @property
    def delay(self) -> str:
        """What it has been at since then; of one that does not even answer, that it does not."""
        heard_at = math.inf if self._connection is None else self._connection.progress.heard_at
        if trio.current_time() - heard_at >= self._host.group.supervision.step_timeout:
            return "it has said nothing for"
        return "a step has taken"

    async def run(self) -> None:
        """Launch the process and serve, until closed and nothing is left to do.

        Error handling:
            LaunchFailed: it did not come up in time, or died meanwhile. EngineLost: it died, or
            met an error. WireError: it said what cannot be read. ModelNotFound and others: what
            loading the model raised.
        """
        try:
            with self._scope:
                await self._live()
            self._note_if_late()
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

    async def _live(self) -> None:
        async with self._host.open_sockets(self._rank) as sockets:
            ready_by = trio.current_time() + self._host.group.process.start_timeout
            self._scope.deadline = ready_by  # one that is spawned loads its model by itself
            async with (
                self._host.open_worker(
                    self.engine, self._rank, sockets.handshake_address
                ) as worker,
                trio.open_nursery() as nursery,
            ):
                self._scope.deadline = math.inf
                self._worker = worker
                nursery.start_soon(self._guard, self._watch_process, worker)
                nursery.start_soon(self._guard, self._serve, sockets, nursery, ready_by)
                await self._finished.wait()
                nursery.cancel_scope.cancel()

    def _note_if_late(self) -> None:
        """Tell the end at the deadline of the start from one that was asked for."""
        if self._scope.cancelled_caught and self._scope.deadline < math.inf and not self._closed:
            self._end_with(self._late("its process is not prepared"))

    def _late(self, how_far: str) -> LaunchFailed:
        timeout = self._host.group.process.start_timeout
        return LaunchFailed(
            f"engine {self.engine} was not ready within {timeout:g} s "
            f"(engines.process.start_timeout): {how_far}{self._last_words()}",
            engine=self.engine,
        )

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
        message = f"engine {self.engine} broke down: {describe(error)}"
        bug = InternalError(message, engine=self.engine)
        bug.__cause__ = error
        return bug

    async def _serve(
        self, sockets: FrontendSockets, nursery: trio.Nursery, ready_by: float
    ) -> None:
        try:
            await sockets.welcome(self._rank, ready_by)
        except LaunchFailed as error:
            raise self._late(str(error)) from error
        connection = self._connection = WireConnection(
            self.engine,
            self._rank,
            sockets.input,
            limit=self._host.group.process.max_message,
            on_stats=self._on_stats,
            on_gone=self._give_up,
        )
        connection.on_idle = self._note_idle
        connection.closed = self._closed
        self.ready.set()
        self._note_idle()  # it may have been closed already
        nursery.start_soon(self._guard, self._ask, connection)
        for socket in (sockets.input, sockets.output):
            nursery.start_soon(self._guard, self._watch_link, socket)
        for socket in (sockets.input, sockets.handshake):
            nursery.start_soon(self._guard, socket.pump, self._refuse)
        try:
            await sockets.output.pump(connection.take)
        except EngineLost as error:
            self._give_up(error)

    def _give_up(self, cause: EngineLost) -> None:
        """Take note of an end that is not known from the process: it may be about to say more."""
        self._is_explained = False
        self._tell(cause)
        self._scope.deadline = trio.current_time() + _DEATH_S

    def _explain(self) -> None:
        """Say how the process ended, where only others have said yet that it did."""
        if not self._is_explained:
            self.cause = EngineLost(f"{self.cause}: {self._how_it_ended()}", engine=self.engine)
            self._is_explained = True

    def _refuse(self, frames: list[bytes]) -> None:
        """Take what comes where nothing may: once it is ready, an engine speaks by one socket."""
        if frames[0] == rank_identity(self._rank):  # else a stranger's
            raise WireError(
                f"engine {self.engine} broke the protocol: it is ready, and introduces itself anew",
                engine=self.engine,
            )

    async def _watch_link(self, socket: ZSocket) -> None:
        """End this life when the engine's end of a socket is gone: what was under way is lost."""
        most = self._host.group.process.max_message

        def refuse(_: str) -> Never:
            raise WireError(
                f"engine {self.engine} dropped its connection, or was dropped for a message of "
                f"more than {most:,} bytes (engines.process.max_message)",
                engine=self.engine,
            )

        try:
            await socket.watch_peers(on_drop=refuse)
        except WireError:
            # Most often its process has ended, which is about to be known and says more.
            await trio.sleep(_DEATH_S)
            raise

    async def _watch_process(self, worker: Worker) -> None:
        await worker.wait()
        if self.ready.is_set():
            lost = f"engine {self.engine} is lost: {self._how_it_ended()}"
            raise EngineLost(lost, engine=self.engine)
        raise LaunchFailed(
            f"engine {self.engine} did not come up: {self._how_it_ended()}", engine=self.engine
        )

    def _how_it_ended(self) -> str:
        worker = self._worker
        if worker is None or worker.status is None:
            return "its process has not ended"
        return f"its process {worker.pid} {worker.status}{self._last_words()}"

    def _last_words(self) -> str:
        said = "" if self._worker is None else gist(self._worker.last_lines)
        return f"; its last words: {said}" if said else ""

    async def _ask(self, connection: WireConnection) -> None:
        while True:
            connection.ask_progress()
            await trio.sleep(self._ask_every)

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
        """Give this life up, whatever it does: its process is killed; idempotent."""
        self._end_with(cause)
        if self._worker is not None:
            self._worker.kill()

    def abandon(self) -> None:
        """Nothing: a process that does not end is killed as it is."""

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

    def link(self, deliver: Deliver) -> ZmqLink:
        """A link to this life for one client."""
        assert self._connection is not None, "an engine is linked when it is ready"  # noqa: S101
        return ZmqLink(self._connection, deliver)

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
        said = SchedulerStats() if self._connection is None else self._connection.stats
        if said.dpkit is UNSET:  # nothing has been said yet
            blocks = self.limits.num_blocks
            said = replace(said, dpkit=EngineReport(free_blocks=blocks, num_blocks=blocks))
        return said

    def _read(self, stats: SchedulerStats) -> EngineStats:
        return stats_from_wire(stats, engine=self.engine, index=self._rank, seq=self._seq)
