"""What Trio costs on top of ZeroMQ: messages received from another process, and round trips to it.

The bar is blocking pyzmq, which can do nothing else meanwhile. The peers are `zmq.asyncio`, and the
same on uvloop if that is installed. The other side is always the same blocking process; it sends
about as fast as we receive, so CPU time, our I/O thread's included, says more than wall time. A
message is as large as the outputs of a step of 64 requests. One direction per socket, as engines
are connected.

Run it:  python benchmarks/bench_zmq.py [rounds]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import trio
import zmq
import zmq.asyncio
from harness import Rounds, compete, print_table
from other_side import SERVE, open_other_side, serve

from dpkit.wire.zsocket import open_context, open_zsocket

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from other_side import OtherSide

    Work = Callable[[str, str], float]

LOOPS = ("asyncio", "uvloop") if find_spec("uvloop") else ("asyncio",)
PAYLOAD = bytes(3000)
MESSAGES = 20_000
TRIPS = 2_000
ROUNDS = 15


# -- The other process -----------------------------------------------------------------------------


def obey(context: zmq.Context[Any], what: str, to: str, back: str) -> None:
    {"flood": flood, "echo": echo}[what](context, to, back)


def flood(context: zmq.Context[Any], _: str, back: str) -> None:
    with context.socket(zmq.PUSH) as push:
        push.sndhwm = 0
        push.connect(back)
        for _message in range(MESSAGES):
            push.send(PAYLOAD)


def echo(context: zmq.Context[Any], to: str, back: str) -> None:
    with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.connect(back)
        pull.connect(to)
        for _message in range(TRIPS):
            push.send(pull.recv())


class Peer:
    """The other process, and a fresh pair of addresses for each order."""

    def __init__(self, other: OtherSide) -> None:
        self._other = other
        self._number = 0

    def measure(self, what: str, work: Work) -> float:
        """Have it flood or echo, and return what `work` says this cost."""
        self._number += 1
        ends = (f"ipc://{self._other.directory}/{self._number}-{end}" for end in ("to", "back"))
        to, back = ends
        self._other.begin({"what": what, "to": to, "back": back})
        cost = work(to, back)
        self._other.wait()
        return cost


# -- The contenders --------------------------------------------------------------------------------


class Stopwatch:
    """From the first message to the last: connecting and starting are nobody's merit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = MESSAGES
        self._began = self._ended = 0.0

    def press(self, _: object = None) -> bool:
        """Count a message; False at the last."""
        if self._left == MESSAGES:
            self._began = self._clock()
        self._left -= 1
        if self._left:
            return True
        self._ended = self._clock()
        return False

    def each(self) -> float:
        """Seconds a message."""
        return (self._ended - self._began) / (MESSAGES - 1)


@contextmanager
def bound(context: Any, to: str, back: str) -> Iterator[tuple[Any, Any]]:
    """A PUSH and a PULL of plain pyzmq or of `zmq.asyncio`, without limits, as ours are."""
    with context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.rcvhwm = push.sndhwm = push.linger = 0
        push.bind(to)
        pull.bind(back)
        yield push, pull


def receive_blocking(clock: Callable[[], float], to: str, back: str) -> float:
    watch = Stopwatch(clock)
    with bound(zmq.Context(), to, back) as (_, pull):
        while watch.press(pull.recv_multipart()):
            pass
    return watch.each()


def receive_trio(clock: Callable[[], float], _: str, back: str) -> float:
    watch = Stopwatch(clock)

    async def main() -> None:
        async with open_context() as context, open_zsocket(context, zmq.PULL, bind=back) as pull:
            with trio.CancelScope() as scope:

                def deliver(frames: list[bytes]) -> None:
                    if not watch.press(frames):
                        scope.cancel()

                await pull.pump(deliver)

    trio.run(main)
    return watch.each()


