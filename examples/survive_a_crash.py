"""Lose an engine in the middle of its work, and see nobody notice.

The model crashes one engine once, at its tenth step. What it held goes on elsewhere, after the
tokens it had already; the supervisor brings the engine back. For local engines: what is counted in
a class is one count of them all; of engines in processes each has its own, from the beginning again
in each of its lives. Run it:
    python examples/survive_a_crash.py
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

import dpkit
from dpkit.engine.models.echo import EchoModel

if TYPE_CHECKING:
    from dpkit.messages import Batch, StepResult

CONFIG = """
    [[engines]]
    name = "engine"
    model = "survive_a_crash:Fragile"
    count = 2
    supervision.backoff = "10ms"

    [admission]
    resume = true               # go on elsewhere, after what was already said
"""


class Fragile(EchoModel):
    """Echo, but for one crash."""

    steps = 0

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Compute a step, or fail."""
        Fragile.steps += 1
        if Fragile.steps == 10:
            raise RuntimeError("the GPU fell off the bus")
        return super().execute(batch, cache)


async def main() -> None:
    """Send four requests, and count what came back."""
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG)) as cluster:
        prompts = [f"request {number}, to be repeated to its end" for number in range(4)]
        answers: dict[str, str] = {}

        async def ask(prompt: str) -> None:
            answers[prompt] = (await cluster.client.complete(prompt)).text

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
        await trio.sleep(0.05)  # let the lost engine come back
        whole = sum(answers[prompt] == prompt for prompt in prompts)
        print(f"{whole} of {len(prompts)} answers are whole")
        for engine in cluster.statistics().engines:
            times = "1 restart" if engine.restarts == 1 else f"{engine.restarts} restarts"
            print(f"{engine.engine}: {engine.state}, {times}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)  # the crash is meant: no traceback, please
    sys.path.insert(0, str(Path(__file__).parent))  # where the config finds "survive_a_crash"
    trio.run(main)
