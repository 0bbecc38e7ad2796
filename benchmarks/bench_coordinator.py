"""What a message of an engine costs the coordinator, in CPU time, at 64 engines.

The peer has the shape of vLLM's own coordinator: `zmq.Poller` over the three sockets, one message a
poll, the whole stats map decoded by msgspec, rows in a list, a snapshot each 100 ms. It leaves out
what else the real one does, so its cost is a lower bound. Engines are sockets of another process:

* spread: each sends every 25 ms, a step of a busy GPU, all of them evenly spread: the dearest way
* steps: all send at once every 25 ms, as engines in lockstep do, and the rules are theirs
* flood: as fast as they can

One frontend subscribes. ZeroMQ's I/O thread is counted, and so is publishing. Messages are those of
vLLM's engines, with all keys of the map.

Run it:  python benchmarks/bench_coordinator.py [rounds]
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio
import zmq
from harness import compete, print_table
from other_side import SERVE, open_other_side, serve

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.link.coordinator import open_coordinator
from dpkit.wire.codec import SUBSCRIBE, encode_envelope
from dpkit.wire.coordinator import CoordinatorAddresses
from dpkit.wire.structs import Envelope, SchedulerStats
from dpkit.wire.zsocket import open_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from other_side import OtherSide

    Work = Callable[[CoordinatorAddresses, str], float]

ENGINES = 64
INTERVAL_S = 0.1
STEP_S = 0.025
MESSAGES = {"spread": 64 * 80, "steps": 64 * 80, "flood": 64 * 500}
ROUNDS = 9


# -- The other process -----------------------------------------------------------------------------


def send(context: zmq.Context[Any], to: str, front: str, pace: str) -> None:
    """Send the counts of each engine in turn, which change from one message to the next."""
    with ExitStack() as stack:
        frontend = stack.enter_context(context.socket(zmq.XSUB))
        frontend.rcvhwm = 0
        frontend.connect(front)
        frontend.send(SUBSCRIBE)
        engines = [stack.enter_context(context.socket(zmq.PUSH)) for _ in range(ENGINES)]
        for engine in engines:
            engine.sndhwm = 0
            engine.connect(to)
        time.sleep(0.1)  # all of them connect before the first of them sends
        due = time.perf_counter()
        for number in range(MESSAGES[pace]):
            step, rank = divmod(number, ENGINES)
            engines[rank].send(word(rank, step))
            due += 0 if pace == "flood" else STEP_S / ENGINES
            if pace == "spread" or (pace == "steps" and rank == ENGINES - 1):
                time.sleep(max(0.0, due - time.perf_counter()))


@functools.cache
def word(rank: int, step: int) -> bytes:
    stats = SchedulerStats(
        num_running_reqs=20 + step % 7,
        num_waiting_reqs=step % 5,
        kv_cache_usage=step % 10 / 10,
        step_counter=step,
    )
    return encode_envelope(Envelope(rank, scheduler_stats=stats, timestamp=1.5))[0]


class Engines:
    """The other process, and fresh addresses for each order."""

    def __init__(self, other: OtherSide) -> None:
        self._other = other
        self._number = 0

    def measure(self, pace: str, work: Work) -> float:
        """Have them send, and return what `work` says that each message cost."""
        self._number += 1
        folder = Path(self._other.directory, str(self._number))
        folder.mkdir()
        addresses = CoordinatorAddresses.at(f"ipc://{folder}")
        self._other.begin({"to": addresses.back_output, "front": addresses.front, "pace": pace})
        cost = work(addresses, pace)
        self._other.wait()
        return cost


# -- The contenders --------------------------------------------------------------------------------


class Stopwatch:
    """CPU time from the first message to the last: connecting and starting are nobody's merit."""

    def __init__(self, messages: int) -> None:
        self._messages = self._left = messages
        self._began = self._took = 0.0

    def press(self) -> bool:
        """Count a message, before it is looked at; True at the last."""
        if self._left == self._messages:
            self._began = time.process_time()
        self._left -= 1
        self._took = time.process_time() - self._began if not self._left else 0.0
        return not self._left

    def each(self) -> float:
        """Seconds a message."""
        return self._took / (self._messages - 1)