def receive_asyncio(loop: str, clock: Callable[[], float], to: str, back: str) -> float:
    watch = Stopwatch(clock)

    async def main() -> None:
        with bound(zmq.asyncio.Context(), to, back) as (_, pull):
            while watch.press(await pull.recv_multipart()):
                pass

    _run_asyncio(loop, main())
    return watch.each()


def trip_blocking(to: str, back: str) -> float:
    trips = []
    with bound(zmq.Context(), to, back) as (push, pull):
        for _ in range(TRIPS):
            began = time.perf_counter()
            push.send_multipart([PAYLOAD])
            pull.recv_multipart()
            trips.append(time.perf_counter() - began)
    return statistics.median(trips)


def trip_trio(to: str, back: str) -> float:
    trips = []

    async def main() -> None:
        async with (
            open_context() as context,
            open_zsocket(context, zmq.PUSH, bind=to) as push,
            open_zsocket(context, zmq.PULL, bind=back) as pull,
        ):
            await _somebody_there(push)
            await pull.receive()
            for _ in range(TRIPS - 1):
                began = time.perf_counter()
                push.send_nowait([PAYLOAD])
                await pull.receive()
                trips.append(time.perf_counter() - began)

    trio.run(main)
    return statistics.median(trips)


async def _somebody_there(push: Any) -> None:
    """Send the first message; unlike the others, ours does not wait for somebody to take it."""
    while True:
        try:
            push.send_nowait([PAYLOAD])
        except trio.WouldBlock:
            await trio.sleep(0.001)
        else:
            return


def trip_asyncio(loop: str, to: str, back: str) -> float:
    trips = []

    async def main() -> None:
        with bound(zmq.asyncio.Context(), to, back) as (push, pull):
            for _ in range(TRIPS):
                began = time.perf_counter()
                await push.send_multipart([PAYLOAD])
                await pull.recv_multipart()
                trips.append(time.perf_counter() - began)

    _run_asyncio(loop, main())
    return statistics.median(trips)


def _run_asyncio(loop: str, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=import_module(loop).new_event_loop) as runner:
        runner.run(main)


# -- The table -------------------------------------------------------------------------------------


def row(what: str, measured: Rounds) -> tuple[str, ...]:
    """Microseconds of each, and of ours against each of the others: how many times faster."""
    names = list(measured.costs)
    return (
        what,
        *(f"{measured.median(name) * 1e6:.1f}" for name in names),
        *(f"{measured.times_faster('ours', than=name):.2f}x" for name in names if name != "ours"),
    )


def receivers(clock: Callable[[], float]) -> dict[str, Work]:
    works: dict[str, Work] = {
        "ours": partial(receive_trio, clock),
        "blocking": partial(receive_blocking, clock),
    }
    return works | {loop: partial(receive_asyncio, loop, clock) for loop in LOOPS}


def travellers() -> dict[str, Work]:
    works: dict[str, Work] = {"ours": trip_trio, "blocking": trip_blocking}
    return works | {loop: partial(trip_asyncio, loop) for loop in LOOPS}


def main(rounds: int = ROUNDS) -> None:
    """Print one table."""
    with open_other_side(__file__) as other:
        peer = Peer(other)

        def contest(title: str, what: str, works: dict[str, Work]) -> tuple[str, ...]:
            entries = {name: partial(peer.measure, what, work) for name, work in works.items()}
            return row(title, compete(entries, rounds=rounds))

        rows = [
            contest("receive, wall", "flood", receivers(time.perf_counter)),
            contest("receive, CPU", "flood", receivers(time.process_time)),
            contest("round trip, median", "echo", travellers()),
        ]
    others = ("blocking", *LOOPS)
    print_table(
        f"ipc, {len(PAYLOAD)} bytes; us each, and times faster than the others ({rounds} rounds)",
        ("", "ours", *others, *(f"/ {other}" for other in others)),
        rows,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2], obey)
    else:
        main(*map(int, sys.argv[1:2]))
