"""Penalties, bias and bans against a plain reference in float64, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkit.engine.models.torch.adjust import adjust
from dpkit.engine.models.torch.result import make_result
from dpkit.messages import Batch, BatchRow
from dpkit.sampling import SamplingParams

VOCABULARY = 12
TOKENS = st.integers(0, VOCABULARY - 1)


def row(
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **sampling: Any,
) -> BatchRow:
    return BatchRow(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        token_ids=(0,),
        start=0,
        block_ids=(0,),
        output_index=len(output),
        output_token_ids=output,
        banned_token_ids=banned,
    )


def by_the_book(scores: list[float], of: BatchRow) -> list[float]:
    """Formulas and order as vLLM documents them."""
    sampling, prompt, output = of.sampling, of.prompt_token_ids, of.output_token_ids
    adjusted = []
    for token_id, score in enumerate(scores):
        if token_id in of.banned_token_ids:
            score = -float("inf")  # noqa: PLW2901 - one token's score on its way
        score += dict(sampling.logit_bias).get(token_id, 0.0)  # noqa: PLW2901
        if token_id in prompt or token_id in output:
            factor = sampling.repetition_penalty
            score = score / factor if score > 0 else score * factor  # noqa: PLW2901
        count = list(output).count(token_id)
        score -= sampling.frequency_penalty * count  # noqa: PLW2901
        score -= sampling.presence_penalty * (count > 0)  # noqa: PLW2901
        adjusted.append(score)
    return adjusted


ROWS = st.builds(
    row,
    prompt=st.lists(TOKENS, min_size=1, max_size=6).map(tuple),
    output=st.lists(TOKENS, max_size=8).map(tuple),
    banned=st.lists(TOKENS, max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.4]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
)


@given(st.lists(ROWS, max_size=4), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_scores_are_those_of_the_book(rows: list[BatchRow], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(rows), VOCABULARY, generator=generator) * 4
    expected = [by_the_book(s.tolist(), r) for s, r in zip(scores, rows, strict=True)]
    adjust(scores, rows)
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(len(rows), VOCABULARY)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-4, rtol=1e-5)


def test_rows_that_want_nothing_are_not_touched() -> None:
    scores = torch.randn(2, VOCABULARY)
    before = scores.clone()
    adjust(scores, [row(output=(1, 1)), row(output=(1, 1), frequency_penalty=1.0)])
    assert torch.equal(scores[0], before[0])
    assert not torch.equal(scores[1], before[1])


@pytest.mark.parametrize(
    ("sampling", "chosen"),
    [
        ({}, 3),
        ({"banned": (3,)}, 5),
        ({"banned": (3, 5)}, 7),
        ({"logit_bias": {3: -100}}, 5),
        ({"logit_bias": {0: 100}}, 0),
        ({"prompt": (3,), "repetition_penalty": 2.0}, 5),
        ({"output": (3,), "repetition_penalty": 2.0}, 5),
        ({"prompt": (3,), "presence_penalty": 2.0}, 3),  # of the output only
        ({"output": (3,), "presence_penalty": 2.0}, 5),
        ({"output": (3,), "frequency_penalty": 0.6}, 3),
        ({"output": (3, 3), "frequency_penalty": 0.6}, 5),
        ({"output": (5, 5), "frequency_penalty": -0.6}, 5),
    ],
)
def test_greedy_requests_are_adjusted_too(sampling: dict[str, Any], chosen: int) -> None:
    scores = torch.zeros(1, VOCABULARY)
    scores[0, [3, 5, 7]] = torch.tensor([4.0, 3.0, 2.5])
    result = make_result(Batch(rows=(row(**sampling),)), scores)
    assert list(result.sampled) == [chosen]


def test_a_request_may_ban_all_tokens_and_still_gets_one() -> None:
    of = row(banned=tuple(range(VOCABULARY)), temperature=1.0, top_p=0.5, min_p=0.1)
    [token_id] = make_result(Batch(rows=(of,)), torch.randn(1, VOCABULARY)).sampled
    assert token_id in range(VOCABULARY)


def test_logprobs_are_the_models_own_whatever_is_adjusted() -> None:
    scores = torch.randn(1, VOCABULARY)
    expected = scores[0].log_softmax(-1)
    of = row(logit_bias={4: 100}, banned=(1,), temperature=2.0, logprobs=VOCABULARY)
    told = make_result(Batch(rows=(of,)), scores).logprobs[0]
    assert told.token_id == 4
    assert told.logprob == pytest.approx(expected[4].item())
    assert dict(told.top) == pytest.approx(dict(enumerate(expected.tolist())))
    assert told.rank == 1 + sum(value > expected[4] for value in expected)
