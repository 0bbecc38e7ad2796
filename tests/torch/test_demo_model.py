"""The demo model says what it should. Needs the fetched files; skipped loudly without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dpkit.messages import SamplingParams
from tests.torch.lab import scores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dpkit.engine.models.torch.model import TorchModel

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a village by the sea, there lived a clockmaker who"


def text_of(model: TorchModel, ids: Sequence[int]) -> str:
    decoder = model.tokenizer().decoder()
    return "".join(decoder.feed([token_id]) for token_id in ids) + decoder.finish()


def test_the_capital_of_france_is_paris(demo_model, make_engine) -> None:
    tokenizer = demo_model.tokenizer()
    sampling = SamplingParams(max_tokens=16)
    answers = make_engine(demo_model).answer(
        {
            "raw": (tokenizer.encode("The capital of France is"), sampling),
            "chat": (tokenizer.encode_chat(QUESTION), sampling),
        }
    )
    assert text_of(demo_model, answers["raw"]).startswith(" Paris")
    assert text_of(demo_model, answers["chat"]) == "The capital of France is Paris."
    assert answers["chat"][-1] in demo_model.spec.eos_token_ids


def test_the_original_file_and_the_directory_give_the_same_scores(
    demo_model, demo_path: Path, load
) -> None:
    original = load(next(demo_path.glob("*.gguf")))
    ids = demo_model.tokenizer().encode(STORY)
    assert original.tokenizer().encode(STORY) == ids
    assert torch.equal(scores(original, ids), scores(demo_model, ids))


def requests(model: TorchModel) -> dict[str, tuple[Sequence[int], SamplingParams]]:
    tokenizer = model.tokenizer()
    story, question = tokenizer.encode(STORY), tokenizer.encode_chat(QUESTION)
    return {
        "greedy": (story, SamplingParams(max_tokens=24)),
        "warm": (story, SamplingParams(max_tokens=24, temperature=1.0, seed=11)),
        "top-p": (question, SamplingParams(max_tokens=24, temperature=1.2, top_p=0.9, seed=12)),
        "top-k": (question, SamplingParams(max_tokens=24, temperature=1.2, top_k=40, seed=13)),
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_company_chunks_blocks_and_preemption_do_not_change_its_text(
    demo_model, make_engine
) -> None:
    asked = requests(demo_model)
    alone: dict[str, list[int]] = {}
    for request_id, request in asked.items():
        alone |= make_engine(demo_model, prefix_cache=False).answer({request_id: request})
    cramped: dict[str, Any] = {"block_size": 4, "num_blocks": 27, "max_num_batched_tokens": 8}
    for limits in ({}, cramped, {"block_size": 1, "num_blocks": 512}):
        engine = make_engine(demo_model, **limits)
        assert engine.answer(asked) == alone
        assert (engine.core.statistics().preemptions > 0) == (limits is cramped)
        assert engine.answer(asked) == alone  # from cached prefixes


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_agrees(demo_model, demo_path: Path, make_engine, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would be a leak
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32)
    ids = demo_model.tokenizer().encode(STORY)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
        assert (scores(demo_model, ids) - expected).abs().max().item() < 1e-3
        generated = reference.generate(
            torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False
        )[0, len(ids) :].tolist()
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    assert make_engine(demo_model).answer({"r": (ids, sampling)})["r"] == generated


@pytest.mark.slow
def test_the_gguf_package_agrees(demo_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    from dpkit.checkpoint.gguf import GgufFile  # noqa: PLC0415 - of this comparison only

    path = next(demo_path.glob("*.gguf"))
    own = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(own.read(tensor.name), expected), tensor.name
