"""Watch a cluster work: statistics are plain synchronous reads, so any task may look at any time.

Run it:  python examples/watch_statistics.py
"""

from functools import partial

import trio

import dpkit

CONFIG = dpkit.parse_config("""
    [[engines]]
    name = "engine"
    model = "cost:h100-32b"     # a small KV cache: watch it fill
    count = 2
    scheduler.max_num_seqs = 8
""")


async def watch(cluster: dpkit.Cluster, period: float) -> None:
    """Print one line per engine every `period` seconds, until cancelled."""
    while True:
        await trio.sleep(period)
        for engine in cluster.statistics().engines:
            core = engine.core
            bar = "#" * round(20 * core.kv_cache_usage)
            print(
                f"{engine.engine}: {core.waiting:2} waiting, {core.running:2} running, "
                f"KV [{bar:20}], {core.output_tokens:5} tokens"
            )
        print()


async def main() -> None:
    """Put forty requests on two engines and look on."""
    async with dpkit.open_cluster(CONFIG) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(watch, cluster, 0.1)
        async with trio.open_nursery() as requests:
            for number in range(40):
                prompt = f"request {number} " * 40
                requests.start_soon(partial(cluster.client.complete, prompt, max_tokens=8))
        nursery.cancel_scope.cancel()
        print(f"done: {cluster.client.statistics().finished} requests")


if __name__ == "__main__":
    trio.run(main)
