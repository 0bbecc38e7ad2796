"""Translates a GGUF file into what the same model would be as a Hugging Face directory.

One translation serves the loader and `dpkit fetch`: names, configuration, tokenizer, and the row
order of the attention weights. Knows the llama architecture with a byte-level BPE tokenizer;
refuses any other by name.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dpkit.checkpoint.checkpoint import Checkpoint
from dpkit.checkpoint.gguf import GgufFile
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Tokens that end a turn or a text whatever `eos_token_id` says, as llama.cpp has it: a file can
# name one only, and an instruct model that merely continues a text ends it with the other.
_ENDS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>"}

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_PRE_TOKENIZERS: Mapping[str, Any] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {**_BYTE_LEVEL, "use_regex": True},
        ],
    },
    "gpt-2": {**_BYTE_LEVEL, "use_regex": True},
}


def read_gguf(path: Path) -> Checkpoint:
    """Read a `.gguf` file of the llama architecture.

    Raises:
        ModelUnsupported: another architecture, tokenizer or tensor type; names it.
    """
    file = GgufFile(path)
    metadata = _Metadata(file)
    if (architecture := metadata["general.architecture"]) != "llama":
        raise ModelUnsupported(f"{path}: architecture {architecture!r}; only 'llama' is read")
    config = _config(metadata, tied="output.weight" not in file.entries)
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {
        f"{role}_token": tokens[token_id]
        for role in ("bos", "eos")
        if (token_id := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None
    }
    return Checkpoint(
        path=path,
        config=config,
        eos_token_ids=_eos_token_ids(tokens, config["eos_token_id"]),
        tokenizer_json=json.dumps(_tokenizer(metadata), ensure_ascii=False),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special,
        tensors=_LlamaTensors(file, config),
    )


class _Metadata:
    """The file's metadata; a missing key is refused by its name."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.get = file.metadata.get

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelUnsupported(f"{self.path}: metadata {key!r} is missing")
        return value


def _config(metadata: _Metadata, *, tied: bool) -> dict[str, Any]:
    """The file's metadata in the words of config.json."""
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    if (scaling := metadata.get("llama.rope.scaling.type", "none")) != "none":
        raise ModelUnsupported(f"{metadata.path}: rope scaling {scaling!r} is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _eos_token_ids(tokens: Sequence[str], named: int | None) -> frozenset[int]:
    ends = {token_id for token_id, token in enumerate(tokens) if token in _ENDS}
    return frozenset(ends if named is None else ends | {named})


def _tokenizer(metadata: _Metadata) -> dict[str, Any]:
    """A byte-level BPE vocabulary as tokenizer.json."""
    if (model := metadata["tokenizer.ggml.model"]) != "gpt2":
        raise ModelUnsupported(
            f"{metadata.path}: tokenizer {model!r}; only 'gpt2' (byte-level BPE) is read"
        )
    if (pre := metadata.get("tokenizer.ggml.pre", "gpt-2")) not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelUnsupported(f"{metadata.path}: pre-tokenizer {pre!r}; known are {known}")
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "added_tokens": [
            _added_token(token_id, tokens[token_id], special=kind == _CONTROL)
            for token_id, kind in enumerate(kinds)
            if kind in {_CONTROL, _USER_DEFINED}
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **plain}


class _LlamaTensors:
    """The file's tensors under Hugging Face's names and in its row order; a `TensorSource`."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._stored = {
            _hf_name(name): name for name in file.entries if not name.startswith("rope_freqs")
        }
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: self._file.entries[stored].shape for name, stored in self._stored.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        tensor = self._file.read(self._stored[name])
        heads = self._heads.get(name.split(".")[-2])
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
