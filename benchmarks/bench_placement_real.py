"""What placement is worth on real engines: `expected_ttft`, bound late, against `kv_pressure`.

Two engines of the demo model, each in a process of its own, and short prompts among which a few are
long: one in ten has 600 to 1,500 tokens, the others 20 to 100; answers have 8 to 32. Nothing is
found in a cache. Requests come at random moments (open loop), at a share of what the engines can
do, which each round measures for itself in a closed loop, since a machine's speed drifts. In a
round all contenders get the same requests at the same moments, and their order turns.

    python benchmarks/bench_placement_real.py [--rounds 5] [--requests 60] [--load 0.8]

Needs `dpkit fetch smollm2-135m`.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field, frozen
from harness import print_table

import dpkit
from dpkit.bench.inprocess import ClusterTarget
from dpkit.bench.lengths import Lengths, Uniform
from dpkit.bench.plan import Load
from dpkit.bench.session import run_bench
from dpkit.bench.spread import percentile

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from dpkit.bench.record import Record

OURS, BASELINE = "expected_ttft", "kv_pressure"
CONTENDERS = (BASELINE, OURS)
LONG, SHORT, ANSWERS = (600, 1500), (20, 100), (8, 32)  # tokens, from and to
CROWD = 8
"""Requests under way while capacity is measured: more than two engines can begin at once."""
CALIBRATION = 30
"""Requests of it."""


@frozen
class Waits:
    """Seconds to the first token of one run's requests."""

    short: Sequence[float]
    long: Sequence[float]

    @property
    def all(self) -> list[float]:
        """Of both kinds."""
        return [*self.short, *self.long]


def config(policy: str) -> dpkit.Config:
    return dpkit.parse_config(
        '[[engines]]\nmodel = "smollm2-135m"\nkind = "process"\ncount = 2\n'
        f'kv.prefix_cache = false\n[balancer]\npolicy = "{policy}"\n'
    )


@define(eq=False)
class Mixture(Lengths):
    """Just one long prompt in ten, at a random place."""

    _ten: list[tuple[int, int]] = field(factory=list, init=False)

    def draw(self, rng: random.Random) -> int:
        """As `Lengths` says."""
        if not self._ten:
            self._ten = [LONG, *[SHORT] * 9]
            rng.shuffle(self._ten)
        return rng.randint(*self._ten.pop())


def load(seed: int, **how: Any) -> Load:
    """The same for all who get the same seed: a mixture is used up by whoever draws from it."""
    answers = Uniform(*ANSWERS)
    return Load(prompt_tokens=Mixture(), output_tokens=answers, ignore_eos=True, seed=seed, **how)


async def put(cluster: dpkit.Cluster, wanted: Load) -> tuple[float, Waits]:
    """Requests a second that were answered, and how they waited."""
    report = await run_bench(ClusterTarget(cluster, "here", wanted), wanted)
    summary = report.summary
    if summary.finished != summary.requests:
        raise SystemExit(f"{summary.requests - summary.finished} requests failed: {summary.errors}")
    return summary.requests_per_s, waits(report.records)


def waits(records: Sequence[Record]) -> Waits:
    found: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        if record.ttft is not None:
            found[record.prompt_tokens >= LONG[0]].append(record.ttft)
    return Waits(short=found[False], long=found[True])


async def compare(args: argparse.Namespace) -> list[dict[str, Waits]]:
    """All rounds; one more before the first warms up and teaches what steps cost."""
    rounds = []
    async with AsyncExitStack() as stack:
        clusters = {
            name: await stack.enter_async_context(dpkit.open_cluster(config(name)))
            for name in CONTENDERS
        }
        for number in range(-1, args.rounds):
            names = CONTENDERS if number % 2 else CONTENDERS[::-1]
            seed = args.seed + number
            closed = partial(load, seed, concurrency=CROWD, requests=CALIBRATION)
            capacity, _ = await put(clusters[names[0]], closed())
            if number < 0:
                await put(clusters[names[1]], closed())
                continue
            rate = args.load * capacity
            found = {
                name: (await put(clusters[name], load(seed, rate=rate, requests=args.requests)))[1]
                for name in names
            }
            rounds.append(found)
            tell(number, capacity, found)
    return rounds


def tell(number: int, capacity: float, found: Mapping[str, Waits]) -> None:
    """One round, at once: the whole takes minutes."""
    words = "; ".join(
        f"{name} p99 {p99(each.all):.2f} s, mean {statistics.fmean(each.all):.2f} s"
        for name, each in found.items()
    )
    print(f"round {number + 1}, of {capacity:.2f} requests/s: {words}", flush=True)


def p99(seconds: Sequence[float]) -> float:
    return percentile(sorted(seconds), 99)


def row(title: str, rounds: Sequence[Mapping[str, Sequence[float]]], *, tail: bool) -> list[str]:
    """A figure of both, and the ratios within rounds: the middle one, the least and the most."""
    of = p99 if tail else statistics.fmean
    pairs = [(of(each[OURS]), of(each[BASELINE])) for each in rounds]
    ratios = sorted(ours / baseline for ours, baseline in pairs)
    middles = (statistics.median(pair[place] for pair in pairs) for place in (1, 0))
    return [
        title,
        *(f"{middle:.2f}" for middle in middles),
        f"{statistics.median(ratios):.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
    ]


def main(args: argparse.Namespace) -> None:
    rounds = trio.run(compare, args)
    kinds = {"all": "all", "short prompts": "short", "long prompts": "long"}
    rows = []
    for title, kind in kinds.items():
        seconds = [{name: getattr(each[name], kind) for name in each} for each in rounds]
        rows += [
            row(f"{title}, p99", seconds, tail=True),
            row(f"{title}, mean", seconds, tail=False),
        ]
    print_table(
        f"seconds to the first token at {args.load:g} of capacity, medians of {args.rounds} rounds "
        f"of {args.requests} requests, and ours over the baseline's",
        ("", *CONTENDERS, "ratio", "of all rounds"),
        rows,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.8, help="share of what the engines can do")
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
