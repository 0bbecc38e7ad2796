"""Clusters whose engines join, and engines that join them: puppets of the test's own, or real ones.

A puppet is an engine as far as its strings are pulled: real sockets, in the test's own process and
Trio run, speaking by `dpkit.wire.codec`; what it must not say well, it says by raw frames.
"""

from __future__ import annotations

import os
import signal
import socket as stdlib_socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import trio
import zmq
from msgspec.structs import replace

from dpkit.engine.limits import EngineLimits
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.joined import JoinedLife
from dpkit.nursery.services import open_services
from dpkit.testing.idle import check_idle
from dpkit.wire.codec import (
    ENGINE_DEAD,
    SUBSCRIBE,
    Abort,
    Add,
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
from dpkit.wire.zsocket import open_context, open_zsocket
from tests.clusters import is_idle, make_config, slot_of
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from dpkit.nursery.cluster import Cluster
    from dpkit.wire.structs import Addresses, Init, WireRequest
    from dpkit.wire.zsocket import ZSocket

SUPERVISION = 'backoff = "1ms", backoff_max = "5ms", jitter = 0.0'
LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=256, max_model_len=1024
)


def free_address() -> str:
    """An address at which nobody listens."""
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def group(
    address: str,
    *,
    name: str = "v",
    count: int = 1,
    vllm: str = 'join_timeout = "10s", dead_after = "10s", abort_timeout = "10s"',
    supervision: str = SUPERVISION,
    model: str = "echo",
) -> str:
    """One ``[[engines]]`` table."""
    return f"""
        [[engines]]
        name = "{name}"
        kind = "vllm"
        model = "{model}"
        count = {count}
        supervision = {{ {supervision} }}
        vllm = {{ handshake = "{address}", {vllm} }}
    """


@asynccontextmanager
async def open_joined(*groups: str, settings: str = "", clients: int = 1) -> AsyncIterator[Cluster]:
    """Open a cluster; when its block ends well, it must be idle."""
    config = make_config(*groups, settings=settings)
    async with open_cluster(config, clients=clients) as cluster:
        yield cluster
        await until(lambda: is_idle(cluster))
        check_idle(cluster)
    assert cluster.audit() == ()


def life_of(cluster: Cluster, name: str) -> JoinedLife:
    """Its present life."""
    life = slot_of(cluster, name).life
    assert isinstance(life, JoinedLife)
    return life


def serves(cluster: Cluster, name: str, epoch: int = 0) -> bool:
    """Whether a life of an engine serves, from a certain one on."""
    slot = slot_of(cluster, name)
    return slot.engine.epoch >= epoch and slot.state is EngineState.READY


