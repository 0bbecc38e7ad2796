"""Reports of class G, start-up and embedding, that concern one process."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ClusterNotStarted
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.wrapper import named


class NeverReady(EchoModel):
    """Hangs in its thread when it allocates, until it is let go."""

    inline = False

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        self.let_go.wait()
        return super().allocate(num_blocks=num_blocks, block_size=block_size)


async def test_G05_a_start_that_hangs_ends_and_says_which_key_bounds_it() -> None:
    model = NeverReady()
    try:
        with named(model) as name, trio.fail_after(10):
            config = parse_config(f"""
                [[engines]]
                model = "{name}"
                [engines.supervision]
                step_timeout = "50ms"
                intensity = 1
                backoff = "1ms"
            """)
            with pytest.raises(ClusterNotStarted, match=r"KV cache .* 0\.05 s .*step_timeout"):
                async with open_cluster(config):
                    pytest.fail("an engine whose allocation hangs is not ready")
    finally:  # whatever was found: a thread that is left would hang whoever joins all of them
        model.let_go.set()
        for thread in threading.enumerate():
            if thread.name.startswith("dpkit "):
                thread.join()


def test_G10_a_cluster_runs_in_any_thread_and_touches_no_signal() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    texts = []

    async def serve() -> None:
        async with open_cluster(parse_config('[[engines]]\nmodel = "echo"\n')) as cluster:
            texts.append((await cluster.client.complete("hi")).text)

    thread = threading.Thread(target=trio.run, args=[serve])
    thread.start()
    thread.join()
    assert texts == ["hi"]
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
