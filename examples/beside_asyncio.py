"""Run a cluster beside asyncio: Trio in guest mode, both loops in one thread.

asyncio stays in charge; Trio runs as its guest. Run it:  python examples/beside_asyncio.py
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import trio

import dpkit

if TYPE_CHECKING:
    import outcome

CONFIG = dpkit.parse_config("""
    [[engines]]
    model = "echo"
    count = 2
""")


async def trio_side(prompts: asyncio.Queue[str | None], answers: asyncio.Queue[str]) -> None:
    """Serve prompts until there are no more; lives in Trio, speaks through asyncio's queues."""
    async with dpkit.open_cluster(CONFIG) as cluster, trio.open_nursery() as nursery:

        async def answer(prompt: str) -> None:
            done = await cluster.client.complete(prompt, max_tokens=64)
            answers.put_nowait(f"{done.engine}: {done.text}")

        while True:
            try:
                prompt = prompts.get_nowait()
            except asyncio.QueueEmpty:
                await trio.sleep(0.001)  # a queue of asyncio's cannot wake a task of Trio's
                continue
            if prompt is None:
                return
            nursery.start_soon(answer, prompt)


async def main() -> None:
    """Ask three questions from asyncio and wait for the answers."""
    prompts: asyncio.Queue[str | None] = asyncio.Queue()
    answers: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[outcome.Outcome[None]] = loop.create_future()
    trio.lowlevel.start_guest_run(
        trio_side,
        prompts,
        answers,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=ended.set_result,
        host_uses_signal_set_wakeup_fd=True,
    )
    for prompt in ("one", "two", "three"):
        prompts.put_nowait(prompt)
    for _ in range(3):
        print(await answers.get())
    prompts.put_nowait(None)
    (await ended).unwrap()  # what went wrong in Trio comes out here


if __name__ == "__main__":
    asyncio.run(main())
