"""Test your own model as dpkit tests its own. Alone among the examples it needs pytest.

The two plugins are for dpkit's own settings of pytest, which hold wherever this repository is.

Get it:  pip install pytest pytest-timeout pytest-trio
Run it:  pytest examples/test_your_engine.py

The model is yours; everything else comes from `dpkit.testing`. Nothing here takes real time: all of
it runs on a virtual clock, and a failure prints the line that replays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dpkit
from dpkit.messages import ModelSpec, StepResult
from dpkit.testing.conformance import check_model
from dpkit.testing.failing import fail_sweep
from dpkit.testing.history import History
from dpkit.testing.idle import check_idle
from dpkit.testing.leaks import leak_check
from dpkit.testing.sweep import sweep
from dpkit.testing.wrapper import named
from dpkit.text.bytes import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.messages import Batch, BatchRow
    from dpkit.nursery.cluster import Cluster
    from dpkit.testing.mark import Mark
    from dpkit.testing.points import Points


class ShoutingModel(dpkit.Model):
    """Says the prompt again, in capitals. Yours would know more."""

    inline = True
    spec = ModelSpec(vocab_size=257)

    def tokenizer(self) -> ByteTokenizer:
        """One token a byte."""
        return ByteTokenizer()

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Sample a capital for every row that asks for a token; a step takes 10 ms."""
        return StepResult(sampled=[_capital(row) for row in batch.rows], duration_s=0.010)


def _capital(row: BatchRow) -> int | None:
    if row.output_index is None:
        return None
    prompt = bytes(row.prompt_token_ids).upper()
    return prompt[row.output_index % len(prompt)]


CONFIG = """
    [[engines]]
    model = "{model}"
    count = 2
    kv = {{ block_size = 4, num_blocks = 8 }}
"""


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every test leaves threads, descriptors and children as they were."""
    with leak_check():
        yield


def test_it_keeps_the_contract_of_a_model() -> None:
    """Chunked, batched, preempted or cached: a prompt has one answer."""
    check_model(ShoutingModel)


def test_a_reader_may_leave_at_any_step() -> None:
    """One run for each step of the reader's task, cancelled there, under three schedules."""

    async def scenario(mark: Mark) -> Cluster:
        with named(ShoutingModel()) as model:
            config = dpkit.parse_config(CONFIG.format(model=model))
            async with dpkit.open_cluster(config) as cluster:
                with mark.target():
                    await cluster.client.complete("hello", max_tokens=5)
        return cluster

    done = sweep(scenario, seeds=range(3), check=check_idle)
    print(f"cancelled in {done.runs} runs")


def test_it_may_fail_at_any_call() -> None:
    """One run for each step and each allocation, which fails; every request has one outcome."""

    async def scenario(points: Points) -> tuple[History, Cluster]:
        history = History()
        with named(points.model(history.model(ShoutingModel()))) as model:
            config = dpkit.parse_config(CONFIG.format(model=model))
            async with dpkit.open_cluster(config) as cluster:
                for prompt in ("hello", "again"):
                    await history.complete(cluster.client, prompt, max_tokens=5)
        return history, cluster

    def check(result: tuple[History, Cluster]) -> None:
        history, cluster = result
        history.check(cluster)

    done = fail_sweep(scenario, seeds=range(3), check=check)
    print(f"failed in {done.runs} runs: {done.calls}")
