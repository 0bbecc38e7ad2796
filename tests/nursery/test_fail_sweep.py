"""A model that fails at any of its calls, alone or while a reader leaves, harms nobody else.

`tests/planted` breaks the recovery on purpose and demands that this file goes red.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.failing import REPLAY, fail_sweep, pair_sweep
from dpkit.testing.history import LEFT, Entry, History
from dpkit.testing.points import ALLOCATE, STEP, Points
from dpkit.testing.wrapper import named

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SEEDS = range(int(os.environ.get("DPKIT_TEST_SEEDS", "20")))
PAIRS_PER_SEED = 40

PROMPT = "abcdefghi"
READERS = 4
TOKENS = 4

Outcome = tuple[History, Cluster]


def scenario_of(*, resume: bool) -> Callable[[Points], Awaitable[Outcome]]:
    """Two engines with little room, and readers of which the first is the target of pairs."""

    async def scenario(points: Points) -> Outcome:
        history = History(resumes=resume)

        async def read(number: int) -> None:
            client = cluster.clients[number % 2]
            await history.complete(client, PROMPT, max_tokens=TOKENS)

        async def read_as_target() -> None:
            with points.target():
                await read(0)

        with named(points.model(history.model(CostModel("h20-4b")))) as model:
            config = parse_config(
                f"""
                cluster.seed = 1
                admission.resume = {str(resume).lower()}
                [[engines]]
                model = "{model}"
                count = 2
                kv = {{ block_size = 4, num_blocks = 6 }}
                scheduler = {{ max_num_seqs = 3, max_num_batched_tokens = 5 }}
                """
            )
            async with open_cluster(config, clients=2) as cluster, trio.open_nursery() as nursery:
                nursery.start_soon(read_as_target)
                for number in range(1, READERS):
                    nursery.start_soon(read, number)
        return history, cluster

    return scenario


def _check(result: Outcome) -> list[Entry]:
    history, cluster = result
    history.check(cluster)
    assert all(entry.tokens == list(PROMPT[:TOKENS].encode()) for entry in _finished(history))
    return history.entries


def _finished(history: History) -> list[Entry]:
    return [entry for entry in history.entries if entry.outcomes == ["length"]]


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_that_fails_at_any_call_costs_no_more_than_its_engines_requests(
    *, resume: bool
) -> None:
    outcomes: set[str] = set()

    def check(result: Outcome) -> None:
        entries = _check(result)
        assert len(entries) == READERS
        outcomes.update(entry.outcomes[0] for entry in entries)

    done = fail_sweep(scenario_of(resume=resume), seeds=SEEDS, check=check)
    print(f"{done.runs} runs, {done.calls}, outcomes: {', '.join(sorted(outcomes))}")
    if REPLAY not in os.environ:
        assert done.calls[ALLOCATE] == 2
        assert done.runs > len(SEEDS) * 10
        # A single loss can be made good for everyone who may be resumed.
        assert outcomes == ({"length"} if resume else {"length", "EngineLost"})


@pytest.mark.parametrize("kind", [STEP, ALLOCATE])
@pytest.mark.parametrize(
    "sample", [PAIRS_PER_SEED, pytest.param(None, marks=pytest.mark.slow, id="all")]
)
def test_a_reader_that_leaves_while_the_model_fails_leaves_nothing(
    kind: str, sample: int | None
) -> None:
    outcomes: set[str] = set()

    def check(result: Outcome) -> None:
        outcomes.update(entry.outcomes[0] for entry in _check(result))

    seeds = SEEDS if sample is None else SEEDS[:5]
    done = pair_sweep(scenario_of(resume=True), seeds=seeds, check=check, kind=kind, sample=sample)
    print(f"{done.runs} runs, {done.calls}, outcomes: {', '.join(sorted(outcomes))}")
    if REPLAY not in os.environ:
        assert {"length", LEFT} <= outcomes
