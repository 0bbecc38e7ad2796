"""What the nursery costs: a cluster of one engine against the same engine stepped bare.

Both run the demo model in the same dtype with the same requests; the bare one is a loop around
`EngineCore.step` in this thread, the cluster is all of `open_cluster` with its engine thread, its
client and its streams. Wall time, taking turns.

    python benchmarks/bench_cluster.py [--requests 8] [--tokens 32] [--rounds 5]

Needs `dpkit fetch smollm2-135m`.
"""

from __future__ import annotations

import argparse
import time

import trio
from harness import compete, print_table

import dpkit
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models import load_model
from dpkit.messages import GenerateRequest, SamplingParams

MODEL = "smollm2-135m"
BLOCKS = 1024


def prompts(count: int) -> list[tuple[int, ...]]:
    """Made-up prompts of 32 tokens; no two begin alike, so nothing is found in a cache."""
    return [tuple(100 + (n * 7919 + i * 31) % 40_000 for i in range(32)) for n in range(count)]


def bare(core: EngineCore, cache: object, count: int, sampling: SamplingParams) -> float:
    """Seconds a token of a loop around `step`."""
    for number, prompt in enumerate(prompts(count)):
        core.add(
            GenerateRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
        )
    began = time.perf_counter()
    while core.has_requests():
        core.step(cache)
    return (time.perf_counter() - began) / (count * sampling.max_tokens)


async def clustered(cluster: dpkit.Cluster, count: int, sampling: SamplingParams) -> float:
    """Seconds a token of as many streams, each read as it comes."""

    async def read(prompt: tuple[int, ...]) -> None:
        async with cluster.client.generate(prompt, sampling) as stream:
            async for _ in stream:
                pass

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts(count):
            nursery.start_soon(read, prompt)
    return (time.perf_counter() - began) / (count * sampling.max_tokens)


async def main(args: argparse.Namespace) -> None:
    """Compare, and print the ratio."""
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    config = dpkit.parse_config(
        f'[[engines]]\nmodel = "{MODEL}"\nkv.num_blocks = {BLOCKS}\nkv.prefix_cache = false\n'
    )
    model = load_model(MODEL)
    limits = resolve_limits(model.spec, num_blocks=BLOCKS, prefix_cache=False)
    core = EngineCore(model, limits=limits)
    async with dpkit.open_cluster(config) as cluster:
        cache = model.allocate(num_blocks=BLOCKS, block_size=16)  # after: the same thread setting

        def run_clustered() -> float:
            return trio.from_thread.run(clustered, cluster, args.requests, sampling)

        rounds = await trio.to_thread.run_sync(
            lambda: compete(
                {
                    "bare": lambda: bare(core, cache, args.requests, sampling),
                    "open_cluster": run_clustered,
                },
                rounds=args.rounds,
            )
        )
    rows = [
        (name, f"{1 / rounds.median(name):.1f}", f"{rounds.times_faster(name, 'bare'):.3f}x")
        for name in rounds.costs
    ]
    title = f"{args.requests} requests x {args.tokens} tokens, {MODEL}"
    print_table(title, ("", "tokens/s", "of bare"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    trio.run(main, parser.parse_args())
