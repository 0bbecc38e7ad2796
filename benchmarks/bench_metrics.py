"""What metrics cost: a token nothing of its own, a step about a microsecond, a scrape little.

* a step: one engine of echo with 1 and with 64 requests, as it is and with a meter that measures
  nothing, which is the least that a step can cost;
* a look: all numbers of 64 engines, on the loop;
* a scrape: a task that does nothing but a system call and a checkpoint, alone and while the text
  for 64 engines is made, for the first time and again.

Run it:  python benchmarks/bench_metrics.py
"""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import trio
from harness import compete, print_table

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.meter import Meter
from dpkit.observe import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.nursery.cluster import Cluster

TOKENS = 12_800
LOOKS = 20
QUIET_S = 0.5


class Idle(Meter):
    """Measures nothing."""

    def step(self, tokens: int, prompts: Sequence[int] = ()) -> None:
        """Do nothing."""


async def generate(requests: int, meter: Meter) -> float:
    """CPU seconds a token of one engine with so many requests at a time."""
    async with open_cluster(parse_config('[[engines]]\nmodel = "echo"\n')) as cluster:
        cluster._slots[0].life.meter = meter  # noqa: SLF001 - nobody else needs another one
        began = time.process_time()
        submissions = [
            cluster.client.submit(
                "abcdefgh",
                max_tokens=TOKENS // requests,
                ignore_eos=True,
                sink=lambda _: None,
            )
            for _ in range(requests)
        ]
        while any(each.finish_reason is None for each in submissions):
            await trio.lowlevel.checkpoint()
        return (time.process_time() - began) / TOKENS


def bench_steps() -> None:
    """The meter, against none."""
    rows = []
    for requests in (1, 64):
        rounds = compete(
            {
                "measured": lambda n=requests: trio.run(generate, n, Meter()),  # type: ignore[misc]
                "not": lambda n=requests: trio.run(generate, n, Idle()),  # type: ignore[misc]
            }
        )
        cost, least = rounds.median("measured"), rounds.median("not")
        ratio = 1 / rounds.times_faster("measured", "not")
        rows.append((f"{requests}", f"{cost * 1e6:.2f}", f"{least * 1e6:.2f}", f"{ratio:.3f}"))
    print_table("a token", ("requests", "us", "without meter", "ratio"), rows)


async def rounds_of_the_loop(metrics: Metrics | None) -> tuple[float, float]:
    """Rounds a second, and the longest, for as long as a scrape takes, or for a while."""
    ours, theirs = socket.socketpair()
    count, longest, began = 0, 0.0, trio.current_time()
    done = trio.Event()

    async def wait() -> None:
        if metrics is None:
            await trio.sleep(QUIET_S)
        else:
            await metrics.scrape()
        done.set()

    with ours, theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            while not done.is_set():
                before = trio.current_time()
                ours.send(b"x")
                theirs.recv(1)
                await trio.lowlevel.checkpoint()
                longest = max(longest, trio.current_time() - before)
                count += 1
    return count / (trio.current_time() - began), longest


async def bench_scrape() -> None:
    """A look, and what the loop does while the text is made."""
    config = parse_config('[[engines]]\nmodel = "echo"\ncount = 64\n')
    async with open_cluster(config) as cluster:
        metrics = Metrics(cluster)
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(partial(ask, cluster))
        began = time.process_time()
        for _ in range(LOOKS):
            metrics.numbers()
        look = (time.process_time() - began) / LOOKS
        alone, longest_alone = await rounds_of_the_loop(None)
        first, longest_first = await rounds_of_the_loop(metrics)
        beside, longest_beside = await rounds_of_the_loop(metrics)
        _, text = await metrics.scrape()
    print(f"a look at 64 engines: {look * 1e3:.2f} ms; their text: {len(text) / 1e6:.2f} MB")
    print_table(
        "the loop",
        ("", "rounds/s", "longest, ms"),
        [
            ("alone", f"{alone:,.0f}", f"{longest_alone * 1e3:.1f}"),
            ("beside the first scrape", f"{first:,.0f}", f"{longest_first * 1e3:.1f}"),
            ("beside another one", f"{beside:,.0f}", f"{longest_beside * 1e3:.1f}"),
        ],
    )


async def ask(cluster: Cluster) -> None:
    """A short request."""
    await cluster.client.complete("hello", max_tokens=20)


if __name__ == "__main__":
    bench_steps()
    trio.run(bench_scrape)