class Puppet:
    """An engine that does what it is told; made by `open_puppet`.

    `obey` answers calls, acknowledges aborts, and keeps requests for whoever plays the engine.
    """

    def __init__(self, rank: int, handshake: ZSocket, stack: AsyncExitStack) -> None:
        self.rank = rank
        self.answers = True
        """Whether calls are answered."""
        self.acknowledges = True
        """Whether aborts are."""
        self.begins = False
        """Whether every request gets its first token, an A, at once."""
        self.failure: str | None = None
        """How every call fails."""
        self.tasks: object = ["generate"]
        self.told: dict[str, object] = {}
        """What its ready response says unlike others."""
        self.requests: list[WireRequest] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.inits: list[Init] = []
        self.addresses: list[Addresses] = []
        self.handshake = handshake
        self._stack = stack
        self._context: Any = None
        self.input = self.output = self.coordinator = self.source = handshake

    # The handshake, word by word.

    def hello(self) -> None:
        self.handshake.send_nowait([encode_hello("HELLO", False, True)])

    def ready(self) -> None:
        self.handshake.send_nowait([encode_hello("READY", False, True)])

    async def connect(self) -> None:
        [frame] = await self.handshake.receive()
        init = decode_init(frame)
        self.inits.append(init)
        there = init.addresses
        self.addresses.append(there)
        self.input = await self.open(zmq.DEALER, there.inputs[0])
        self.output = await self.open(zmq.PUSH, there.outputs[0])

    async def subscribe(self) -> list[bytes]:
        """Subscribe to the coordinator, as whoever heeds one does; what it says to that."""
        there = self.addresses[-1]
        assert there.coordinator_input is not None
        assert there.coordinator_output is not None
        source = self.source = await self.open(zmq.XSUB, there.coordinator_input)
        self.coordinator = await self.open(zmq.PUSH, there.coordinator_output)
        source.send_nowait([SUBSCRIBE])
        return await source.receive()

    async def open(self, kind: zmq.SocketType, address: str) -> ZSocket:
        """Connect one more socket; what was sent stays sent when the puppet leaves."""
        opened = open_zsocket(
            self._context,
            kind,
            connect=address,
            routing_id=rank_identity(self.rank),
            linger_ms=200,
        )
        return await self._stack.enter_async_context(opened)

    def introduce(self) -> None:
        told = ready_response(LIMITS, rank=self.rank, count=1, instance_id="p", dtype="float32")
        self.input.send_nowait([encode_ready_response(replace(told, **self.told))])

    async def come_up(self) -> None:
        """All of the handshake, as it should be."""
        self.hello()
        await self.connect()
        self.introduce()
        self.ready()

    async def live(self) -> None:
        """Come up, and obey for ever."""
        await self.come_up()
        with suppress(trio.ClosedResourceError):  # it was told to leave
            await self.input.pump(self.obey)

    # What it hears.

    def obey(self, frames: list[bytes]) -> None:
        """Take one message of the head."""
        message = decode_input(frames)
        if isinstance(message, Add):
            self.requests.append(message.request)
            if self.begins:
                self.token(message.request.request_id, 65)
        elif isinstance(message, Abort):
            self.aborted += message.request_ids
            if self.acknowledges:
                self.say(finished=message.request_ids)
        else:
            self.calls.append(message.call.method)
            if self.answers:
                self.answer(message.call.call_id, message.call.method)

    def answer(self, call_id: int, method: str) -> None:
        results = {"get_supported_tasks": self.tasks, "is_scheduler_paused": False}
        failure = self.failure
        if method not in results:
            failure = f"Call to {method} method failed: no such thing"
        result = None if failure else (None, results[method])
        answer = UtilityAnswer(call_id, failure, result)
        self.say_frames(encode_envelope(Envelope(self.rank, utility_output=answer)))

    # What it says.

    def say(
        self,
        *outputs: WireOutput,
        finished: Sequence[str] = (),
        running: int | None = 0,
        waiting: int = 0,
    ) -> None:
        """One batch; `running` None: without numbers."""
        stats = SchedulerStats(num_running_reqs=running or 0, num_waiting_reqs=waiting)
        batch = Envelope(
            self.rank,
            list(outputs),
            scheduler_stats=None if running is None else stats,
            finished_requests=list(finished) or None,
        )
        self.say_frames(encode_envelope(batch))

    def say_frames(self, frames: Sequence[bytes]) -> None:
        self.output.send_nowait(frames)

    def token(self, request_id: str, *token_ids: int, running: int | None = 1) -> None:
        """Say some tokens of a request that goes on."""
        self.say(WireOutput(request_id, token_ids), running=running)

    def finish(self, request_id: str, *token_ids: int) -> None:
        """Say the last ones."""
        last = WireOutput(request_id, token_ids, finish_reason=FinishCode.STOP)
        self.say(last, finished=[request_id])

    def die(self) -> None:
        """Say that it is dead."""
        self.say_frames([ENGINE_DEAD])

    def leave(self) -> None:
        """Be gone without a word, as a process that was killed."""
        for each in (self.handshake, self.input, self.output, self.coordinator, self.source):
            each.close(linger_ms=0)

    async def wait_for_request(self, number: int = 1) -> WireRequest:
        """Wait until so many have come; the last of them."""
        await until(lambda: len(self.requests) >= number)
        return self.requests[number - 1]


@asynccontextmanager
async def open_puppet(address: str, rank: int = 0) -> AsyncIterator[Puppet]:
    """A puppet whose strings nobody has pulled yet; gone at the end of the block."""
    async with open_context() as context, AsyncExitStack() as stack:
        opened = open_zsocket(
            context, zmq.DEALER, connect=address, routing_id=rank_identity(rank), linger_ms=200
        )
        puppet = Puppet(rank, await stack.enter_async_context(opened), stack)
        puppet._context = context
        yield puppet


@asynccontextmanager
async def open_living(*puppets: Puppet) -> AsyncIterator[None]:
    """Have puppets live until the block ends, whose exceptions come out bare."""
    async with open_services(grace=1) as services:
        for puppet in puppets:
            services.start_soon(puppet.live, name=f"puppet {puppet.rank}")
        yield


@asynccontextmanager
async def open_two(address: str) -> AsyncIterator[tuple[Puppet, Puppet]]:
    """Two puppets, of the ranks 0 and 1, that live."""
    async with (
        open_puppet(address, 0) as first,
        open_puppet(address, 1) as second,
        open_living(first, second),
    ):
        yield first, second


@asynccontextmanager
async def open_engine(
    folder: Path,
    address: str,
    rank: int = 0,
    toml: str = '[[engines]]\nmodel = "echo"\ncount = 9\n',
    *options: str,
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A real `dpkit engine` in a process of its own; terminated at the end of the block."""
    config = folder / f"engine-{rank}.toml"
    config.write_text(toml)
    command = [
        *(sys.executable, "-m", "dpkit", "engine", "--config", str(config)),
        *("--rank", str(rank), "--handshake", address, *options),
    ]
    path = f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"  # noqa: PTH109
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})  # noqa: ASYNC220
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with trio.move_on_after(LIMIT_S, shield=True) as patience:
            await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        if patience.cancelled_caught:
            process.kill()
            process.wait()
