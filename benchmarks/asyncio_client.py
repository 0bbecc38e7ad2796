"""The yardstick: a client of the shape of vLLM's, on asyncio, for engines behind vLLM's wire.

A task reads the socket into a queue, a second one takes outputs from there to the slot of each
request, and wakes the task of its stream, which iterates over an async generator. Rows are read
and written by msgspec, sockets are `zmq.asyncio`'s, engines are picked by scoring all of them.
Written anew for this comparison: vLLM's own does more for every request and every token (prompts,
text, statistics), so what this one costs is less than what vLLM's does.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from bench_decision import PlainLoop
from paced_engines import ENGINES

from dpkit.wire.codec import decode_hello, encode_init
from dpkit.wire.structs import Addresses, Init, SchedulerStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from paced_engines import PacedEngines

_ADD = b"\x00"
_CHUNK = 128
"""Outputs that are handed out before other tasks have a turn."""


class Sampling(msgspec.Struct, omit_defaults=True):
    """How a request wants its tokens, as far as this comparison asks."""

    temperature: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int | None = None


class Request(msgspec.Struct, array_like=True, gc=False):
    """One request on the wire."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: Sampling | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None


class Entry(msgspec.Struct, array_like=True, gc=False):
    """What a step adds to one request, on the wire."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What a step adds to all requests of this client, on the wire."""

    engine_index: int = 0
    outputs: list[Entry] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: list[str] | None = None


@dataclass(slots=True)
class Completion:
    """The new part of one text."""

    index: int
    token_ids: list[int]
    finish_reason: int | None


@dataclass(slots=True)
class Output:
    """What a stream yields."""

    request_id: str
    outputs: list[Completion]
    finished: bool


class Slot:
    """Where the outputs of a request wait for its stream; several become one."""

    def __init__(self) -> None:
        self.output: Output | None = None
        self.ready = asyncio.Event()

    def put(self, output: Output) -> None:
        """Leave an output, and wake the stream."""
        if self.output is None:
            self.output = output
            self.ready.set()
        else:
            self.output.finished |= output.finished
            self.output.outputs[0].token_ids += output.outputs[0].token_ids

    async def get(self) -> Output:
        """Wait for what there is, and take it."""
        while self.output is None:
            await self.ready.wait()
        output, self.output = self.output, None
        self.ready.clear()
        return output


@dataclass(slots=True)
class State:
    """A request under way."""

    slot: Slot
    token_ids: list[int] = field(default_factory=list)


class AsyncioClient:
    """Sends requests and hands out what comes back."""

    def __init__(self, requests: zmq.asyncio.Socket, outputs: zmq.asyncio.Socket) -> None:
        self._requests = requests
        self._outputs = outputs
        self._router = PlainLoop(ENGINES)
        self._states: dict[str, State] = {}
        self._queue: asyncio.Queue[Batch] = asyncio.Queue()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self._numbers = count()

    async def read_socket(self) -> None:
        """Take messages from the socket into the queue, for ever."""
        while True:
            frames = await self._outputs.recv_multipart(copy=False)
            batch = self._decoder.decode(frames[0].buffer)
            for name in batch.finished_requests or ():
                self._router.release(name)
            if batch.outputs or batch.scheduler_stats:
                self._queue.put_nowait(batch)

    async def hand_out(self) -> None:
        """Take batches from the queue to the slots of their requests, for ever."""
        while True:
            batch = await self._queue.get()
            entries = batch.outputs
            for start in range(0, len(entries), _CHUNK):
                if start:
                    await asyncio.sleep(0)
                self._hand_out(entries[start : start + _CHUNK])

    def _hand_out(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            name = entry.request_id
            state = self._states.get(name)
            if state is None:
                continue
            state.token_ids += entry.new_token_ids
            finish = entry.finish_reason
            completion = Completion(0, entry.new_token_ids, finish)
            state.slot.put(Output(name, [completion], finish is not None))
            if finish is not None:
                del self._states[name]

    async def generate(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[Output]:
        """Send a request, and yield its outputs."""
        request = Request(
            f"request-{next(self._numbers)}",
            prompt,
            None,
            sampling,
            None,
            0.0,
            None,
            None,
            None,
        )
        state = self._states[request.request_id] = State(Slot())
        await self._send(request)
        finished = False
        while not finished:
            output = await state.slot.get()
            finished = output.finished
            yield output

    async def _send(self, request: Request) -> None:
        self._router.place(request)  # type: ignore[arg-type]
        engine = self._router.reqs_in_flight[request.request_id]
        message = (engine, _ADD, self._encoder.encode(request))
        await self._requests.send_multipart(message, copy=False)


@asynccontextmanager
async def open_asyncio_client(engines: PacedEngines) -> AsyncIterator[AsyncioClient]:
    """Bind, have the engines connect, and run both tasks."""
    context = zmq.asyncio.Context()
    sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.PULL)]
    with context, sockets[0] as requests, sockets[1] as outputs, ExitStack() as stack:
        for socket in sockets:
            socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 0
            socket.bind(engines.address())
        await _welcome(context, engines, requests, outputs, stack)
        client = AsyncioClient(requests, outputs)
        tasks = [asyncio.create_task(work()) for work in (client.read_socket, client.hand_out)]
        try:
            yield client
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _welcome(
    context: zmq.asyncio.Context,
    engines: PacedEngines,
    requests: zmq.asyncio.Socket,
    outputs: zmq.asyncio.Socket,
    stack: ExitStack,
) -> None:
    init = Init(
        addresses=Addresses(
            inputs=(requests.get_string(zmq.LAST_ENDPOINT),),
            outputs=(outputs.get_string(zmq.LAST_ENDPOINT),),
        )
    )
    with context.socket(zmq.ROUTER) as handshake:
        handshake.linger = 0
        handshake.bind(engines.address())
        for rank in range(ENGINES):
            stack.enter_context(engines.engine(rank, handshake.get_string(zmq.LAST_ENDPOINT)))
        ready = 0
        while ready < ENGINES:
            identity, word = await handshake.recv_multipart()
            if decode_hello(word).status == "READY":
                ready += 1
            else:
                await handshake.send_multipart([identity, encode_init(init)])
    for _ in range(ENGINES):
        await requests.recv_multipart()
