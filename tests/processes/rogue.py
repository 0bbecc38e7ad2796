"""Engines that break the protocol: what runs in an engine's process in place of an engine.

Which rule one breaks is the name of its engine; ``good-0`` is an engine as it should be. They keep
the protocol up to there, and go on living afterwards. They speak by plain ZeroMQ, so that what they
say wrong is not kept from being said.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from dpkit.engine.limits import EngineLimits
from dpkit.launch.child import work as work_well
from dpkit.wire.codec import (
    Add,
    Utility,
    decode_init,
    decode_input,
    encode_envelope,
    encode_hello,
    encode_ready_response,
    rank_identity,
)
from dpkit.wire.reports import ready_response
from dpkit.wire.structs import (
    Envelope,
    FinishCode,
    SchedulerStats,
    UtilityAnswer,
    WireOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.abc import Model

FOR_EVER_S = 1000
MOST_BYTES = 2**16
"""What the tests say is the most of a message."""


class Rogue:
    """An engine as far as it goes."""

    def __init__(self, rank: int, handshake: str, limits: EngineLimits) -> None:
        self.rank = rank
        self.context: zmq.Context[Any] = zmq.Context()
        self.limits = limits
        self.handshake = self.connect_to(zmq.DEALER, handshake)
        self.input = self.output = self.handshake

    def connect_to(self, kind: zmq.SocketType, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.routing_id = rank_identity(self.rank)
        socket.connect(address)
        return socket

    def hello(self) -> None:
        self.handshake.send(encode_hello("HELLO", True, False))

    def ready(self) -> None:
        self.handshake.send(encode_hello("READY", True, False))

    def connect(self) -> None:
        there = decode_init(self.handshake.recv()).addresses
        self.input = self.connect_to(zmq.DEALER, there.inputs[0])
        self.output = self.connect_to(zmq.PUSH, there.outputs[0])

    def introduce(self) -> None:
        told = ready_response(
            self.limits, rank=self.rank, count=1, instance_id="rogue", dtype="float32"
        )
        self.input.send(encode_ready_response(told))

    def come_up(self) -> None:
        """All of the handshake, as it should be."""
        self.hello()
        self.connect()
        self.introduce()
        self.ready()

    def say(self, *outputs: WireOutput, finished: Sequence[str] = (), **more: Any) -> None:
        """One batch."""
        stats = SchedulerStats(num_running_reqs=1)
        batch = Envelope(
            self.rank,
            list(outputs),
            **{"scheduler_stats": stats, "finished_requests": list(finished) or None} | more,
        )
        self.output.send_multipart(encode_envelope(batch))

    def next_request(self) -> str:
        """Wait for a request, and answer questions meanwhile; its id."""
        while True:
            message = decode_input(self.input.recv_multipart())
            if isinstance(message, Add):
                return message.request.request_id
            if isinstance(message, Utility):
                self.tell(message.call.call_id, [0, None])

    def tell(self, call_id: int, progress: list[Any]) -> None:
        """Say how far it is."""
        answer = UtilityAnswer(call_id, None, (None, progress))
        self.output.send_multipart(encode_envelope(Envelope(self.rank, utility_output=answer)))

    def answer(self, request_id: str) -> None:
        """Say one token of it."""
        self.say(WireOutput(request_id, (65,)))


SERVING: dict[str, Callable[[Rogue, str], None]] = {}
"""What is done when a request has come and has got its first token."""

STARTING: dict[str, Callable[[Rogue], None]] = {}
"""What is done in place of the handshake."""


def serving(function: Callable[[Rogue, str], None]) -> Callable[[Rogue, str], None]:
    """Register what an engine of this name does, once it serves."""
    SERVING[function.__name__] = function
    return function


def starting(function: Callable[[Rogue], None]) -> Callable[[Rogue], None]:
    """Register how an engine of this name starts."""
    STARTING[function.__name__] = function
    return function


@serving
def garbage(rogue: Rogue, _: str) -> None:
    rogue.output.send(b"\xc1 is no MessagePack")


@serving
def truncated(rogue: Rogue, request_id: str) -> None:
    whole = encode_envelope(Envelope(rogue.rank, [WireOutput(request_id, (1, 2, 3))]))
    rogue.output.send(whole[0][:-4])


@serving
def frames(rogue: Rogue, request_id: str) -> None:
    """An empty one in front, as some sockets have it."""
    whole = encode_envelope(Envelope(rogue.rank, [WireOutput(request_id, (1, 2, 3))]))
    rogue.output.send_multipart([b"", *whole])


@serving
def oversized(rogue: Rogue, _: str) -> None:
    rogue.output.send(bytes(MOST_BYTES + 1))


@serving
def split(rogue: Rogue, _: str) -> None:
    """No frame is too large, all of them together are."""
    rogue.output.send_multipart([bytes(MOST_BYTES // 2)] * 3)


@serving
def unknown(rogue: Rogue, _: str) -> None:
    rogue.answer("somebody else's")


@serving
def again(rogue: Rogue, request_id: str) -> None:
    """It goes on after the end."""
    end = WireOutput(request_id, (65,), finish_reason=FinishCode.LENGTH)
    rogue.say(end, WireOutput(request_id, (66,)), finished=[request_id])


@serving
def negative(rogue: Rogue, request_id: str) -> None:
    batch = [rogue.rank, [[request_id, [-1]]], None, 0.0, None, None]
    rogue.output.send(msgspec.msgpack.encode(batch))


@serving
def wave(rogue: Rogue, _: str) -> None:
    rogue.output.send_multipart(encode_envelope(Envelope(rogue.rank, wave_complete=1)))


@serving
def dropped(rogue: Rogue, request_id: str) -> None:
    rogue.say(finished=[request_id])


@serving
def aborted(rogue: Rogue, request_id: str) -> None:
    end = WireOutput(request_id, (), finish_reason=FinishCode.ABORT)
    rogue.say(end, finished=[request_id])


@serving
def dead(rogue: Rogue, _: str) -> None:
    rogue.output.send(b"ENGINE_CORE_DEAD")


@serving
def anew(rogue: Rogue, _: str) -> None:
    rogue.introduce()


@serving
def gone(rogue: Rogue, _: str) -> None:
    """It closes its sockets, and lives on."""
    rogue.context.destroy(linger=0)


@serving
def mute(rogue: Rogue, _: str) -> None:
    """It says nothing more, whatever it is asked."""


@serving
def odd(rogue: Rogue, request_id: str) -> None:
    """Answers that nobody has asked for: no harm is in them."""
    for call_id in (0, 10**6):
        rogue.tell(call_id, [10**9, -1e300])
    end = WireOutput(request_id, (66,), finish_reason=FinishCode.LENGTH)
    rogue.say(end, finished=[request_id])


@starting
def silent(rogue: Rogue) -> None:
    """After HELLO."""
    rogue.hello()


@starting
def wordless(_: Rogue) -> None:
    """It does not even say HELLO."""


@starting
def twohellos(rogue: Rogue) -> None:
    rogue.hello()
    rogue.hello()


@starting
def tworeadys(rogue: Rogue) -> None:
    rogue.come_up()
    rogue.ready()


@starting
def rushed(rogue: Rogue) -> None:
    """READY before HELLO."""
    rogue.ready()


@starting
def babble(rogue: Rogue) -> None:
    rogue.handshake.send(b"\xc1")


@starting
def nameless(rogue: Rogue) -> None:
    """It tells nothing of itself."""
    rogue.hello()
    rogue.connect()
    rogue.input.send(b"")
    rogue.ready()


@starting
def impostor(rogue: Rogue) -> None:
    """It says HELLO for another rank."""
    rogue.rank += 7
    rogue.handshake = rogue.connect_to(zmq.DEALER, rogue.handshake.get_string(zmq.LAST_ENDPOINT))
    rogue.hello()


def work(model: Model, *, handshake: str, rank: int, name: str, **settings: Any) -> None:
    """What an engine's process does in these tests."""
    how = name.partition("-")[0]
    if how == "good":
        work_well(model, handshake=handshake, rank=rank, name=name, **settings)
        return
    rogue = Rogue(rank, handshake, EngineLimits(**settings["limits"]))
    if how in STARTING:
        STARTING[how](rogue)
    else:
        rogue.come_up()
        request_id = rogue.next_request()
        rogue.answer(request_id)
        SERVING[how](rogue, request_id)
    time.sleep(FOR_EVER_S)
