"""The transformer against a naive one: float64, one request, no cache, a loop where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dpkit.checkpoint import read_checkpoint
from dpkit.engine.models.torch.architecture import read_architecture
from dpkit.engine.models.torch.attention.base import CacheKind
from dpkit.engine.models.torch.batch import build_tensors
from dpkit.engine.models.torch.transformer import Transformer
from dpkit.engine.models.torch.weights import Weights
from dpkit.messages import Batch, BatchRow, SamplingParams
from dpkit.testing.tiny import write_tiny_directory

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from dpkit.checkpoint import Checkpoint

BLOCK_SIZE = 4


def naive_scores(checkpoint: Checkpoint, ids: list[int]) -> NDArray[np.float64]:
    """Scores of what follows each token."""
    config = checkpoint.config
    epsilon = config["rms_norm_eps"]
    size, group = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]

    def read(name: str) -> NDArray[np.float64]:
        return checkpoint.tensors.read(f"model.{name}.weight").astype(np.float64)

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        length: NDArray[np.float64] = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return x / length * read(name)

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        bias = f"model.{name}.bias"
        has_one = bias in checkpoint.tensors.shapes()
        return x @ read(name).T + (checkpoint.tensors.read(bias) if has_one else 0.0)

    def heads(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return linear(x, name).reshape(len(ids), -1, size).swapaxes(0, 1)

    def rotate(x: NDArray[np.float64]) -> NDArray[np.float64]:
        turns = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
        if (rope := config.get("rope_scaling")) is not None:
            turns = [slowed_for_long_texts(turn, rope) for turn in turns]
        wheel = np.exp(1j * np.arange(len(ids))[:, None] * turns)
        turned = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * wheel
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = read("embed_tokens")[ids]
    for layer in (f"layers.{i}" for i in range(config["num_hidden_layers"])):
        y = norm(x, f"{layer}.input_layernorm")
        queries = heads(y, f"{layer}.self_attn.q_proj")
        keys = heads(y, f"{layer}.self_attn.k_proj")
        if config["model_type"] == "qwen3":
            queries = norm(queries, f"{layer}.self_attn.q_norm")
            keys = norm(keys, f"{layer}.self_attn.k_norm")
        queries, keys = rotate(queries), rotate(keys)
        values = heads(y, f"{layer}.self_attn.v_proj")
        attended = []
        for head, query in enumerate(queries):
            weights = query @ keys[head // group].T / np.sqrt(size)
            weights[np.triu_indices(len(ids), 1)] = -np.inf
            weights = np.exp(weights - weights.max(-1, keepdims=True))
            attended.append(weights / weights.sum(-1, keepdims=True) @ values[head // group])
        x = x + linear(np.concatenate(attended, axis=-1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = linear(y, f"{layer}.mlp.gate_proj"), linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")
    final = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    scores: NDArray[np.float64] = norm(x, "norm") @ checkpoint.tensors.read(final).T
    return scores


def slowed_for_long_texts(turn: Any, rope: dict[str, Any]) -> Any:
    """As Meta's own code for Llama 3.1 does it: `apply_scaling`."""
    old = rope["original_max_position_embeddings"]
    wavelength = 2 * np.pi / turn
    if wavelength < old / rope["high_freq_factor"]:
        return turn
    if wavelength > old / rope["low_freq_factor"]:
        return turn / rope["factor"]
    smooth = (old / wavelength - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    return (1 - smooth) * turn / rope["factor"] + smooth * turn


def row(ids: list[int], start: int, end: int, blocks: list[int]) -> BatchRow:
    return BatchRow(
        request_id="r",
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(),
        token_ids=ids[start:end],
        start=start,
        block_ids=blocks,
        output_index=0,
    )


# The file's text is 11 tokens long: all three ranges of wavelengths are there.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False},
    {"num_attention_heads": 6, "num_key_value_heads": 2},
    {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
    {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_theta": 1e6},
    {"rope_scaling": LLAMA3_ROPE},
    {"attention_bias": True, "mlp_bias": True},
    {"architectures": ["MistralForCausalLM"], "head_dim": 32},
    {"architectures": ["Qwen2ForCausalLM"]},
    {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_are_those_of_the_naive_transformer(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Two requests: whole prompts, then chunks on top of what is cached, then decodes."""
    first = [5, 9, 200, 3, 17, 44, 8, 101, 262, 60, 7]
    second = [30, 31, 32, 5, 9]
    first_blocks, second_blocks = [7, 2, 5], [0, 6]  # scattered on purpose
    checkpoint = read_checkpoint(write_tiny_directory(tmp_path / "tiny", **shape))
    architecture = read_architecture(checkpoint.path, checkpoint.config)
    transformer = Transformer(architecture, Weights(checkpoint))
    cache = torch.zeros(
        architecture.num_layers, 2, 8, BLOCK_SIZE, architecture.num_kv_heads, architecture.head_dim
    )
    expected = [naive_scores(checkpoint, first), naive_scores(checkpoint, second)]
    steps = [
        ((0, 6), (0, 2)),  # the beginnings
        ((6, 9), (2, 4)),  # a chunk of each
        ((9, 10), (4, 5)),  # one token of each
        ((10, 11), None),
    ]
    for spans in steps:
        rows = [
            row(ids, *span, blocks)
            for ids, blocks, span in zip(
                (first, second), (first_blocks, second_blocks), spans, strict=True
            )
            if span is not None
        ]
        scores = transformer(
            build_tensors(Batch(rows=tuple(rows)), CacheKind(block_size=BLOCK_SIZE)), cache
        )
        for got, wanted, span in zip(scores, expected, filter(None, spans), strict=False):
            np.testing.assert_allclose(got, wanted[span[1] - 1], atol=2e-4)


def test_only_rows_that_sample_are_scored() -> None:
    ids = [1, 2, 3]
    whole = row(ids, 0, 3, [1])
    part = BatchRow(
        request_id="p",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(),
        token_ids=ids[:2],
        start=0,
        block_ids=[2],
        output_index=None,
    )
    step = build_tensors(Batch(rows=(part, whole)), CacheKind(block_size=BLOCK_SIZE))
    assert step.sampled.tolist() == [4]
    assert (
        build_tensors(Batch(rows=(part,)), CacheKind(block_size=BLOCK_SIZE)).sampled.tolist() == []
    )
