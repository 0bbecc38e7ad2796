"""Prompts that share what a trace says, and workloads that are drawn from a seed."""

from __future__ import annotations

import pytest

from dpkit.hashing import block_hash, root_hash
from dpkit.simulate.prompts import prompt_of
from dpkit.simulate.workloads import WORKLOADS, make_workload
from dpkit.traces import Ask


@pytest.mark.parametrize("size", [16, 128, 512])
def test_prompts_share_blocks_exactly_as_far_as_their_ids_are_equal(size: int) -> None:
    one = Ask(arrival_s=0.0, prompt_tokens=1_500, output_tokens=1, blocks=(3, 9, 4))
    other = Ask(arrival_s=0.0, prompt_tokens=1_400, output_tokens=1, blocks=(3, 9, 5))
    alone = Ask(arrival_s=0.0, prompt_tokens=1_400, output_tokens=1)
    hashes = [_hashes(prompt_of(ask, n), size) for n, ask in enumerate([one, other, alone])]
    shared = sum(a == b for a, b in zip(hashes[0], hashes[1], strict=False))
    assert shared == 1024 // size
    assert not set(hashes[0]) & set(hashes[2])
    assert len(prompt_of(one, 0)) == 1_500


def _hashes(token_ids: tuple[int, ...], size: int) -> list[bytes]:
    hashes = [root_hash("")]
    for start in range(0, len(token_ids) - size + 1, size):
        hashes.append(block_hash(hashes[-1], token_ids[start : start + size]))
    return hashes[1:]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_drawn_from_their_seed_alone(name: str) -> None:
    trace = make_workload(name, seed=5)
    assert trace == make_workload(name, seed=5)
    arrivals = [ask.arrival_s for ask in trace.asks]
    assert arrivals == sorted(arrivals)
    assert min(ask.prompt_tokens for ask in trace.asks) > 0
    assert make_workload(name, rows=7, seed=5).asks == trace.asks[:7]


def test_bimodal_prompts_are_long_for_one_in_twenty() -> None:
    asks = make_workload("bimodal").asks
    long = [ask for ask in asks if ask.prompt_tokens >= 60_000]
    assert 0.04 < len(long) / len(asks) < 0.06
    assert all(ask.prompt_tokens < 600 for ask in asks if ask not in long)
