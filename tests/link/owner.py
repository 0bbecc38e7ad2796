"""Whoever stands in front of an engine, on real sockets: handshake, frontends, coordinator."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import zmq
from attrs import frozen

from dpkit.wire.codec import (
    COORDINATOR_READY,
    SUBSCRIBE,
    EngineDead,
    decode_hello,
    decode_output,
    decode_ready_response,
    encode_init,
    encode_input,
    rank_identity,
)
from dpkit.wire.structs import Addresses, Init
from dpkit.wire.zsocket import open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.wire.codec import Abort, Add, Utility
    from dpkit.wire.structs import Envelope, ReadyResponse, UtilityAnswer, WireOutput
    from dpkit.wire.zsocket import Context, ZSocket

LOOPBACK = "tcp://127.0.0.1:*"


@frozen
class Frontend:
    """A ROUTER and a PULL, and one engine at their other end."""

    input: ZSocket
    output: ZSocket
    rank: int

    def say(self, *messages: Add | Abort | Utility) -> None:
        """Send something to the engine."""
        for message in messages:
            self.say_frames(encode_input(message))

    def say_frames(self, frames: list[bytes]) -> None:
        """Send anything at all."""
        self.input.send_nowait([rank_identity(self.rank), *frames])

    async def welcome(self) -> ReadyResponse:
        """Wait for the engine's first word, or for the first after it came back."""
        identity, payload = await self.input.receive()
        assert identity == rank_identity(self.rank)
        response = decode_ready_response(payload)
        assert response is not None
        return response

    async def hear(self) -> Envelope | EngineDead:
        """Wait for the next message."""
        return decode_output(await self.output.receive())

    async def entries(self, request_id: str) -> list[WireOutput]:
        """Wait for all outputs of a request; those of others are passed over."""
        entries: list[WireOutput] = []
        while not entries or entries[-1].finish_reason is None:
            envelope = await self.hear()
            assert not isinstance(envelope, EngineDead)
            entries += [entry for entry in envelope.outputs if entry.request_id == request_id]
        return entries

    async def answer(self) -> UtilityAnswer:
        """Wait for the next answer to a call."""
        while True:
            envelope = await self.hear()
            assert not isinstance(envelope, EngineDead)
            if envelope.utility_output is not None:
                return envelope.utility_output

    async def counts(self, running: int, waiting: int) -> None:
        """Wait until the engine says that it has so many requests."""
        while True:
            envelope = await self.hear()
            assert not isinstance(envelope, EngineDead)
            stats = envelope.scheduler_stats
            if stats and (stats.num_running_reqs, stats.num_waiting_reqs) == (running, waiting):
                return

    async def last_word(self) -> list[Envelope]:
        """Wait until the engine says that it is dead; what it said before."""
        heard: list[Envelope] = []
        while True:
            message = await self.hear()
            if isinstance(message, EngineDead):
                return heard
            heard.append(message)


@frozen
class Owner:
    """Who owns the handshake of one engine."""

    handshake: ZSocket
    frontends: tuple[Frontend, ...]
    coordinator_out: ZSocket | None
    """An XPUB: what the coordinator tells engines."""
    coordinator_in: ZSocket | None
    """A PULL: what engines tell the coordinator."""
    rank: int

    async def greet(self) -> None:
        """Wait for HELLO, and answer with the addresses."""
        identity, payload = await self.handshake.receive()
        assert identity == rank_identity(self.rank)
        assert decode_hello(payload).status == "HELLO"
        publish, collect = self.coordinator_out, self.coordinator_in
        addresses = Addresses(
            inputs=tuple(frontend.input.endpoint for frontend in self.frontends),
            outputs=tuple(frontend.output.endpoint for frontend in self.frontends),
            coordinator_input=None if publish is None else publish.endpoint,
            coordinator_output=None if collect is None else collect.endpoint,
            frontend_stats_publish_address="tcp://127.0.0.1:1" if publish else None,
        )
        self.handshake.send_nowait([identity, encode_init(Init(addresses=addresses))])

    async def welcome(self) -> list[ReadyResponse]:
        """Bring the engine up; what it told each frontend."""
        await self.greet()
        told = [await frontend.welcome() for frontend in self.frontends]
        if self.coordinator_out is not None:
            assert await self.coordinator_out.receive() == [SUBSCRIBE]
            self.coordinator_out.send_nowait([COORDINATOR_READY])
        _, payload = await self.handshake.receive()
        assert decode_hello(payload).status == "READY"
        return told


@asynccontextmanager
async def open_owner(
    context: Context, *, frontends: int = 1, coordinator: bool = False, rank: int = 0
) -> AsyncIterator[Owner]:
    """Bind all sockets in front of one engine."""
    async with AsyncExitStack() as stack:

        async def bind(kind: zmq.SocketType) -> ZSocket:
            return await stack.enter_async_context(open_zsocket(context, kind, bind=LOOPBACK))

        yield Owner(
            handshake=await bind(zmq.ROUTER),
            frontends=tuple(
                [
                    Frontend(await bind(zmq.ROUTER), await bind(zmq.PULL), rank)
                    for _ in range(frontends)
                ]
            ),
            coordinator_out=await bind(zmq.XPUB) if coordinator else None,
            coordinator_in=await bind(zmq.PULL) if coordinator else None,
            rank=rank,
        )
