"""Cancel half of the streams in flight, and see the ledger forget them at once.

Run it:  python examples/cancel_half.py
"""

import trio

import dpkit

CONFIG = dpkit.parse_config("""
    [[engines]]
    name = "engine"
    model = "cost:h100-8b"      # sleeps as long as an H100 would take for each step
    count = 2
""")


def show(cluster: dpkit.Cluster, when: str) -> None:
    """Print what the client's ledger and the engines' schedulers hold."""
    statistics = cluster.statistics()
    inflight = sum(statistics.clients[0].inflight.values())
    running = {str(e.engine): e.core.running for e in statistics.engines}
    print(f"{when:<28} in flight {inflight}, running {running}")


async def main() -> None:
    """Start eight endless streams, cancel four, then leave."""
    async with dpkit.open_cluster(CONFIG) as cluster:
        scopes = [trio.CancelScope() for _ in range(8)]

        async def read(scope: trio.CancelScope) -> None:
            with scope:
                await cluster.client.complete("tell me everything", max_tokens=100_000)

        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(read, scope)
            await trio.sleep(0.1)
            show(cluster, "eight streams:")

            for scope in scopes[::2]:
                scope.cancel()
            await trio.sleep(0.001)  # let the cancelled tasks unwind; the engines are mid-step
            show(cluster, "half of them cancelled:")

            await trio.sleep(0.1)
            show(cluster, "a step later:")
            nursery.cancel_scope.cancel()
        await trio.sleep(0.1)
        show(cluster, "all gone:")


if __name__ == "__main__":
    trio.run(main)