class TimedRules(CoordinatorRules):
    """The rules, and when they have heard it all."""

    def __init__(self, pace: str) -> None:
        super().__init__(
            ENGINES,
            now=trio.current_time(),
            interval=INTERVAL_S,
            wave_coordination=pace == "steps",
        )
        self.scope = trio.CancelScope()
        self.watch = Stopwatch(MESSAGES[pace])

    def on_counts(self, *counts: Any) -> None:
        """Take one engine's counts."""
        if self.watch.press():
            self.scope.cancel()
        super().on_counts(*counts)


def ours(addresses: CoordinatorAddresses, pace: str) -> float:
    async def main() -> float:
        rules = TimedRules(pace)
        async with (
            open_context() as context,
            open_coordinator(context, rules, bind=addresses) as coordinator,
        ):
            with rules.scope:
                await coordinator.run()
        return rules.watch.each()

    return trio.run(main)


def poller(addresses: CoordinatorAddresses, pace: str) -> float:
    with (
        zmq.Context() as context,
        context.socket(zmq.XPUB) as engines,
        context.socket(zmq.PULL) as outputs,
        context.socket(zmq.XPUB) as front,
    ):
        outputs.rcvhwm = front.linger = engines.linger = 0
        engines.bind(addresses.back_publish)
        outputs.bind(addresses.back_output)
        front.bind(addresses.front)
        watch = Stopwatch(MESSAGES[pace])
        poll_until_the_last(engines, outputs, front, watch, floor_ms=50 if pace == "steps" else 0)
        return watch.each()


def poll_until_the_last(
    engines: zmq.Socket[bytes],
    outputs: zmq.Socket[bytes],
    front: zmq.Socket[bytes],
    watch: Stopwatch,
    *,
    floor_ms: int,
) -> None:
    decode = msgspec.msgpack.Decoder(Envelope).decode
    encode = msgspec.msgpack.Encoder().encode
    counts: list[list[float]] = [[0, 0, 0.0] for _ in range(ENGINES)]
    kept: list[list[float]] | None = None
    changed, published, step = False, 0, -1
    poll = zmq.Poller()
    for socket in (engines, outputs, front):
        poll.register(socket, zmq.POLLIN)
    while True:
        wait = (INTERVAL_S * 1000 if changed else 5000) - (int(time.time() * 1000) - published)
        events = dict(poll.poll(int(max(0 if kept else floor_ms, wait))))
        if not events:
            front.send(encode((kept or counts, 0, False)))
            published, changed, kept = int(time.time() * 1000), bool(kept), None
        if front in events:
            front.recv()
        if outputs in events:
            buffer = outputs.recv()
            last = watch.press()
            envelope = decode(buffer)
            if (stats := envelope.scheduler_stats) is not None:
                if floor_ms and stats.step_counter > step:
                    kept = [list(row) for row in counts] if changed else None
                    step = stats.step_counter
                row = counts[envelope.engine_index]
                row[0], row[1] = stats.num_waiting_reqs, stats.num_running_reqs
                row[2] = stats.kv_cache_usage
                changed = True
            if last:
                return


# -- The table -------------------------------------------------------------------------------------


def main(rounds: int = ROUNDS) -> None:
    """Print one table."""
    logging.disable()  # sockets of one sender overtake each other, which is warned of
    rows = []
    with open_other_side(__file__) as other:
        engines = Engines(other)
        for pace, messages in MESSAGES.items():
            works: dict[str, Work] = {"ours": ours, "poller": poller}
            entries = {name: partial(engines.measure, pace, work) for name, work in works.items()}
            measured = compete(entries, rounds=rounds)
            rows.append(
                (
                    f"{pace}, {messages:,} messages",
                    *(f"{measured.median(name) * 1e6:.1f}" for name in works),
                    f"{measured.times_faster('ours', than='poller'):.2f}x",
                )
            )
    print_table(
        f"{ENGINES} engines; CPU us a message, and times cheaper than the poller ({rounds} rounds)",
        ("", "ours", "poller", "/ poller"),
        rows,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2], send)
    else:
        main(*map(int, sys.argv[1:2]))
