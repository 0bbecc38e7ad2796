"""Scores and text are those of `transformers`: every family, both formats, and what we lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from dpkit.checkpoint import read_checkpoint
from dpkit.engine.models.torch.architecture import read_architecture
from dpkit.errors import ModelUnsupported
from dpkit.messages import SamplingParams
from dpkit.testing.tiny import write_tiny_directory, write_tiny_gguf
from tests.torch.lab import scores

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.engine.models.torch.model import TorchModel

transformers = pytest.importorskip("transformers", reason="NOT COMPARED: pip install 'dpkit[hf]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers' own

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-3 rope": {"rope_scaling": LLAMA3_ROPE, "num_key_value_heads": 1},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 32, "sliding_window": 128},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}

PROMPT = [5, 9, 200, 3, 17, 44, 8, 101, 262, 60, 7, 30, 31]


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Untied, because a tied random model says one token for ever."""
    return {"tie_word_embeddings": False, **FAMILIES[request.param]}


def reference(path: Path, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Scores after each of `ids`, and the 64 tokens that follow."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
        text = model.generate(
            torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False
        )
    return expected, text[0, len(ids) :].tolist()


def answer(model: TorchModel, make_engine, **limits: Any) -> list[int]:
    # Tokens that end a text have no chance in the reference, which is told a least length.
    sampling = SamplingParams(max_tokens=64, min_tokens=64)
    tokens: list[int] = make_engine(model, **limits).answer({"r": (PROMPT, sampling)})["r"]
    return tokens


def test_a_directory_gives_its_scores_and_its_text(config, tmp_path, load, make_engine) -> None:
    folder = write_tiny_directory(tmp_path / "tiny", **config)
    expected, text = reference(folder, PROMPT)
    model = load(folder)
    assert (scores(model, PROMPT) - expected).abs().max().item() < 1e-3
    assert answer(model, make_engine) == text
    assert answer(model, make_engine, max_num_batched_tokens=5, block_size=4) == text
    assert len(set(text)) > 5


def test_a_gguf_file_gives_the_same_scores(config, tmp_path, load) -> None:
    folder = write_tiny_directory(tmp_path / "tiny", **config)
    expected = scores(load(folder), PROMPT)
    if "rope_scaling" in config:  # in GGUF, it comes worked out
        architecture = read_architecture(folder, read_checkpoint(folder).config)
        divisors = list(architecture.rope_divisors)
        config = config | {"rope_scaling": {"rope_type": "divisors", "divisors": divisors}}
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", **config))
    assert (scores(model, PROMPT) - expected).abs().max().item() < 1e-5


OTHERS: dict[str, dict[str, Any]] = {
    "Olmo2Config": {},
    "Phi3Config": {"pad_token_id": 0},
    "MixtralConfig": {"num_local_experts": 4},
    "Gemma2Config": {"head_dim": 16, "sliding_window": 128, "attn_logit_softcapping": None},
}


def write_other(folder: Path, name: str, **options: Any) -> Path:
    """A random model of an architecture that is not ours, with a tiny model's tokenizer."""
    config = getattr(transformers, name)(
        vocab_size=263,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    write_tiny_directory(folder)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_an_architecture_that_is_not_ours_gives_its_text(
    name: str, tmp_path: Path, load, make_engine
) -> None:
    folder = write_other(tmp_path / "other", name, **OTHERS[name])
    expected, text = reference(folder, PROMPT)
    model = load(folder)
    assert (scores(model, PROMPT) - expected).abs().max().item() < 1e-3
    assert answer(model, make_engine) == text
    assert answer(model, make_engine, max_num_batched_tokens=5, block_size=4) == text
    assert len(set(text)) > 5


def test_an_attention_that_is_not_ours_is_refused(tmp_path: Path, load) -> None:
    folder = write_other(tmp_path / "other", "Gemma2Config", head_dim=16)
    message = "architecture Gemma2ForCausalLM needs attn_logit_softcapping, which is not supported"
    with pytest.raises(ModelUnsupported, match=message):
        load(folder)


def test_what_transformers_does_not_know_is_refused(tmp_path: Path, load) -> None:
    folder = write_tiny_directory(tmp_path / "tiny")
    text = (folder / "config.json").read_text()
    text = text.replace("LlamaForCausalLM", "NoSuchModel").replace('"llama"', '"no-such-model"')
    (folder / "config.json").write_text(text)
    with pytest.raises(
        ModelUnsupported, match="NoSuchModel: transformers cannot load it: ValueError: The"
    ):
        load(folder)


def test_int4_is_for_our_own(tmp_path: Path, load) -> None:
    folder = write_other(tmp_path / "other", "Olmo2Config")
    with pytest.raises(ModelUnsupported, match="quant = 'int4' is for dpkit's own architectures"):
        load(folder, dtype="auto", quant="int4")
