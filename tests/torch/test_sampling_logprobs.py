"""Logprobs against a plain log_softmax, and against transformers on the demo model."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dpkit.engine.models.torch.attention.base import CacheKind
from dpkit.engine.models.torch.batch import build_tensors
from dpkit.messages import Batch, BatchRow, EngineOutput, GenerateRequest, TokenLogprob
from dpkit.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.engine.models.torch.model import TorchModel

    from .conftest import Engine

_random = random.Random(5)
PROMPTS = [[_random.randrange(3, 263) for _ in range(length)] for length in (1, 2, 33, 50)]
STORY = "Once upon a time, in a village by the sea, there lived a clockmaker who"


def own_logprobs(model: TorchModel, ids: list[int]) -> torch.Tensor:
    """Of what follows each of `ids`: the transformer's scores in one piece, and log_softmax."""
    row = BatchRow(
        request_id="r",
        prompt_token_ids=(*ids, 0),
        sampling=SamplingParams(),
        token_ids=ids,
        start=0,
        block_ids=range(9),
        output_index=None,
        scored=range(1, len(ids) + 1),
    )
    with torch.inference_mode():
        cache = model.allocate(num_blocks=9, block_size=16)
        return model._transformer(
            build_tensors(Batch(rows=(row,)), CacheKind(block_size=16)), cache
        ).log_softmax(-1)


def run(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[EngineOutput]:
    """One output a prompt, all that came of it put together."""
    for number, prompt in enumerate(prompts):
        engine.core.add(
            GenerateRequest(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(ignore_eos=True, **sampling),
            )
        )
    pieces: list[list[EngineOutput]] = [[] for _ in prompts]
    while engine.core.has_requests():
        for output in engine.core.step(engine.cache):
            assert output.error is None
            pieces[int(output.request_id)].append(output)
    return [
        EngineOutput(
            request_id=str(number),
            token_ids=tuple(token for piece in each for token in piece.token_ids),
            logprobs=tuple(told for piece in each for told in piece.logprobs),
            prompt_logprobs=each[0].prompt_logprobs,
        )
        for number, each in enumerate(pieces)
    ]


def check(told: TokenLogprob, expected: torch.Tensor, token_id: int, top: int) -> None:
    assert told.token_id == token_id
    assert told.logprob == pytest.approx(expected[token_id].item(), abs=1e-3)
    best = expected.topk(top)
    assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert all(expected[i].item() == pytest.approx(v, abs=1e-3) for i, v in told.top)
    # Places among scores that are equal to rounding may be exchanged.
    better = (expected > expected[token_id] + 1e-3).sum().item()
    not_worse = (expected > expected[token_id] - 1e-3).sum().item()
    assert 1 + better <= told.rank <= max(1, not_worse)


LIMITS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    {"block_size": 4, "num_blocks": 30},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("temperature", "top"), [(0.0, 0), (0.0, 5), (1.0, 2)])
def test_they_are_the_log_softmax_of_the_transformers_scores(
    tiny_model: TorchModel, make_engine, limits: dict[str, Any], temperature: float, top: int
) -> None:
    outputs = run(
        make_engine(tiny_model, **limits),
        PROMPTS,
        max_tokens=6,
        temperature=temperature,
        seed=3,
        logprobs=top,
        prompt_logprobs=top,
        frequency_penalty=0.5,
        logit_bias={9: 5.0},
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.token_ids]
        expected = own_logprobs(tiny_model, ids)
        told = [*output.prompt_logprobs, *output.logprobs]
        assert len(output.prompt_logprobs) == len(prompt) - 1
        assert len(told) == len(ids) - 1
        for place, each in enumerate(told, start=1):
            check(each, expected[place - 1], ids[place], top)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 16])
def test_prompt_logprobs_are_equal_whatever_the_chunks(
    tiny_model, make_engine, max_num_batched_tokens: int
) -> None:
    asked: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 3}
    whole = run(make_engine(tiny_model), PROMPTS, **asked)
    engine = make_engine(tiny_model, max_num_batched_tokens=max_num_batched_tokens)
    for _ in range(2):  # from the cache, the second time, nothing can be told
        chunked = run(engine, PROMPTS, **asked)
        for one, other in zip(whole, chunked, strict=True):
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
            for told, same in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
                assert told.token_id == same.token_id
                assert told.logprob == pytest.approx(same.logprob, abs=1e-4)


def test_asking_changes_no_token(tiny_model, make_engine) -> None:
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 8}
    silent = run(make_engine(tiny_model), PROMPTS, **sampling)
    asked = run(make_engine(tiny_model), PROMPTS, logprobs=3, prompt_logprobs=3, **sampling)
    assert [o.token_ids for o in silent] == [o.token_ids for o in asked]
    assert all(output.logprobs == output.prompt_logprobs == () for output in silent)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_agrees(demo_model, demo_path: Path, make_engine, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would be a leak
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32)
    prompt = demo_model.tokenizer().encode(STORY)
    [output] = run(make_engine(demo_model), [prompt], max_tokens=24, logprobs=5, prompt_logprobs=5)
    ids = [*prompt, *output.token_ids]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    told = [*output.prompt_logprobs, *output.logprobs]
    for place, each in enumerate(told, start=1):
        check(each, expected[place - 1], ids[place], 5)
    with torch.inference_mode():
        generated = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            repetition_penalty=1.3,
        )[0, len(prompt) :].tolist()
    penalised = SamplingParams(max_tokens=32, min_tokens=32, repetition_penalty=1.3)
    assert make_engine(demo_model).answer({"r": (prompt, penalised)})["r"] == generated
