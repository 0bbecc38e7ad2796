"""Translates a GGUF file into what the same model would be as a Hugging Face directory.

One translation serves the loader and `dpkit fetch`: names, configuration and the row order of the
attention weights; the tokenizer is `gguf_tokenizer`'s. Refuses architectures that it does not know
by name.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkit.checkpoint.checkpoint import Checkpoint
from dpkit.checkpoint.gguf import GgufFile
from dpkit.checkpoint.gguf_tokenizer import tokenizer_json
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dpkit.checkpoint.fields import Fields

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",  # Mistral's files say so too
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Tokens that end a turn or a text whatever `eos_token_id` says, as llama.cpp has it: a file can
# name one only, and an instruct model that merely continues a text ends it with the other.
_ENDS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>"}

# What divides each rotary frequency (Llama 3's scaling, worked out): in a tensor, not in metadata.
_DIVISORS = "rope_freqs.weight"


def read_gguf(path: Path) -> Checkpoint:
    """Read a `.gguf` file.

    Raises:
        ModelUnsupported: another architecture, tokenizer or tensor type; names it.
    """
    file = GgufFile(path)
    metadata = file.fields
    tokens = metadata.strings("tokenizer.ggml.tokens")
    named = {role: _special_token(metadata, role, len(tokens)) for role in ("bos", "eos")}
    template = "tokenizer.chat_template"
    config = _config(metadata, file)
    return Checkpoint(
        path=path,
        config=config,
        eos_token_ids=_eos_token_ids(tokens, named["eos"]),
        tokenizer_json=json.dumps(tokenizer_json(metadata), ensure_ascii=False),
        chat_template=metadata.string(template) if metadata.has(template) else None,
        special_tokens={
            f"{role}_token": tokens[token_id]
            for role, token_id in named.items()
            if token_id is not None
        },
        tensors=_Tensors(file, config),
    )


def _special_token(metadata: Fields, role: str, vocabulary: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    return metadata.token_id(key, vocabulary=vocabulary) if metadata.has(key) else None


def _config(metadata: Fields, file: GgufFile) -> dict[str, Any]:
    """The file's metadata in the words of config.json."""
    name = metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        read = ", ".join(map(repr, ARCHITECTURES))
        raise ModelUnsupported(f"{metadata.where}: architecture {name!r}; read are {read}")
    heads = metadata.whole(f"{name}.attention.head_count")
    hidden = metadata.whole(f"{name}.embedding_length", least=heads)
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": len(metadata.strings("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": metadata.whole(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.whole(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole(f"{name}.attention.head_count_kv", default=heads),
        "head_dim": metadata.whole(f"{name}.attention.key_length", default=hidden // heads),
        "max_position_embeddings": metadata.whole(f"{name}.context_length"),
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        **_rope(metadata, name, file),
        "sliding_window": metadata.values.get(f"{name}.attention.sliding_window"),
        # Qwen 2 has three of the four, of itself.
        "attention_bias": "blk.0.attn_output.bias" in file.entries,
        "mlp_bias": "blk.0.ffn_down.bias" in file.entries,
        "tie_word_embeddings": "output.weight" not in file.entries,
        "bos_token_id": metadata.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.values.get("tokenizer.ggml.eos_token_id"),
    }


def _rope(metadata: Fields, name: str, file: GgufFile) -> dict[str, Any]:
    if (scaling := metadata.string(f"{name}.rope.scaling.type", default="none")) != "none":
        raise ModelUnsupported(f"{metadata.where}: rope scaling {scaling!r} is not supported")
    rope: dict[str, Any] = {"rope_theta": metadata.number(f"{name}.rope.freq_base", default=1e4)}
    if _DIVISORS in file.entries:
        divisors = file.read(_DIVISORS).tolist()
        rope["rope_scaling"] = {"rope_type": "divisors", "divisors": divisors}
    return rope


def _eos_token_ids(tokens: Sequence[str], named: int | None) -> frozenset[int]:
    ends = {token_id for token_id, token in enumerate(tokens) if token in _ENDS}
    return frozenset(ends if named is None else ends | {named})


class _Tensors:
    """The file's tensors under Hugging Face's names and in its row order; a `TensorSource`."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._stored = {_hf_name(name): name for name in file.entries if name != _DIVISORS}
        self._paired = {}  # heads of what rotates in pairs
        if config["model_type"] == "llama":
            self._paired = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: self._file.entries[stored].shape for name, stored in self._stored.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        tensor = self._file.read(self._stored[name])
        heads = self._paired.get(name.split(".")[-2])
        return tensor if heads is None else _halves_from_pairs(tensor, heads)


def _halves_from_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Llama GGUF files rotate rows (2i, 2i + 1) of a head together, Hugging Face (i, i + d/2)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    if (layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name)) is not None:
        number, part, kind = layer.groups()
        return f"model.layers.{number}.{TENSOR_NAMES.get(part, part)}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{TENSOR_NAMES.get(part, part)}.{kind}"
