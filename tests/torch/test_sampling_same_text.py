"""Penalties, bias, bans and min-p look at a request's own past only: company changes nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.sampling import SamplingParams

if TYPE_CHECKING:
    from dpkit.engine.models.torch.model import TorchModel

_random = random.Random(11)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7, "temperature": 1.0},
    "presence": {"presence_penalty": 1.5, "temperature": 0.7, "top_k": 40},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
    "bias": {"logit_bias": {5: 2.0, 9: -100.0}, "temperature": 1.0},
    "min-tokens": {"min_tokens": 20, "stop_token_ids": range(3, 200), "temperature": 1.0},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "logit_bias": {7: 1.0},
        "min_p": 0.02,
        "top_p": 0.95,
        "top_k": 100,
        "temperature": 1.2,
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
}

ASKED = {
    f"{name}-{length}": (
        [_random.randrange(3, 263) for _ in range(length)],
        SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "seed": length} | sampling)),
    )
    for name, sampling in SAMPLINGS.items()
    for length in (1, 23)
}


@pytest.fixture(scope="module")
def alone(tiny_model: TorchModel, make_engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    for request_id, request in ASKED.items():
        answers |= make_engine(tiny_model, prefix_cache=False).answer({request_id: request})
    return answers


def test_each_of_them_changes_the_answer(tiny_model, make_engine, alone) -> None:
    plain = {
        request_id: (
            prompt,
            SamplingParams(
                max_tokens=24, ignore_eos=True, seed=of.seed, temperature=of.temperature
            ),
        )
        for request_id, (prompt, of) in ASKED.items()
    }
    answers = make_engine(tiny_model).answer(plain)
    for name in SAMPLINGS:
        assert any(answers[f"{name}-{length}"] != alone[f"{name}-{length}"] for length in (1, 23))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"block_size": 4, "num_blocks": 40},
    ],
    ids=str,
)
def test_company_chunks_blocks_and_preemption_change_nothing(
    tiny_model, make_engine, alone, limits: dict[str, Any]
) -> None:
    engine = make_engine(tiny_model, **limits)
    assert engine.answer(ASKED) == alone
    assert engine.answer(ASKED) == alone  # from cached prefixes
    assert (engine.core.statistics().preemptions > 0) == ("num_blocks" in limits)


def test_no_text_ends_before_its_least_length_nor_says_what_would_end_it(alone) -> None:
    for length in (1, 23):
        answer = alone[f"min-tokens-{length}"]
        assert 20 < len(answer) <= 24
        assert not set(answer[:20]) & set(range(3, 200))


def test_a_penalised_text_repeats_itself_less(tiny_model, make_engine) -> None:
    prompt = [5, 9, 200]
    asked = {
        "plain": (prompt, SamplingParams(max_tokens=60, ignore_eos=True)),
        "penalised": (
            prompt,
            SamplingParams(max_tokens=60, ignore_eos=True, frequency_penalty=2.0),
        ),
    }
    answers = make_engine(tiny_model).answer(asked)
    assert len(set(answers["penalised"])) > len(set(answers["plain"]))
