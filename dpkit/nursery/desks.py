"""Where engines that are started elsewhere join: one handshake a group, and sockets for every life.

A desk listens for as long as its group is there. Each life has sockets of its own, at addresses
that no other life was told: what comes late of a former one comes to nobody. Imports ZeroMQ, so it
is imported only where there is such a group. What becomes of a life is `dpkit.nursery.joined`'s
affair.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Never

import trio
import zmq
from attrs import frozen

from dpkit.config.checks import host_and_port
from dpkit.link.together import run_together
from dpkit.nursery.context import protected_context
from dpkit.nursery.sharedcontext import SharedContext
from dpkit.wire.address import AddressFailed
from dpkit.wire.reception import Reception
from dpkit.wire.structs import Addresses, Init
from dpkit.wire.zsocket import open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dpkit.config.schema import EngineGroupConfig
    from dpkit.nursery.gathering import Round
    from dpkit.wire.zsocket import ZSocket

_LINGER_MS = 1000
"""What a life says last: aborts, and why its engine was refused. Nobody waits for that here."""

_LAST_LIFE_S = 5.0
"""How long lives may take to let go: they have been cancelled as well."""

_NOTICE_AFTER_S = 10.0

_LOOK_AFTER_S = 0.1
"""After the drop of a peer: by then its last word has been read, and libzmq has let go of it."""

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class OwnCoordinator:
    """A coordinator's sockets for one life alone; it coordinates nobody with anybody."""

    to_engine: ZSocket
    """An XPUB: what a coordinator tells an engine."""
    counts: ZSocket
    """A PULL: what an engine tells a coordinator."""


@frozen(kw_only=True)
class LifeSockets:
    """What one life has bound."""

    input: ZSocket
    """A ROUTER to send requests by, watched for drops."""
    output: ZSocket
    """A PULL, watched for drops."""
    init: Init
    """What its engine is told."""
    own: OwnCoordinator | None
    """None: its engine steps together with others, whose coordinator is that of them all."""


class Desk:
    """The handshake of one group; `run` is a service task, until `stop`.

    Args:
        group: Whose engines join.
        after: Desks of former groups, which may still be at its address.
    """

    def __init__(self, group: EngineGroupConfig, *, after: Sequence[Desk] = ()) -> None:
        self.name = group.name
        self.closed = trio.Event()
        """Its address is free again."""
        self.settings = group.vllm
        self.error: AddressFailed | None = None
        """Why nobody can join."""
        self._after = after
        self._context = SharedContext(_LAST_LIFE_S)
        self._address = ""
        self._reception: Reception | None = None
        self._settled = trio.Event()
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<Desk of {self.name} at {self._address or 'no address'}>"

    async def run(self) -> None:
        """Listen, until stopped; that it cannot is kept for whoever wants to join somebody."""
        settings = self.settings
        assert settings.handshake is not None, "every such group has one"  # noqa: S101
        try:
            with self._scope:
                for former in self._after:
                    await former.closed.wait()
                async with (
                    self._context.open() as context,
                    open_zsocket(
                        context,
                        zmq.ROUTER,
                        bind=settings.handshake,
                        max_message_bytes=settings.max_message,
                        watch=True,
                    ) as socket,
                ):
                    self._reception = reception = Reception(socket.send_nowait, self.name)
                    self._address = reachable(socket.endpoint, settings.host)
                    _log.info("%s: engines may join at %s", self.name, self._address)
                    self._settled.set()
                    await run_together(
                        partial(socket.pump, reception.take),
                        partial(_look_after_guests, socket, reception),
                        self._tell_who_is_missing,
                    )
        except AddressFailed as error:
            self.error = error
        finally:
            self._reception = None
            self._settled.set()
            self.closed.set()

    async def _tell_who_is_missing(self) -> Never:
        """Say once, in the log, whom a start waits for: it may wait for long."""
        await trio.sleep(_NOTICE_AFTER_S)
        missing = [] if self._reception is None else self._reception.missing
        if missing:
            who = ", ".join(f"{self.name}-{rank}" for rank in missing)
            _log.warning("%s: nobody has joined at %s yet for %s", self.name, self._address, who)
        await trio.sleep_forever()

    def stop(self) -> None:
        """There is no such group any more."""
        self._scope.cancel()

    async def open_reception(self) -> Reception:
        """Wait until it listens.

        Raises:
            AddressFailed: it cannot.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        if self._reception is None:
            raise AddressFailed(f"{self.name} was stopped before anybody could join")
        return self._reception

    @property
    def any_port(self) -> str:
        """Where the sockets of lives are bound."""
        return f"tcp://{host_and_port(self.settings.handshake or '')[0]}:*"

    async def address(self) -> str:
        """What engines are given to say HELLO at; waits and raises as `open_reception`."""
        await self.open_reception()
        return self._address

    @protected_context
    async def open_sockets(self, round_: Round | None = None) -> AsyncIterator[LifeSockets]:
        """Bind the sockets of one life.

        A coordinator's are among them, unless it is that of a group that steps together: an engine
        of vLLM's that has none says neither how many requests it has nor that it has dropped one.
        """
        settings = self.settings
        at = self.any_port
        async with AsyncExitStack() as stack:
            context = stack.enter_context(self._context.use())

            async def bind(kind: zmq.SocketType, **options: Any) -> ZSocket:
                size = settings.max_message
                opened = open_zsocket(context, kind, bind=at, max_message_bytes=size, **options)
                return await stack.enter_async_context(opened)

            requests = await bind(zmq.ROUTER, watch=True, linger_ms=_LINGER_MS)
            outputs = await bind(zmq.PULL, watch=True)
            own, together = None, {}
            if round_ is None:
                own = OwnCoordinator(to_engine=await bind(zmq.XPUB), counts=await bind(zmq.PULL))
                tells, hears = own.to_engine.endpoint, own.counts.endpoint
            else:
                tells, hears = round_.addresses.back_publish, round_.addresses.back_output
                together = round_.parallel_config
            addresses = Addresses(
                inputs=(reachable(requests.endpoint, settings.host),),
                outputs=(reachable(outputs.endpoint, settings.host),),
                coordinator_input=reachable(tells, settings.host),
                coordinator_output=reachable(hears, settings.host),
            )
            init = Init(addresses=addresses, parallel_config=together)
            yield LifeSockets(input=requests, output=outputs, init=init, own=own)


async def _look_after_guests(socket: ZSocket, reception: Reception) -> Never:
    """Have it noticed when an engine goes between its HELLO and its READY, which may be minutes."""
    somebody_left = trio.Event()

    def note(_: str) -> None:
        somebody_left.set()

    async def look() -> Never:
        nonlocal somebody_left
        while True:
            await somebody_left.wait()
            await trio.sleep(_LOOK_AFTER_S)
            somebody_left = trio.Event()
            reception.look_after()

    await run_together(partial(socket.watch_peers, on_drop=note), look)


def reachable(endpoint: str, host: str | None) -> str:
    """A bound address as others are told it."""
    return endpoint if host is None else f"tcp://{host}:{endpoint.rpartition(':')[2]}"
