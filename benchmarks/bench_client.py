"""What a client costs: CPU of its process for each token of a stream, and for each short request.

Paced: 1,024 requests on 8 engines, each of which makes 15 steps a second and gives 128 requests a
token in each: what a server does all day. Every stream is woken for every token, as its text has
to go out. Engines that know nothing of each other step at different moments, so the client wakes
120 times a second; those in step are heard together. Short: 64 callers, a prompt of 2 kB, one
token, again and again.

Ours is the whole client behind `open_cluster` with engines in processes, its ledger, dispatch and
supervision at work; as streams (`async for`), and as sinks (`client.submit`). The yardstick is
a client of the shape of vLLM's on asyncio (`asyncio_client`), on uvloop if that is installed. All
of them talk over ipc to the same process that poses as engines (`paced_engines`). None makes text
of tokens: what that costs is the same for all.

Run it:  python benchmarks/bench_client.py [rounds]
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import trio
from asyncio_client import Sampling, open_asyncio_client
from harness import Rounds, compete, print_table
from paced_engines import ENGINES, STEPS_A_SECOND, as_launcher, open_paced_engines

import dpkit

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from asyncio_client import AsyncioClient
    from paced_engines import PacedEngines

    from dpkit.messages import EngineOutput

ROUNDS = 7
YARDSTICK = "uvloop" if find_spec("uvloop") else "asyncio"
STREAMS = 1024
WARM_UP_STEPS = STEPS_A_SECOND
MEASURED_STEPS = 4 * STEPS_A_SECOND
STEPS = WARM_UP_STEPS + MEASURED_STEPS + 5
CALLERS = 64
REQUESTS = 6000
WARM_UP_REQUESTS = 1000

_rng = random.Random(1)
PROMPT = [_rng.randrange(128_000) for _ in range(16)]
LONG_PROMPT = [_rng.randrange(128_000) for _ in range(512)]  # 2 kB on the wire

CONFIG = dpkit.parse_config(
    f"""
    [[engines]]
    model = "paced_engines:Face"
    kind = "process"
    count = {ENGINES}
    """
)


class Meter:
    """CPU seconds of this process for each item, from one item to another."""

    def __init__(self, first: int, last: int) -> None:
        self.items = 0
        self._first = first
        self._last = last
        self._next = first
        self._times: list[float] = []

    def count(self, items: int) -> None:
        """Some more have come."""
        self.items += items
        if self.items >= self._next:
            self._times.append(time.process_time())
            self._next = self._last if len(self._times) == 1 else sys.maxsize

    def each(self) -> float:
        """Seconds an item."""
        began, ended = self._times
        return (ended - began) / (self._last - self._first)


def token_meter() -> Meter:
    return Meter(STREAMS * WARM_UP_STEPS, STREAMS * (WARM_UP_STEPS + MEASURED_STEPS))


def request_meter() -> Meter:
    return Meter(WARM_UP_REQUESTS, REQUESTS)


def run_asyncio(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=import_module(YARDSTICK).new_event_loop) as runner:
        runner.run(main)


# -- Paced -----------------------------------------------------------------------------------------


def paced_streams(engines: PacedEngines) -> float:
    """Ours, `async for`."""
    meter = token_meter()

    async def read(client: dpkit.Client) -> None:
        async with client.generate(PROMPT, max_tokens=STEPS, ignore_eos=True) as stream:
            async for output in stream:
                meter.count(len(output.token_ids))

    async def main() -> None:
        async with dpkit.open_cluster(CONFIG) as cluster, trio.open_nursery() as nursery:
            for _ in range(STREAMS):
                nursery.start_soon(read, cluster.client)

    with as_launcher(engines):
        trio.run(main)
    return check(meter)


def paced_sinks(engines: PacedEngines) -> float:
    """Ours, `submit`."""
    meter = token_meter()

    async def main() -> None:
        done = trio.Event()

        def sink(output: EngineOutput) -> None:
            meter.count(len(output.token_ids))
            if meter.items == STREAMS * STEPS:
                done.set()

        async with dpkit.open_cluster(CONFIG) as cluster:
            for _ in range(STREAMS):
                cluster.client.submit(PROMPT, sink=sink, max_tokens=STEPS, ignore_eos=True)
            await done.wait()

    with as_launcher(engines):
        trio.run(main)
    return check(meter)


def paced_asyncio(engines: PacedEngines) -> float:
    """The yardstick."""
    meter = token_meter()

    async def read(client: AsyncioClient) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        async for output in client.generate(PROMPT, sampling):
            meter.count(len(output.outputs[0].token_ids))

    async def main() -> None:
        async with open_asyncio_client(engines) as client:
            await asyncio.gather(*(read(client) for _ in range(STREAMS)))

    run_asyncio(main())
    return check(meter)


def check(meter: Meter) -> float:
    """Nothing was lost, nothing came twice."""
    if meter.items != STREAMS * STEPS:
        raise RuntimeError(f"{meter.items} tokens came, and {STREAMS * STEPS} were sent")
    return meter.each()


# -- Short -----------------------------------------------------------------------------------------


def short_complete(engines: PacedEngines) -> float:
    """Ours, `complete`."""
    meter = request_meter()

    async def call(client: dpkit.Client) -> None:
        while meter.items < REQUESTS:
            await client.complete(LONG_PROMPT, max_tokens=1, ignore_eos=True)
            meter.count(1)

    async def main() -> None:
        async with dpkit.open_cluster(CONFIG) as cluster, trio.open_nursery() as nursery:
            for _ in range(CALLERS):
                nursery.start_soon(call, cluster.client)

    with as_launcher(engines):
        trio.run(main)
    return meter.each()


def short_sinks(engines: PacedEngines) -> float:
    """Ours, `submit`; each answer has the next request sent."""
    meter = request_meter()

    async def main() -> None:
        done = trio.Event()
        async with dpkit.open_cluster(CONFIG) as cluster:

            def send() -> None:
                cluster.client.submit(LONG_PROMPT, sink=sink, max_tokens=1, ignore_eos=True)

            def sink(_: EngineOutput) -> None:
                meter.count(1)
                if meter.items <= REQUESTS - CALLERS:
                    send()
                elif meter.items == REQUESTS:
                    done.set()

            for _ in range(CALLERS):
                send()
            await done.wait()

    with as_launcher(engines):
        trio.run(main)
    return meter.each()


def short_asyncio(engines: PacedEngines) -> float:
    """The yardstick."""
    meter = request_meter()

    async def call(client: AsyncioClient) -> None:
        while meter.items < REQUESTS:
            sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
            async for _ in client.generate(LONG_PROMPT, sampling):
                pass
            meter.count(1)

    async def main() -> None:
        async with open_asyncio_client(engines) as client:
            await asyncio.gather(*(call(client) for _ in range(CALLERS)))

    run_asyncio(main())
    return meter.each()


# -- The tables ------------------------------------------------------------------------------------


def show(title: str, measured: Rounds) -> None:
    """Print what each took, and how much of the yardstick that is."""
    rows = [
        (
            name,
            f"{measured.median(name) * 1e6:.2f}",
            f"{1 / measured.times_faster(name, than=YARDSTICK):.2f}x",
        )
        for name in measured.costs
    ]
    print_table(title, ("", "CPU us", f"of {YARDSTICK}"), rows)


def main(rounds: int = ROUNDS) -> None:
    """Print three tables."""
    paced = {
        YARDSTICK: paced_asyncio,
        "dpkit, async for": paced_streams,
        "dpkit, submit(sink=)": paced_sinks,
    }
    short = {
        YARDSTICK: short_asyncio,
        "dpkit, complete": short_complete,
        "dpkit, submit(sink=)": short_sinks,
    }
    with open_paced_engines() as engines:
        for title, contest, in_step in (
            (f"{STREAMS} paced streams, {ENGINES} engines in step; a token", paced, True),
            (f"{STREAMS} paced streams, {ENGINES} engines, each for itself; a token", paced, False),
            (f"{CALLERS} callers of short requests, {ENGINES} engines; a request", short, False),
        ):
            engines.in_step = in_step
            works = {name: partial(work, engines) for name, work in contest.items()}
            show(f"{title} ({rounds} rounds)", compete(works, rounds=rounds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
