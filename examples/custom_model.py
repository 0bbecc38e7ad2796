"""Bring your own model: one class, named in the config as "module:Class".

This one answers any prompt by counting. Run it:  python examples/custom_model.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import trio

import dpkit
from dpkit.text.bytes import ByteTokenizer


class CountingModel(dpkit.Model):
    """Its n-th token is the letter n of the alphabet."""

    inline = True  # it costs nothing, so it needs no thread
    spec = dpkit.ModelSpec(vocab_size=257)

    def tokenizer(self) -> ByteTokenizer:
        """One token a byte."""
        return ByteTokenizer()

    def execute(self, batch: dpkit.Batch, cache: Any) -> dpkit.StepResult:
        """Sample a token for every row that asks for one."""
        return dpkit.StepResult(
            sampled=[
                None if row.output_index is None else ord("a") + row.output_index % 26
                for row in batch.rows
            ]
        )


CONFIG = """
    [[engines]]
    model = "custom_model:CountingModel"
    count = 2
"""


async def main() -> None:
    """Ask it for the alphabet."""
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG)) as cluster:
        done = await cluster.client.complete("count, please", max_tokens=26)
        print(f"{done.engine}: {done.text}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where the config finds "custom_model"
    trio.run(main)
