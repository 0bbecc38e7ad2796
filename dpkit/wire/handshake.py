"""An engine's side of the handshake: say HELLO, be told addresses, say that it is ready.

`frontend` is the other side. Knows nothing of processes or models, and nothing of what goes over
the sockets afterwards. Whoever enters `open_engine_connection` owns the sockets until it leaves.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio
import zmq
from attrs import frozen
from msgspec.structs import replace

from dpkit.errors import LaunchFailed, WireError
from dpkit.wire.codec import (
    MAX_MESSAGE_BYTES,
    SUBSCRIBE,
    CoordinatorReady,
    decode_from_coordinator,
    decode_init,
    encode_hello,
    encode_ready_response,
    rank_identity,
)
from dpkit.wire.zsocket import open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dpkit.wire.structs import Addresses, Init, ReadyResponse
    from dpkit.wire.zsocket import Context, ZSocket

INIT_PATIENCE = 300.0
"""Seconds that an engine waits for INIT, as vLLM's do."""
COORDINATOR_PATIENCE = 600.0
"""Seconds that an engine waits for the others to subscribe: what vLLM's frontends wait for all."""
HANDSHAKE_LINGER_MS = 5000
OUTPUT_LINGER_MS = 4000
"""As vLLM's: READY, and what an engine told its frontends last, leave before its process ends."""


@frozen(kw_only=True)
class EngineConnection:
    """An engine's sockets, after INIT. A place in `inputs` and `outputs` is a client index."""

    init: Init
    inputs: tuple[ZSocket, ...]
    """DEALERs, one a frontend, watched for drops: nothing else tells that a frontend has gone."""
    outputs: tuple[ZSocket, ...]
    """PUSHes, one a frontend."""
    coordinator_in: ZSocket | None
    """An XSUB, watched for drops: what is told to a coordinator that has gone waits for ever."""
    coordinator_out: ZSocket | None
    """A PUSH."""
    _owner: ZSocket
    _ready: bytes

    async def announce(
        self, ready: ReadyResponse, *, patience: float = COORDINATOR_PATIENCE
    ) -> None:
        """Tell all frontends that the model has loaded, wait for the coordinator, tell the owner.

        Args:
            ready: What is told. Addresses that it leaves out are those of INIT.
            patience: Seconds to wait until all engines have subscribed to the coordinator.

        Error handling:
            LaunchFailed: the coordinator did not say so in time. WireError: it said anything else.
        """
        response = encode_ready_response(_with_addresses(ready, self.init.addresses))
        for each in self.inputs:
            each.send_nowait([response])
        if self.coordinator_in is not None:
            self.coordinator_in.send_nowait([SUBSCRIBE])
            await _coordinator_ready(self.coordinator_in, patience)
        self._owner.send_nowait([self._ready])
        self._owner.close(linger_ms=HANDSHAKE_LINGER_MS)


@asynccontextmanager
async def open_engine_connection(
    context: Context,
    handshake: str,
    *,
    rank: int,
    local: bool,
    headless: bool,
    parallel_config_hash: str | None = None,
    patience: float = INIT_PATIENCE,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncGenerator[EngineConnection]:
    """Say HELLO to the owner, and connect to the addresses that its INIT gives.

    Args:
        context: Whose sockets they are to be.
        handshake: The owner's address.
        rank: Which engine this is, 0 to 65535.
        local: The owner started this engine, on this host.
        headless: This engine was started without a frontend of its own.
        parallel_config_hash: What READY says of it; some owners compare it.
        patience: Seconds to wait for INIT.
        max_message_bytes: A frontend that sends a larger frame is disconnected.

    Resource handling:
        Load the model inside, then call `announce`. Leaving closes the sockets; what was sent to
        frontends lingers up to 4 s, so leave the context afterwards, and not the process.

    Error handling:
        LaunchFailed: no INIT in time. WireError: it cannot be read, or its lists do not match.
        AddressFailed: one of the addresses is none.
    """
    async with AsyncExitStack() as stack:

        async def connect(
            kind: zmq.SocketType, address: str, *, linger_ms: int = 0, watch: bool = False
        ) -> ZSocket:
            entered = open_zsocket(
                context,
                kind,
                connect=address,
                routing_id=rank_identity(rank),
                max_message_bytes=max_message_bytes,
                linger_ms=linger_ms,
                watch=watch,
            )
            return await stack.enter_async_context(entered)

        async def connect_input(address: str) -> ZSocket:
            return await connect(zmq.DEALER, address, linger_ms=OUTPUT_LINGER_MS, watch=True)

        async def connect_push(address: str) -> ZSocket:
            return await connect(zmq.PUSH, address, linger_ms=OUTPUT_LINGER_MS)

        owner = await connect(zmq.DEALER, handshake)
        owner.send_nowait([encode_hello("HELLO", local, headless)])
        init = await _init(owner, patience)
        there = init.addresses
        source, sink = there.coordinator_input, there.coordinator_output
        yield EngineConnection(
            init=init,
            inputs=tuple([await connect_input(each) for each in there.inputs]),
            outputs=tuple([await connect_push(each) for each in there.outputs]),
            coordinator_in=await connect(zmq.XSUB, source, watch=True) if source else None,
            coordinator_out=await connect_push(sink) if sink else None,
            owner=owner,
            ready=encode_hello("READY", local, headless, parallel_config_hash),
        )


async def _init(owner: ZSocket, patience: float) -> Init:
    with trio.move_on_after(patience) as waiting:
        frames = await owner.receive()
    if waiting.cancelled_caught:
        raise LaunchFailed(
            f"no INIT from {owner.endpoint} within {patience:g} s of our HELLO: is that the "
            "address of a handshake, and does its owner expect this rank?"
        )
    init = decode_init(_payload(frames))
    inputs, outputs = init.addresses.inputs, init.addresses.outputs
    if not inputs or len(inputs) != len(outputs):
        raise WireError(
            f"INIT gives {len(inputs)} input and {len(outputs)} output addresses: "
            "each frontend has one of both"
        )
    return init


async def _coordinator_ready(coordinator: ZSocket, patience: float) -> None:
    with trio.move_on_after(patience) as waiting:
        while not isinstance(
            decode_from_coordinator(await coordinator.receive()), CoordinatorReady
        ):
            pass  # a wave of the engines that were there before
    if waiting.cancelled_caught:
        raise LaunchFailed(
            f"the coordinator at {coordinator.endpoint} did not say READY within {patience:g} s: "
            "it waits until all engines have subscribed, so look which one is missing"
        )


def _payload(frames: Sequence[bytes]) -> bytes:
    if len(frames) != 1:
        raise WireError(f"INIT is one frame, not {len(frames)}")
    return frames[0]


def _with_addresses(ready: ReadyResponse, there: Addresses) -> ReadyResponse:
    """The frontend learns from its engines where counts are published, if nobody else tells it."""
    return replace(
        ready, dp_stats_address=ready.dp_stats_address or there.frontend_stats_publish_address
    )
