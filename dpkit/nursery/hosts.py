"""Where engines in processes come from: a launcher for every model, and sockets for every life.

A launcher loads its model once, however many engines use it. Imports ZeroMQ, so it is imported only
where there is such an engine. What becomes of a life is `dpkit.nursery.remote`'s affair.
"""

from __future__ import annotations

import logging
import math
from itertools import count
from typing import TYPE_CHECKING, Any

import trio
from attrs import asdict, frozen

from dpkit.errors import LaunchFailed
from dpkit.launch.folder import open_folder
from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote
from dpkit.names import StartMethod, Transport
from dpkit.nursery.context import protected_context
from dpkit.nursery.sharedcontext import SharedContext
from dpkit.wire.frontend import open_frontend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from dpkit.abc import Launcher, Worker
    from dpkit.config.schema import EngineGroupConfig
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import EngineId
    from dpkit.nursery.gathering import Gathering, Round
    from dpkit.wire.frontend import FrontendSockets

WORK = "dpkit.launch.child:work"
"""What an engine's process does."""

GRACE_S = 1.0
"""From SIGTERM to SIGKILL, for an engine that has nothing left to do."""

_LAST_LIFE_S = 3 * GRACE_S
"""By then the last life has ended that was told to end, by force if need be."""


class ModelHost:
    """Keeps the launcher of one model; `run` is a service task, until `stop`.

    Args:
        group: Of whose model.
        lockstep: Whether its engines step together, and need to vote.
    """

    def __init__(self, group: EngineGroupConfig, *, lockstep: bool = False) -> None:
        self.error: Exception | None = None
        """What loading raised."""
        self.name = group.model
        self._group = group
        self._lockstep = lockstep
        self._launcher: Launcher | None = None
        self._start_timeout = 0.0
        self._folder = ""
        self.context = SharedContext(_LAST_LIFE_S)
        """Of the sockets of its engines' lives."""
        self._numbers = count()
        self._settled = trio.Event()
        self._scope = trio.CancelScope()

    def serve(self, group: EngineGroupConfig) -> None:
        """Serve this group as well; the model may take as long as the most patient one allows."""
        self._start_timeout = max(self._start_timeout, group.process.start_timeout)

    async def run(self) -> None:
        """Load the model and be there; what loading raises is kept for whoever wants a launcher."""
        try:
            with self._scope, open_folder() as self._folder:
                self._scope.deadline = trio.current_time() + self._start_timeout
                await self._keep()
        except Exception as error:  # noqa: BLE001 - raised by `launcher`
            self.error = error
        finally:
            if self._launcher is None and self.error is None:
                self.error = self._late()
            self._settled.set()

    async def _keep(self) -> None:
        async with self.context.open(), self._open() as self._launcher:
            self._scope.deadline = math.inf
            self._settled.set()
            try:
                await trio.sleep_forever()
            finally:  # the launcher ends by force whoever has not ended by then
                await self.context.wait_unused()

    def _late(self) -> LaunchFailed:
        if trio.current_time() < self._scope.deadline:
            return LaunchFailed(f"model {self.name!r} was let go before it was loaded")
        return LaunchFailed(
            f"model {self.name!r} was not loaded within {self._start_timeout:g} s "
            "(engines.process.start_timeout)"
        )

    def _open(self) -> AbstractAsyncContextManager[Launcher]:
        group = self._group
        opener = open_zygote if group.process.start is StartMethod.FORK else open_spawner
        return opener(
            "dpkit.launch.child:prepare",
            {
                "model": group.model,
                "dtype": group.dtype.value,
                "quant": group.quant.value,
                "device": group.device,
                "lockstep": self._lockstep,
            },
            name=group.model,
        )

    def stop(self) -> None:
        """No engine needs it any more."""
        self._scope.cancel()

    async def launcher(self) -> Launcher:
        """Wait until the model is loaded.

        Raises:
            ModelNotFound, ModelUnsupported, LaunchFailed: it cannot be had.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        assert self._launcher is not None  # noqa: S101 - settled, and without an error
        return self._launcher

    def addresses(self, transport: Transport) -> tuple[str, str, str]:
        """Three addresses to bind: for the handshake, for requests, for outputs."""
        if transport is Transport.TCP:
            return ("tcp://127.0.0.1:*",) * 3
        path = f"ipc://{self._folder}/{next(self._numbers)}"
        return f"{path}h", f"{path}i", f"{path}o"


@frozen(kw_only=True)
class EngineHost:
    """Starts the engines of one group."""

    group: EngineGroupConfig
    model: ModelHost
    limits: EngineLimits
    threads: int
    """Of each engine."""
    kv_publish_delta: float
    gathering: Gathering | None = None
    """Of engines that step together: where they meet."""
    lockstep: Mapping[str, Any] | None = None
    """Likewise: fields of `LockstepPlan`."""

    @protected_context
    async def attend(self, rank: int) -> AsyncIterator[Round | None]:
        """Take part in the present life of the group; None: there is none, it steps alone."""
        if self.gathering is None:
            yield None
            return
        await self.model.launcher()  # no model, no folder for sockets
        async with self.gathering.attend(rank) as round_:
            yield round_

    @protected_context
    async def open_sockets(self, rank: int, round_: Round | None) -> AsyncIterator[FrontendSockets]:
        """Bind the sockets of one life."""
        await self.model.launcher()  # no model, no folder
        handshake, requests, outputs = self.model.addresses(self.group.process.transport)
        together = {} if round_ is None else _told(round_)
        with self.model.context.use() as context:
            async with open_frontend(
                context,
                ranks=[rank],
                bind_handshake=handshake,
                bind_input=requests,
                bind_output=outputs,
                local=True,
                **together,
                max_message_bytes=self.group.process.max_message,
            ) as sockets:
                yield sockets

    @protected_context
    async def open_worker(
        self, engine: EngineId, rank: int, handshake: str
    ) -> AsyncIterator[Worker]:
        """Start the process of one life; it says HELLO at the address."""
        launcher = await self.model.launcher()
        args = {
            "handshake": handshake,
            "rank": rank,
            "name": str(engine),
            "limits": asdict(self.limits),
            "threads": self.threads,
            "kv_publish_delta": self.kv_publish_delta,
            "max_message": self.group.process.max_message,
            "log_level": logging.getLogger("dpkit").getEffectiveLevel(),
            "count": 1 if self.lockstep is None else self.group.count,
            "lockstep": self.lockstep,
        }
        async with launcher.open_worker(WORK, args, name=str(engine), grace=GRACE_S) as worker:
            yield worker


def _told(round_: Round) -> dict[str, Any]:
    """What INIT says of the group, as `open_frontend` is told it."""
    return {
        "coordinator_input": round_.addresses.back_publish,
        "coordinator_output": round_.addresses.back_output,
        "parallel_config": round_.parallel_config,
    }
