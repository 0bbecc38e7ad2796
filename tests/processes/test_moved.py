"""A text whose engine ran out of memory, and that went on at another one, is that of a calm run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.config.load import parse_config
from dpkit.messages import EngineId
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle
from dpkit.testing.tiny import write_tiny_directory
from tests.clusters import is_idle
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.messages import Completion
    from dpkit.nursery.client import Client
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.stream import OutputStream

# Two engines with room for 16 blocks of 16 tokens.
CONFIG = """
    [balancer]
    policy = "expected_ttft"
    [[engines]]
    model = "{model}"
    kind = "{kind}"
    dtype = "float32"
    count = 2
    kv = {{ num_blocks = 16, prefix_cache = false }}
"""

PROMPT = list(range(3, 53))

TRIES = 3
"""Whether an engine still has what it is asked for is up to the machine."""

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.1, "seed": 3, "top_p": 0.95, "logprobs": 2, "prompt_logprobs": 0},
    "penalised, watched": {
        "temperature": 0.8,
        "seed": 4,
        "frequency_penalty": 1.0,
        "logit_bias": {7: 1.5},
        "min_tokens": 75,
        "stop": ["never said"],
    },
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights, for one thread: tests share the machine."""
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    return write_tiny_directory(tmp_path / "tiny", tie_word_embeddings=False)


async def ask(client: Client, name: str) -> Completion:
    """The request that is to be moved."""
    return await client.complete(PROMPT, max_tokens=75, ignore_eos=True, **ASKED[name])


async def crowd(cluster: Cluster, name: str) -> Completion:
    """Long answers meet on engine-0, the last to come is preempted, and engine-1 stands idle."""
    client = cluster.client

    def fill(engine: str, prompt: int, tokens: int) -> OutputStream:
        return client.generate([9] * prompt, max_tokens=tokens, ignore_eos=True, engine=engine)

    for _ in range(25):  # answers are short, by what was seen of late
        await client.complete([9], max_tokens=1, seed=0)
    # All are placed before any engine can answer: the books say who goes where, not the clock.
    async with (
        fill("engine-1", 230, 16) as there,
        fill("engine-0", 50, 75) as first,
        fill("engine-0", 50, 75) as second,
    ):
        moved = await ask(client, name)
        for each in (there, first, second):
            await each.read_all()
    return moved


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_text_and_all_that_is_told_beside_it(tiny: Path, kind: str) -> None:
    config = parse_config(CONFIG.format(model=tiny, kind=kind))
    with trio.fail_after(60):
        async with open_cluster(config) as cluster:
            for name in ASKED:
                calm = await ask(cluster.client, name)
                assert any([await is_moved(cluster, name, calm) for _ in range(TRIES)])
            assert cluster.client.statistics().resumed == 0, "nothing was lost"
            await until(lambda: is_idle(cluster))
            check_idle(cluster)


async def is_moved(cluster: Cluster, name: str, calm: Completion) -> bool:
    """Ask in a crowd, and compare; False: it had room again before it was had back."""
    before = cluster.client.statistics().taken_back
    moved = await crowd(cluster, name)
    assert told_by(moved) == told_by(calm), name
    assert len(moved.token_ids) == 75
    return cluster.client.statistics().taken_back > before


def told_by(completion: Completion) -> tuple[object, ...]:
    """All but where and when; logprobs as nearly the same, as who shared a step shows in them."""
    told = [
        (each.token_id, each.rank, pytest.approx(each.logprob, abs=1e-3))
        for each in (*completion.logprobs, *completion.prompt_logprobs)
    ]
    bare = evolve(
        completion,
        request_id="",
        engine=EngineId("any", 0),
        cached_tokens=None,
        ttft_s=0,
        latency_s=0,
        logprobs=(),
        prompt_logprobs=(),
    )
    return bare, told
