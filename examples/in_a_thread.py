"""Run a cluster in a thread of its own, for a program that is not asynchronous.

`trio.from_thread` is the door: it waits in the calling thread while Trio does the work.
Run it:  python examples/in_a_thread.py
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import trio

import dpkit

CONFIG = dpkit.parse_config("""
    [[engines]]
    model = "echo"
    count = 2
""")


class ClusterThread:
    """A cluster for synchronous callers: any number of threads may ask at once."""

    def __enter__(self) -> Self:
        self._ready: Future[tuple[trio.lowlevel.TrioToken, dpkit.Cluster]] = Future()
        self._leave = trio.Event()
        self._thread = threading.Thread(target=self._run, name="cluster")
        self._thread.start()
        self._token, self._cluster = self._ready.result()  # raises what kept it from starting
        return self

    def __exit__(self, *_: object) -> None:
        self._token.run_sync_soon(self._leave.set)
        self._thread.join()

    def complete(self, prompt: str) -> dpkit.Completion:
        """Ask, and block the calling thread until the answer is there."""
        client = self._cluster.client
        return trio.from_thread.run(client.complete, prompt, trio_token=self._token)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        async with dpkit.open_cluster(CONFIG) as cluster:
            self._ready.set_result((trio.lowlevel.current_trio_token(), cluster))
            await self._leave.wait()


def main() -> None:
    """Ask from three threads at once."""
    with ClusterThread() as cluster, ThreadPoolExecutor(3) as pool:
        for done in pool.map(cluster.complete, ("one", "two", "three")):
            print(f"{done.engine}: {done.text}")


if __name__ == "__main__":
    main()
