"""The sampler against plain references: full sorts in float64, and exact shares."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpkit.engine.models.torch.noise import gumbel
from dpkit.engine.models.torch.sampler import Draw, sample
from dpkit.messages import SamplingParams


def draw(index: int = 0, **sampling: Any) -> Draw:
    return Draw(SamplingParams(**sampling), index)


def shares(scores: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probability of each token, by the book: a full sort in float64."""
    ranked, tokens = (scores.double() / sampling.temperature).sort(descending=True)
    if sampling.top_k:
        ranked[sampling.top_k :] = -torch.inf
    if sampling.min_p:
        ranked[ranked < ranked[0] + torch.tensor(sampling.min_p).double().log()] = -torch.inf
    probabilities = ranked.softmax(-1)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= sampling.top_p] = 0.0
        probabilities /= probabilities.sum()
    return torch.zeros_like(probabilities).scatter(0, tokens, probabilities)


def random_scores(seed: int, rows: int, vocabulary: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


@given(
    st.integers(0, 999),
    st.sampled_from([1, 5, 300, 3000]),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 20, 255, 256, 257, 1000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.6, 1.0]),
)
@example(0, 3000, 0.1, 0.3, 257, 0.01, 0.0)  # the share is of the best 257, not of all
@example(0, 3000, 0.1, 0.3, 0, 0.01, 0.3)  # nor when min-p keeps more than are looked at first
@settings(max_examples=200, deadline=None)
def test_the_winner_is_the_best_runner_of_those_the_book_keeps(
    seed: int,
    vocabulary: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    scores = random_scores(seed, 1, vocabulary, spread)
    chosen = draw(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    [token] = sample(scores, [chosen])
    if temperature == 0.0:
        assert token == scores[0].argmax()
        return
    noise = gumbel(torch.tensor([[chosen.key]]), torch.arange(vocabulary)[None])[0]
    runs = scores[0].double() / temperature + noise
    # float32 may decide a tie of a filter or of the race otherwise: there, and only there.
    kept = shares(scores[0], nudged(chosen.sampling, 1 + 1e-5)) > 0
    rivals = shares(scores[0], nudged(chosen.sampling, 1 - 1e-5)) > 0
    assert kept[token]
    assert runs[token] >= runs[rivals].max() - 1e-4


def nudged(sampling: SamplingParams, factor: float) -> SamplingParams:
    """With filters that keep a trifle more, or less."""
    top_p, min_p = sampling.top_p * factor, sampling.min_p / factor
    if sampling.top_p == 1.0:
        top_p = 1.0
    return evolve(sampling, top_p=min(top_p, 1.0), min_p=min(min_p, 1.0))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 2.0, "min_p": 0.1, "top_p": 0.9},
    ],
)
def test_tokens_come_as_often_as_their_share_says(sampling: dict[str, Any]) -> None:
    scores = random_scores(1, 1, 12, 1.5)
    rows = 20_000
    drawn = sample(scores.expand(rows, -1), [draw(i, seed=9, **sampling) for i in range(rows)])
    counts = Counter(drawn)
    expected = shares(scores[0], SamplingParams(**sampling)) * rows
    assert all(expected[token] > 0 for token in counts)
    kept = [token for token in range(12) if expected[token] > 0]
    chi_square = sum((counts[t] - expected[t].item()) ** 2 / expected[t].item() for t in kept)
    # One in a million by chance alone; the draws are looked up, so it is the same each time.
    assert chi_square < 55


def test_neither_company_nor_place_in_the_batch_changes_a_token() -> None:
    scores = random_scores(2, 60, 1000, 2.0)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 10},
        {"temperature": 3.0, "top_p": 0.95},
    ]
    draws = [draw(i, seed=i, **kinds[i % 4]) for i in range(60)]
    together = sample(scores, draws)
    assert together == [sample(scores[i : i + 1], [draws[i]])[0] for i in range(60)]
    assert together == sample(scores.flip(0), draws[::-1])[::-1]


def test_a_filter_that_keeps_the_winner_does_not_change_it() -> None:
    scores = random_scores(3, 200, 400, 3.0)
    free = sample(scores, [draw(i, temperature=1.0, seed=5) for i in range(200)])
    filtered = sample(scores, [draw(i, temperature=1.0, seed=5, top_k=40) for i in range(200)])
    best = scores.topk(40).indices.tolist()
    kept = [i for i in range(200) if free[i] in best[i]]
    assert 100 < len(kept) < 200
    assert all(filtered[i] == free[i] for i in kept)


def test_equals_of_the_last_one_kept_are_kept_too() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0, -9.0]])
    draws = [draw(i, temperature=1.0, top_k=2, seed=1) for i in range(300)]
    assert set(sample(scores.expand(300, -1), draws)) == {0, 1, 2, 3}


def test_nearly_no_temperature_is_greedy() -> None:
    scores = random_scores(4, 1, 100, 1.0)
    assert sample(scores, [draw(temperature=1e-9, seed=1)]) == [scores.argmax()]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 5), []) == []
