"""One engine behind the wire, from HELLO to its last word: sockets, frontends and busy loop.

The same busy loop as in process, with vLLM's frontends and dpkit's own as its clients. Owns its
sockets and its tasks; of processes and signals it knows nothing but an event that asks it to stop.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from dpkit.engine.core import EngineCore
from dpkit.engine.publish import PublishGate
from dpkit.errors import DpkitError, WireError, describe
from dpkit.link.frontends import Frontends
from dpkit.link.group import open_group
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.inbox import Inbox
from dpkit.wire.codec import CoordinatorReady, decode_from_coordinator, encode_ready_response
from dpkit.wire.handshake import open_engine_connection
from dpkit.wire.reports import ready_response
from dpkit.wire.zsocket import MAX_MESSAGE_BYTES, open_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dpkit.abc import Model
    from dpkit.engine.limits import EngineLimits
    from dpkit.link.group import Group, LockstepPlan
    from dpkit.messages import EngineId
    from dpkit.wire.handshake import EngineConnection
    from dpkit.wire.zsocket import ZSocket

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Place:
    """Which engine this is, and whom it belongs to."""

    engine: EngineId
    rank: int
    count: int  # engines that serve together
    handshake: str  # address of whoever tells it where its frontends are
    local: bool  # that owner has started it, on this host
    publish_delta: float | None  # change of KV usage that is worth a message; None: tell no numbers
    max_message_bytes: int = MAX_MESSAGE_BYTES
    lockstep: LockstepPlan | None = None  # None: it steps alone
    lease: float | None = None  # seconds that it waits for frontends that have all gone; None: ever


class Deserted(DpkitError):  # noqa: N818 - reads as what happened
    """No frontend of an engine has been there for as long as it waits for one (the world's)."""


@frozen(kw_only=True)
class Loaded:
    """What serves in that place."""

    model: Model
    limits: EngineLimits
    dtype: str  # what it computes in: "float32", "bfloat16" or "float16"


async def serve_engine(
    place: Place, load: Callable[[], Awaitable[Loaded]], stop: trio.Event
) -> None:
    """Live one life of one engine: say HELLO, load, serve, until `stop` is set.

    Args:
        place: Which engine it is.
        load: Called once the owner has answered, which may wait for long while weights are read.
        stop: Asks for an end in order: requests end as aborted, and what was said still leaves.

    Resource handling:
        All sockets are closed and the model's cache is gone when this returns. What was sent
        lingers a few seconds at most. Cancelled, it ends at once, and tells its frontends that.

    Error handling:
        LaunchFailed, AddressFailed: nobody answered at the handshake, or its group did not meet.
        Deserted: all its frontends have gone, for longer than its lease.
        WireError: its owner cannot be understood, or none of its frontends, or, if it steps
        together with others, the coordinator. EngineLost: a vote of its group failed.
        What `load` raises, and what the model does, comes out as it is; frontends have been told by
        then that the engine is dead.
    """
    failure: Exception | None = None
    life: _Life | None = None
    async with open_context() as context, trio.open_nursery() as nursery:

        async def obey() -> None:
            await stop.wait()
            if life is None or not life.stop():
                nursery.cancel_scope.cancel()

        nursery.start_soon(obey)
        try:
            async with open_engine_connection(
                context,
                place.handshake,
                rank=place.rank,
                local=place.local,
                headless=not place.local,
                max_message_bytes=place.max_message_bytes,
            ) as connection:
                loaded = await load()
                async with open_group(
                    place.lockstep,
                    rank=place.rank,
                    count=place.count,
                    init=connection.init,
                    limits=loaded.limits,
                ) as group:
                    life = _Life(place, connection, loaded, group)
                    await life.run()
        except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class _Life:
    def __init__(
        self, place: Place, connection: EngineConnection, loaded: Loaded, group: Group | None
    ) -> None:
        self._name = str(place.engine)
        self._lease = place.lease
        self._connection = connection
        self._inbox = Inbox()
        self._frontends = Frontends(place.rank, self._inbox, limit=place.max_message_bytes)
        self._lockstep = None if group is None else group.lockstep(place.engine, self._inbox)
        self._loop = BusyLoop(
            engine=place.engine,
            index=place.rank,
            model=loaded.model,
            core=EngineCore(loaded.model, limits=loaded.limits),
            inbox=self._inbox,
            publish=None if place.publish_delta is None else self._frontends.publish,
            gate=PublishGate(place.publish_delta or 0.0),
            flush=self._frontends.flush,
            lockstep=self._lockstep,
        )
        self._frontends.serve(self._loop)
        self._ready = ready_response(
            loaded.limits,
            rank=place.rank,
            count=place.count,
            instance_id=self._name,
            dtype=loaded.dtype,
        )
        self._ready.dp_stats_address = connection.init.addresses.frontend_stats_publish_address
        self._gone: set[int] = set()
        self._expelled: set[int] = set()
        self._somebody_came = trio.Event()
        self._failure: Exception | None = None
        self._nursery: trio.Nursery

    def stop(self) -> bool:
        """End in order; False: there is nothing to end yet."""
        if self._loop.ready.is_set():
            self._frontends.stop()
        return self._loop.ready.is_set()

    async def run(self) -> None:
        """Allocate, say that all is ready, and serve until stopped."""
        async with trio.open_nursery() as self._nursery:
            self._start(self._work, "busy loop")
            self._start(self._welcome, "welcome")
        if self._failure is not None:
            raise self._failure

    def _start(self, task: Callable[..., Awaitable[None]], what: str, *args: object) -> None:
        self._nursery.start_soon(self._guard, task, args, name=f"{what} {self._name}")

    @trio.lowlevel.enable_ki_protection
    async def _guard(self, task: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        """Run one of this life's tasks; what it raises ends the life, and goes into no group."""
        try:
            await task(*args)
        except Exception as error:  # noqa: BLE001 - it comes out of `run`
            self._failure = self._failure or error
            self._nursery.cancel_scope.cancel()

    async def _work(self) -> None:
        """The busy loop; without it, there is nothing to be heard and nothing to be said."""
        try:
            await self._loop.run()
        except BaseException:
            self._frontends.die()
            raise
        self._nursery.cancel_scope.cancel()

    async def _welcome(self) -> None:
        """Once the loop is ready, have the frontends and the coordinator know, and hear them."""
        await self._loop.ready.wait()
        connection = self._connection
        self._frontends.connect([each.send_nowait for each in connection.outputs])
        if connection.coordinator_out is not None:
            self._frontends.coordinator = connection.coordinator_out.send_nowait
        await connection.announce(self._ready)
        # To a coordinator that knows this rank by an earlier life, it is idle from now on.
        self._frontends.tell_coordinator()
        for index in range(len(connection.inputs)):
            self._start(self._hear, f"frontend {index} of", index)
            self._start(self._watch, f"connection of frontend {index} of", index)
        there, back = connection.coordinator_in, connection.coordinator_out
        if there is not None and back is not None:
            self._start(self._hear_coordinator, "coordinator of", there)
            self._start(self._watch_coordinator, "connection of coordinator of", there, back)

    async def _hear(self, index: int) -> None:
        """Take in what a frontend says, until it says what cannot be understood."""
        connection = self._connection
        try:
            await connection.inputs[index].pump(partial(self._frontends.receive, index))
        except WireError as error:
            _log.error(
                "engine %s: frontend %d cannot be understood and is heard no more: %s",
                *(self._name, index, describe(error)),
            )
            self._frontends.expel(index, error)
            self._expelled.add(index)
            connection.inputs[index].close()
            connection.outputs[index].close()
            if len(self._expelled) == len(connection.inputs):
                raise

    async def _watch(self, index: int) -> None:
        """Drop the requests of a frontend that has gone; be ready for it when it comes back."""
        socket = self._connection.inputs[index]

        def drop(_: object) -> None:
            _log.warning("engine %s: frontend %d has gone", self._name, index)
            self._gone.add(index)
            self._frontends.forget(index)
            if self._lease is not None and self._frontends.is_deserted:
                self._start(self._wait_for_frontends, "lease of", self._lease)

        def connect(_: object) -> None:
            if index in self._gone:
                self._gone.remove(index)
                self._frontends.back(index)
                self._somebody_came.set()
                self._somebody_came = trio.Event()
                socket.send_nowait([encode_ready_response(self._ready)])

        with suppress(trio.ClosedResourceError):  # expelled
            await socket.watch_peers(on_connect=connect, on_drop=drop)

    async def _wait_for_frontends(self, lease: float) -> None:
        """End this life unless a frontend comes back in time."""
        with trio.move_on_after(lease):
            while self._frontends.is_deserted:
                await self._somebody_came.wait()
        if self._frontends.is_deserted:
            raise Deserted(f"engine {self._name}: no frontend has been there for {lease:g} s")

    async def _hear_coordinator(self, socket: ZSocket) -> None:
        """Take what the coordinator says: READY once more, and waves.

        Waves are for engines that step together; one that steps alone can do without.
        """

        def take(frames: Sequence[bytes]) -> None:
            told, lockstep = decode_from_coordinator(frames), self._lockstep
            if lockstep is not None and not isinstance(told, CoordinatorReady):
                lockstep.note_start(told.wave, told.excluded)

        try:
            await socket.pump(take)
        except WireError as error:
            if self._lockstep is not None:
                raise
            _log.warning("engine %s does not hear the coordinator: %s", self._name, error)
            self._frontends.coordinator = None
            socket.close()

    async def _watch_coordinator(self, socket: ZSocket, back: ZSocket) -> None:
        """Keep nothing for a coordinator that has gone; tell one that comes back all at once."""

        def drop(_: object) -> None:
            _log.warning("engine %s: the coordinator has gone", self._name)
            self._frontends.coordinator = None

        def connect(_: object) -> None:
            if self._frontends.coordinator is None:
                self._frontends.coordinator = back.send_nowait
                self._frontends.tell_coordinator()
                if self._lockstep is not None:
                    self._lockstep.report()

        with suppress(trio.ClosedResourceError):  # it could not be understood
            await socket.watch_peers(on_connect=connect, on_drop=drop)
