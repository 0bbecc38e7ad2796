"""Randomness that is looked up: the same numbers everywhere, and good ones."""

from __future__ import annotations

import math

import pytest
import torch

from dpkit.engine.models.torch.noise import gumbel, stream_at, streams_at

# The first outputs of SplitMix64 for this seed, as published with the generator.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_the_numbers_are_splitmix64s() -> None:
    assert [stream_at(1234567, position) % 2**64 for position in range(5)] == PUBLISHED


def test_tensors_and_ints_agree() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    positions = [0, 1, 49_151]
    table = streams_at(torch.tensor(seeds)[:, None], torch.tensor(positions)[None])
    assert table.tolist() == [[stream_at(s, p) for p in positions] for s in seeds]


def test_any_int_is_a_seed() -> None:
    assert stream_at(2**64 + 5, 0) == stream_at(5, 0)
    assert stream_at(-1, 0) == stream_at(2**64 - 1, 0)


def test_noise_is_finite_and_distributed_as_gumbel_has_it() -> None:
    noise = gumbel(torch.tensor([[stream_at(3, 1)]]), torch.arange(1_000_000)[None])
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.005)


def test_neighbouring_outputs_and_seeds_share_nothing() -> None:
    keys = torch.tensor([stream_at(seed, index) for seed in (0, 1) for index in (0, 1)])
    noise = gumbel(keys[:, None], torch.arange(100_000)[None])
    correlations = torch.corrcoef(noise) - torch.eye(4)
    assert correlations.abs().max().item() < 0.02
