"""A program that lets go of its model, and hangs in that: its processes have ended, it has not."""

from __future__ import annotations

import trio

from dpkit.nursery.sharedcontext import SharedContext
from tests.processes.test_life import make_host

PATIENCE_S = 1.0


async def main() -> None:
    host = make_host()
    host.context = SharedContext(PATIENCE_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await host.launcher()
        with host.context.use():  # as a life that has hung does
            host.stop()
            print("lets go", flush=True)
            await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
