"""Synthetic workloads by name: the scenarios of known issues, and small inputs that show one thing.

Each draws its requests from a seed, names the preset and the number of engines that it was made
for, and knows nothing of who serves it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.traces import Ask, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from random import Random

    Draw = Callable[[Random], int]
    Shares = tuple[tuple[float, Draw], ...]


def _uniform(low: int, high: int) -> Draw:
    """A whole number from `low` on, below `high`."""
    return lambda rng: rng.randrange(low, high)


def _lognormal(mean: float, sigma: float, most: int) -> Draw:
    """Mean and sigma are those of the logarithm."""
    return lambda rng: max(1, min(most, int(rng.lognormvariate(mean, sigma))))


def _fixed(tokens: int) -> Draw:
    return lambda _: tokens


@frozen(kw_only=True)
class Workload:
    """A workload, and what it was made for."""

    make: Callable[[Random], Iterator[Ask]]
    preset: str
    engines: int = 8
    max_num_seqs: int | None = None
    users: int | None = None
    has_rate: bool = True


def _drawn(
    requests: int, prompt: Draw, output: Draw, arrivals: Callable[[Random], Iterator[float]]
) -> Callable[[Random], Iterator[Ask]]:
    def make(rng: Random) -> Iterator[Ask]:
        times = arrivals(rng)
        for _ in range(requests):
            yield Ask(arrival_s=next(times), prompt_tokens=prompt(rng), output_tokens=output(rng))

    return make


def _at_once(_: Random) -> Iterator[float]:
    while True:
        yield 0.0


def _poisson(rng: Random) -> Iterator[float]:
    """One a second on average: the load says how many it is really."""
    now = 0.0
    while True:
        yield now
        now += rng.expovariate(1.0)


def _bursts(size: int, every_s: float, jitter_s: float) -> Callable[[Random], Iterator[float]]:
    def arrivals(rng: Random) -> Iterator[float]:
        start = 0.0
        while True:
            yield from sorted(start + rng.uniform(0.0, jitter_s) for _ in range(size))
            start += every_s

    return arrivals


def _mixed(shares: Shares) -> Draw:
    """One draw decides which; the last share is for the rest."""

    def draw(rng: Random) -> int:
        left = rng.random()
        for share, choice in shares:
            if (left := left - share) < 0:
                return choice(rng)
        return shares[-1][1](rng)

    return draw


def _bimodal(rng: Random) -> Iterator[Ask]:
    for arrival_s in _first(5_000, _poisson(rng)):
        is_long = rng.random() < 0.05
        prompt = rng.randrange(60_000, 120_000) if is_long else rng.randrange(50, 600)
        output = rng.randrange(10, 100) if is_long else rng.randrange(20, 300)
        yield Ask(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)


def _first(count: int, times: Iterator[float]) -> Iterator[float]:
    for _ in range(count):
        yield next(times)


def _micro_long(_: Random) -> Iterator[Ask]:
    yield Ask(arrival_s=0.0, prompt_tokens=100_000, output_tokens=50)
    for number in range(20):
        yield Ask(arrival_s=0.05 * (number + 1), prompt_tokens=200, output_tokens=50)


def _micro_alias(_: Random) -> Iterator[Ask]:
    for number in range(80):
        prompt, output = (100, 20) if number % 2 else (20_000, 1_500)
        yield Ask(arrival_s=0.25 * number, prompt_tokens=prompt, output_tokens=output)


def _micro_kv(_: Random) -> Iterator[Ask]:
    for number in range(12):
        output = 4_000 if number % 2 else 100
        yield Ask(arrival_s=0.2 * number, prompt_tokens=9_000, output_tokens=output)
    for number in range(60):
        yield Ask(arrival_s=60.0 + 0.5 * number, prompt_tokens=1_500, output_tokens=60)


WORKLOADS: Mapping[str, Workload] = {
    "i48808": Workload(
        make=_drawn(600, _uniform(500, 30_000), _lognormal(7.5, 1.0, 30_000), _at_once),
        preset="h20-4b",
        engines=4,
        users=32,
    ),
    "i36748": Workload(
        make=_drawn(3_000, _uniform(800, 6_000), _lognormal(7.3, 0.9, 16_000), _at_once),
        preset="h100-8b",
        max_num_seqs=64,
        users=512,
    ),
    "i40279": Workload(
        make=_drawn(400, _uniform(100, 1_500), _lognormal(9.0, 0.8, 30_000), _at_once),
        preset="h100-8b",
        users=50,
    ),
    "p40795": Workload(
        make=_drawn(800, _uniform(11_000, 99_000), _fixed(1), _poisson),
        preset="h200-30b-a3b",
        has_rate=False,
    ),
    "p41626": Workload(
        make=_drawn(6_000, _uniform(200, 1_200), _uniform(50, 400), _bursts(24, 0.5, 0.02)),
        preset="h100-8b",
    ),
    "p47420": Workload(
        make=_drawn(6_000, _fixed(1_024), _fixed(128), _poisson),
        preset="h100-8b",
        has_rate=False,
    ),
    "bimodal": Workload(make=_bimodal, preset="h200-30b-a3b", has_rate=False),
    "kvhog": Workload(
        make=_drawn(
            4_000,
            _uniform(100, 2_000),
            _mixed(((0.1, _uniform(6_000, 16_000)), (0.9, _uniform(20, 200)))),
            _poisson,
        ),
        preset="h100-8b",
        has_rate=False,
    ),
    "micro-long": Workload(make=_micro_long, preset="h200-30b-a3b", engines=2),
    "micro-alias": Workload(make=_micro_alias, preset="h100-8b", engines=2),
    "micro-kv": Workload(make=_micro_kv, preset="h100-32b", engines=2),
}


def make_workload(name: str, *, rows: int | None = None, seed: int = 0) -> Trace:
    """Draw a workload.

    Args:
        name: One of `WORKLOADS`.
        rows: How many of its first requests; None: all.
        seed: Same seed, same requests, in any process.
    """
    workload = WORKLOADS[name]
    asks = tuple(workload.make(random.Random(f"{seed}/{name}")))  # noqa: S311 - no secrets
    return Trace(name=name, asks=asks[:rows], users=workload.users, has_rate=workload.has_rate)
