"""The owner's side of the handshake: which engines are expected, and how far each has come.

`handshake` is the engines' side. Knows nothing of processes: that one ended before it was ready,
its launcher tells. Whoever enters `open_frontend` owns the sockets until it leaves.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import trio
import zmq
from attrs import define, frozen

from dpkit.errors import LaunchFailed, WireError
from dpkit.wire.codec import (
    MAX_MESSAGE_BYTES,
    decode_hello,
    decode_ready_response,
    encode_init,
    rank_identity,
    rank_of,
)
from dpkit.wire.structs import Addresses, Init
from dpkit.wire.zsocket import PeerGone, open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence

    from dpkit.wire.structs import ReadyResponse
    from dpkit.wire.zsocket import Context, ZSocket

_log = logging.getLogger("dpkit.wire")


class Phase(Enum):
    """How far an engine has come; the words stand in messages after the rank."""

    EXPECTED = "has not said HELLO"
    CALLED = "has said HELLO, and is answered once all that step together with it have"
    GREETED = (
        "said HELLO and was told the addresses, but has not said READY: it is still loading, or "
        "in its model's `allocate`"
    )
    READY = "said READY, but has told nothing of itself"
    WELCOME = "is welcome"


@define
class _Guest:
    """What the owner knows of one rank."""

    phase: Phase = Phase.EXPECTED
    told: ReadyResponse | None = None
    fault: WireError | None = None


@frozen(kw_only=True)
class FrontendSockets:
    """What an owner has bound for the engines it expects."""

    handshake: ZSocket
    """A ROUTER; its endpoint is what engines are given."""
    input: ZSocket
    """A ROUTER to send requests by, watched for drops. Until `welcome` returns it is read there."""
    output: ZSocket
    """A PULL, watched for drops: one whose message is too large is dropped with no other sign."""
    init: Init
    local: bool | None
    _guests: dict[int, _Guest]

    @property
    def handshake_address(self) -> str:
        """What engines are given to say HELLO at."""
        return self.handshake.endpoint

    async def welcome(self, rank: int, deadline: float) -> ReadyResponse:
        """Answer the engines' HELLOs until this one is ready, and return what it tells of itself.

        Ranks may be welcomed in any order, one call at a time: each call answers all of them.

        Args:
            rank: One of those expected.
            deadline: Trio's time at which it is given up.

        Error handling:
            LaunchFailed: it was not ready in time; the message says how far it came. WireError: it
            broke the protocol: HELLO twice, READY before HELLO, an unreadable word. Who is not
            expected is logged and gets no answer.
        """
        guest = self._guests[rank]
        with trio.move_on_at(deadline):
            while guest.fault is None and guest.phase in {Phase.EXPECTED, Phase.GREETED}:
                self._heed(await self.handshake.receive(), self._on_handshake)
            while guest.fault is None and guest.told is None:
                self._heed(await self.input.receive(), self._on_input)
        if guest.fault is not None:
            raise guest.fault
        if guest.told is None:
            raise LaunchFailed(f"engine rank {rank} {guest.phase.value} by its deadline")
        guest.phase = Phase.WELCOME
        return guest.told

    def _heed(self, frames: list[bytes], on_message: Callable[[int, _Guest, bytes], None]) -> None:
        """One message of anybody. Its faults are its rank's, and nobody else's."""
        identity, *rest = frames
        try:
            rank = rank_of(identity)
            guest = self._guests[rank]
        except (WireError, KeyError):
            _log.warning("%r is no engine that is expected: it gets no answer", identity[:40])
            return
        try:
            on_message(rank, guest, _payload(rest))
        except WireError as error:
            guest.fault = WireError(f"engine rank {rank} cannot be welcomed: {error}")

    def _on_handshake(self, rank: int, guest: _Guest, word: bytes) -> None:
        hello = decode_hello(word)
        if self.local is not None and hello.local != self.local:
            raise WireError(f"it says local={hello.local}, but was started with {self.local}")
        needed = Phase.EXPECTED if hello.status == "HELLO" else Phase.GREETED
        if guest.phase is not needed:
            raise WireError(f"it {guest.phase.value}, and now says {hello.status}")
        if hello.status == "READY":
            guest.phase = Phase.READY
            return
        try:
            self.handshake.send_nowait([rank_identity(rank), encode_init(self.init)])
        except PeerGone as error:
            _log.warning("engine rank %d said HELLO and left: %s", rank, error)
        else:
            guest.phase = Phase.GREETED

    def _on_input(self, _rank: int, guest: _Guest, word: bytes) -> None:
        guest.told = decode_ready_response(word)
        if guest.told is None:
            raise WireError("its ready response is empty; the length of its context is needed")


def _payload(frames: Sequence[bytes]) -> bytes:
    if len(frames) != 1:
        raise WireError(f"it said {len(frames)} frames at once, and each word is one")
    return frames[0]


@asynccontextmanager
async def open_frontend(
    context: Context,
    *,
    ranks: Collection[int],
    bind_handshake: str,
    bind_input: str,
    bind_output: str,
    coordinator_input: str | None = None,
    coordinator_output: str | None = None,
    parallel_config: Mapping[str, Any] | None = None,
    local: bool | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncGenerator[FrontendSockets]:
    """Bind the sockets of one frontend that owns the handshake of its engines.

    Args:
        context: Whose sockets they are to be.
        ranks: The engines that are expected.
        bind_handshake: Address to bind for HELLO and READY.
        bind_input: Address to bind for requests.
        bind_output: Address to bind for outputs. All three: one that the engines can reach as it is
            written, so not ``tcp://0.0.0.0:*``.
        coordinator_input: Where a coordinator publishes to engines, if there is one.
        coordinator_output: Where it collects from engines.
        parallel_config: What engines that step together are told of their group.
        local: What HELLO must say; None: anything.
        max_message_bytes: An engine that sends a larger frame is disconnected.

    Resource handling:
        Start the engines inside, `welcome` each, then pump `output` and send by `input`. Leaving
        closes the sockets.

    Error handling:
        AddressFailed: one of the addresses cannot be bound.
    """
    async with AsyncExitStack() as stack:

        async def bind(kind: zmq.SocketType, address: str, *, watch: bool = False) -> ZSocket:
            entered = open_zsocket(
                context, kind, bind=address, max_message_bytes=max_message_bytes, watch=watch
            )
            return await stack.enter_async_context(entered)

        requests = await bind(zmq.ROUTER, bind_input, watch=True)
        outputs = await bind(zmq.PULL, bind_output, watch=True)
        addresses = Addresses(
            inputs=(requests.endpoint,),
            outputs=(outputs.endpoint,),
            coordinator_input=coordinator_input,
            coordinator_output=coordinator_output,
        )
        yield FrontendSockets(
            handshake=await bind(zmq.ROUTER, bind_handshake),
            input=requests,
            output=outputs,
            init=Init(addresses=addresses, parallel_config=dict(parallel_config or {})),
            local=local,
            guests={rank: _Guest() for rank in ranks},
        )
