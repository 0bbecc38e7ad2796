"""One life of an engine in a process of its own, from the launch to the last word.

Owns everything that this life has here: sockets, the process, and the tasks that pump, watch and
ask. They end together: a process that dies, hangs, or says what cannot be read ends its own life,
and no other. The process itself is started and reaped by a launcher (`dpkit.launch`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from dpkit.errors import EngineLost, LaunchFailed
from dpkit.launch.gist import gist
from dpkit.link.catchup import CatchUp
from dpkit.link.group import LOST_WITH_ITS_GROUP
from dpkit.link.zmq import WireConnection
from dpkit.nursery.wirelife import WireLife

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.abc import Worker
    from dpkit.engine.publish import PublishGate
    from dpkit.messages import EngineId, EngineStats
    from dpkit.nursery.gathering import Round
    from dpkit.nursery.hosts import EngineHost
    from dpkit.wire.frontend import FrontendSockets

ASK_EVERY_S = 1.0
"""How often an engine is asked how far it is, or a quarter of `step_timeout` if that is less."""


class RemoteLife(WireLife):
    """A life in another process. Arguments as of `WireLife`, and these.

    Args:
        rank: Of the engine in the cluster, and on the wire.
        host: Starts the process, and binds the sockets.

    Error handling of `run`:
        LaunchFailed: it did not come up in time, or died meanwhile. EngineLost: it died, or met an
        error. WireError: it said what cannot be read. ModelNotFound and others: what loading the
        model raised.
    """

    last_words_s = 0.5  # longer than it takes from the end of a process until its parent knows

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
        super().__init__(
            engine=engine,
            index=rank,
            rank=rank,
            limits=host.limits,
            publish=publish,
            gate=gate,
            on_lost=on_lost,
        )
        self._host = host
        self._ask_every = min(ASK_EVERY_S, host.group.supervision.step_timeout / 4)
        self._worker: Worker | None = None
        self._is_explained = True  # how its process ended is said in its cause, or is beside it

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

    @property
    def lost_with_its_group(self) -> bool:
        """As of `Life`: its process has ended by saying so."""
        return self._worker is not None and self._worker.status == LOST_WITH_ITS_GROUP

    async def _live(self) -> None:
        async with (
            self._host.attend(self._rank) as round_,
            self._host.open_sockets(self._rank, round_) as sockets,
        ):
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
                nursery.start_soon(self._guard, self._serve, sockets, nursery, ready_by, round_)
                await self._live_on(nursery, round_)

    def _note_end_of_scope(self) -> None:
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

    async def _serve(
        self,
        sockets: FrontendSockets,
        nursery: trio.Nursery,
        ready_by: float,
        round_: Round | None,
    ) -> None:
        try:
            await sockets.welcome(self._rank, ready_by)
        except LaunchFailed as error:
            raise self._late(str(error)) from error
        most = self._host.group.process.max_message
        connection = WireConnection(
            self.engine,
            self._rank,
            sockets.input,
            limit=most,
            on_stats=self._on_stats,
            on_gone=self._give_up,
        )
        self._attach(connection)
        if round_ is not None:
            round_.stamp(connection)
        self._begin()
        nursery.start_soon(self._guard, self._ask, connection)
        for socket in (sockets.input, sockets.output):
            nursery.start_soon(self._guard, self._watch_link, socket, most, connection.limit_key)
        for socket in (sockets.input, sockets.handshake):
            nursery.start_soon(self._guard, socket.pump, self._refuse)
        try:
            await sockets.output.pump(CatchUp(sockets.output, connection).take)
        except EngineLost as error:
            self._give_up(error)

    def _give_up(self, cause: EngineLost) -> None:
        """Take note of an end that is not known from the process: it may be about to say more."""
        self._is_explained = False
        self._tell(cause)
        self._scope.deadline = trio.current_time() + self.last_words_s

    def _explain(self) -> None:
        """Say how the process ended, where only others have said yet that it did."""
        if not self._is_explained:
            self.cause = EngineLost(f"{self.cause}: {self._how_it_ended()}", engine=self.engine)
            self._is_explained = True

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

    def lose(self, cause: Exception) -> None:
        """Give this life up, whatever it does: its process is killed; idempotent."""
        super().lose(cause)
        if self._worker is not None:
            self._worker.kill()
