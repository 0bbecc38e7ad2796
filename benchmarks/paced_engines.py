"""A process that poses as engines, for measuring clients: it answers on time and computes nothing.

Its engines speak the wire as real ones do: handshake, requests, envelopes with outputs, load and
finished ids, answers to calls. One thread an engine, blocking. A request for several tokens gets
one of them in each step, so many steps a second; one for a single token is answered at once.

`open_paced_engines` starts it; `as_launcher` has a cluster of dpkit's take it for its engines.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import trio
import zmq
from other_side import open_other_side, serve

from dpkit.abc import Model
from dpkit.engine.limits import EngineLimits
from dpkit.messages import ModelSpec
from dpkit.wire.codec import (
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
    EngineReport,
    Envelope,
    FinishCode,
    SchedulerStats,
    UtilityAnswer,
    WireOutput,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from other_side import OtherSide

    from dpkit.messages import Batch, StepResult
    from dpkit.wire.structs import WireRequest

STEPS_A_SECOND = 15
ENGINES = 8

_LIMITS = EngineLimits(
    max_num_seqs=1024, max_num_batched_tokens=8192, block_size=16, num_blocks=65_536
)
_IDLE_MS = 20


# -- The other process -----------------------------------------------------------------------------


class PacedEngine(threading.Thread):
    """One engine; lives until `stop` is set."""

    def __init__(self, context: zmq.Context[Any], rank: int, handshake: str, phase: float) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._context = context
        self._rank = rank
        self._handshake = handshake
        self._phase = phase
        self._left: dict[str, int] = {}  # tokens that each request has still to get
        self._steps = 0

    def run(self) -> None:
        """Greet, and serve."""
        hello, requests, outputs = (
            self._context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.PUSH)
        )
        for socket in (hello, requests, outputs):
            socket.linger, socket.sndhwm, socket.rcvhwm = 1000, 0, 0
            socket.routing_id = rank_identity(self._rank)
        with hello, requests, outputs:
            hello.connect(self._handshake)
            hello.send(encode_hello("HELLO", local=True, headless=False))
            addresses = decode_init(hello.recv()).addresses
            requests.connect(addresses.inputs[0])
            outputs.connect(addresses.outputs[0])
            told = ready_response(_LIMITS, rank=self._rank, count=1, instance_id="paced")
            requests.send(encode_ready_response(told))
            hello.send(encode_hello("READY", local=True, headless=False))
            self._serve(requests, outputs)

    def _serve(self, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        period = 1 / STEPS_A_SECOND
        due = period * (1 + time.monotonic() // period + self._phase)
        while not self.stop.is_set():
            wait_ms = max(0, int((due - time.monotonic()) * 1000)) if self._left else _IDLE_MS
            if requests.poll(wait_ms):
                self._hear(requests, outputs)
            now = time.monotonic()
            if now >= due:
                if self._left:
                    self._step(outputs)
                due += period * (1 + (now - due) // period)

    def _hear(self, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        """Take in all there is, and answer at once what is to be."""
        brief: list[str] = []
        while True:
            try:
                told = decode_input(requests.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if isinstance(told, Add):
                self._admit(told.request, brief)
            elif isinstance(told, Abort):
                for request_id in told.request_ids:
                    self._left.pop(request_id, None)
                self._tell(outputs, finished_requests=list(told.request_ids))
            else:
                answer = UtilityAnswer(told.call.call_id, None, (None, [self._steps, None]))
                self._send(outputs, Envelope(self._rank, utility_output=answer))
        if brief:
            entries = [WireOutput(name, (7,), finish_reason=FinishCode.LENGTH) for name in brief]
            self._tell(outputs, outputs=entries, finished_requests=brief)

    def _admit(self, request: WireRequest, brief: list[str]) -> None:
        asked = request.sampling_params
        tokens = 1 if asked is None or asked.max_tokens is None else asked.max_tokens
        if tokens == 1:
            brief.append(request.request_id)
        else:
            self._left[request.request_id] = tokens

    def _step(self, outputs: zmq.Socket[bytes]) -> None:
        """A token for everybody."""
        self._steps += 1
        entries, finished = [], []
        token = (1000 + self._steps,)
        for name, left in self._left.items():
            entry = WireOutput(name, token)
            if left == 1:
                entry.finish_reason = FinishCode.LENGTH
                finished.append(name)
            self._left[name] = left - 1
            entries.append(entry)
        for name in finished:
            del self._left[name]
        self._tell(outputs, outputs=entries, finished_requests=finished or None)

    def _tell(self, socket: zmq.Socket[bytes], **parts: Any) -> None:
        stats = SchedulerStats(
            num_running_reqs=len(self._left),
            kv_cache_usage=len(self._left) / 2048,
            step_counter=self._steps,
            dpkit=EngineReport(steps=self._steps, num_blocks=_LIMITS.num_blocks),
        )
        self._send(socket, Envelope(self._rank, scheduler_stats=stats, **parts))

    def _send(self, socket: zmq.Socket[bytes], envelope: Envelope) -> None:
        envelope.timestamp = time.monotonic()
        socket.send_multipart(encode_envelope(envelope))


class Stage:
    """Begins and ends engines, as told."""

    def __init__(self) -> None:
        self._engines: dict[str, PacedEngine] = {}

    def obey(
        self, context: zmq.Context[Any], *, rank: int, handshake: str, phase: float, begin: bool
    ) -> None:
        """Begin one, or end it."""
        if begin:
            engine = self._engines[f"{handshake}{rank}"] = PacedEngine(
                context, rank, handshake, phase
            )
            engine.start()
        else:
            engine = self._engines.pop(f"{handshake}{rank}")
            engine.stop.set()
            engine.join()


# -- This process ----------------------------------------------------------------------------------


class PacedEngines:
    """The other process, as one sees it from here."""

    def __init__(self, other: OtherSide) -> None:
        self.pid = other.pid
        self.in_step = False
        """Whether those to come step at the same moments, or each at its own."""
        self._other = other
        self._numbers = iter(range(sys.maxsize))

    def address(self) -> str:
        """A fresh one, for whoever wants to bind."""
        return f"ipc://{self._other.directory}/{next(self._numbers)}"

    @contextmanager
    def engine(self, rank: int, handshake: str) -> Iterator[None]:
        """Have one that says HELLO there."""
        phase = 0.0 if self.in_step else rank % ENGINES / ENGINES
        order = {"rank": rank, "handshake": handshake, "phase": phase}
        self._order(order | {"begin": True})
        try:
            yield
        finally:
            self._order(order | {"begin": False})

    def _order(self, order: Mapping[str, Any]) -> None:
        self._other.begin(order)
        self._other.wait()


@contextmanager
def open_paced_engines() -> Iterator[PacedEngines]:
    """Start the process, and end it at the end."""
    with open_other_side(__file__, patience_s=10) as other:
        yield PacedEngines(other)


class PacedWorker:
    """Implements `dpkit.abc.Worker` for one of them."""

    status: int | None = None
    last_lines: Sequence[str] = ()

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid

    async def wait(self) -> int:
        """Wait for its end, which is not before its block is left."""
        await trio.sleep_forever()
        raise AssertionError

    def send_signal(self, signum: int) -> None:
        """Signal the process of them all."""
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """End the process of them all: this life was not meant to be lost."""
        os.kill(self.pid, signal.SIGKILL)


class PacedLauncher:
    """Implements `dpkit.abc.Launcher`."""

    def __init__(self, engines: PacedEngines) -> None:
        self._engines = engines

    @asynccontextmanager
    async def open_worker(
        self, _work: str, args: Mapping[str, Any] | None = None, *, name: str, grace: float = 5.0
    ) -> AsyncIterator[PacedWorker]:
        """Have one more engine, whatever the work is called."""
        assert args is not None  # noqa: S101
        del grace
        with self._engines.engine(args["rank"], args["handshake"]):
            yield PacedWorker(name, self._engines.pid)


@contextmanager
def as_launcher(engines: PacedEngines) -> Iterator[None]:
    """Have clusters that are opened meanwhile find these where they would start a zygote."""
    from dpkit.nursery import hosts  # noqa: PLC0415 - the process of the engines needs none

    with patch.object(hosts, "open_zygote", partial(_open_launcher, engines)):
        yield


def _open_launcher(
    engines: PacedEngines, *_: object, **__: object
) -> AbstractAsyncContextManager[PacedLauncher]:
    @asynccontextmanager
    async def launcher() -> AsyncIterator[PacedLauncher]:
        yield PacedLauncher(engines)

    return launcher()


class Wordless:
    """A tokenizer and a decoder: tokens have no text, and take no time to have none."""

    def encode(self, text: str) -> list[int]:
        """A token a byte."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Everything that is said."""
        return self.encode("".join(message["content"] for message in messages))

    def decoder(self, _prompt: Sequence[int] = ()) -> Wordless:
        """One for all requests: it knows nothing of any."""
        return self

    def feed(self, _token_ids: Sequence[int]) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """None either."""
        return ""


class Face(Model):
    """What a client knows of the model of these engines."""

    inline = True
    spec = ModelSpec(kv_tokens=_LIMITS.kv_tokens, max_num_seqs=_LIMITS.max_num_seqs)

    def tokenizer(self) -> Wordless:
        """Ids only: what text costs is the same for every client, and not measured."""
        return Wordless()

    def execute(self, batch: Batch, cache: Any) -> StepResult:  # noqa: ARG002 - it does not
        """Never called: the engines are in the other process, and have no model."""
        raise TypeError("a client's face of the paced engines does not compute")


if __name__ == "__main__":
    serve(sys.argv[2], Stage().obey)
