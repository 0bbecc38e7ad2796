"""Tiny random models, written in a moment: real files of both formats, no real weights.

For tests of whatever loads or serves a model. The same seed gives the same weights in both formats.
Needs numpy, not torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from dpkit.checkpoint.checkpoint import Checkpoint
from dpkit.checkpoint.gguf_hf import ARCHITECTURES, TENSOR_NAMES
from dpkit.checkpoint.hf import write_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("t h", "th e", "i n", "\u0120 the")

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_alphabet() -> Iterator[str]:
    """The character that stands for each byte in byte-level BPE: itself where it is printable."""
    spare = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(spare)
            spare += 1


# What config.json's model_type and GGUF's general.architecture call the families.
_MODEL_TYPES = {name: kind for kind, name in ARCHITECTURES.items()} | {
    "MistralForCausalLM": "mistral"
}
_GGUF_ARCHITECTURES = _MODEL_TYPES | {"MistralForCausalLM": "llama"}

_TOKENS = (*_SPECIAL, *_byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES))


def tiny_checkpoint(*, seed: int = 0, **config: Any) -> Checkpoint:
    """Make a random model in memory; `config` overrides entries of its config.json.

    With `architectures` it is one of another family: Mistral, Qwen2, Qwen3.
    """
    shape: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": len(_TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 2.0**-17,  # exact in float32, which GGUF keeps it in
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10_000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | config
    shape["model_type"] = _MODEL_TYPES[shape["architectures"][0]]
    return Checkpoint(
        path=Path("tiny"),
        config=shape,
        eos_token_ids=frozenset({0, 2}),
        tokenizer_json=json.dumps(_tokenizer()),
        chat_template=_TEMPLATE,
        special_tokens={"bos_token": _SPECIAL[1], "eos_token": _SPECIAL[2]},
        tensors=_RandomTensors(shapes=_shapes(shape), seed=seed),
    )


def write_tiny_directory(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a random model as a Hugging Face directory; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = tiny_checkpoint(seed=seed, **config)
    write_directory(checkpoint, folder, on_bytes=lambda _done, _total: None)
    return folder


def write_tiny_gguf(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write the same random model as a GGUF file of F32 tensors; returns `path`.

    Of rope scalings the format has only `{"rope_type": "divisors", "divisors": […]}`.
    """
    checkpoint = tiny_checkpoint(seed=seed, **config)
    shape = checkpoint.config
    heads = {}
    if _GGUF_ARCHITECTURES[shape["architectures"][0]] == "llama":
        heads = {"q_proj": shape["num_attention_heads"], "k_proj": shape["num_key_value_heads"]}
    tensors = {}
    if (rope := shape.get("rope_scaling")) is not None:
        tensors["rope_freqs.weight"] = np.array(rope["divisors"], np.float32)
    for name in checkpoint.tensors.shapes():
        weights = checkpoint.tensors.read(name)
        if (count := heads.get(name.split(".")[-2])) is not None:
            weights = weights.reshape(count, 2, -1, *weights.shape[1:]).swapaxes(1, 2)
            weights = weights.reshape(checkpoint.tensors.shapes()[name])
        tensors[_gguf_name(name)] = weights
    write_gguf(path, _metadata(checkpoint), tensors)
    return path


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write a GGUF file, version 3, of F32 tensors."""
    header, data = bytearray(), bytearray()
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    for name, weights in tensors.items():
        shape = weights.shape[::-1]
        header += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", 0, len(data))
        data += weights.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))) + header
    path.write_bytes(header + bytes(-len(header) % 32) + data)


@frozen(kw_only=True)
class _RandomTensors:
    """A `TensorSource` that makes each tensor when it is read."""

    _shapes: Mapping[str, Sequence[int]]
    _seed: int

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return self._shapes

    def read(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes[name]
        random = np.random.default_rng([self._seed, *name.encode()])
        if name.endswith(".bias"):
            return random.uniform(-0.5, 0.5, shape).astype(np.float32)
        if len(shape) == 1:  # a norm
            return random.uniform(0.5, 1.5, shape).astype(np.float32)
        matrix = random.standard_normal(shape, np.float32)
        return matrix / np.float32(shape[1] ** 0.5)


def _shapes(config: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, Sequence[int]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for part in _biased(config):
        layer[f"{part}.bias"] = layer[f"{part}.weight"][:1]
    if config["model_type"] == "qwen3":
        layer |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config["head_dim"],)
        )
    outside: dict[str, Sequence[int]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        outside["lm_head.weight"] = (config["vocab_size"], hidden)
    return outside | {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }


def _biased(config: Mapping[str, Any]) -> list[str]:
    """Projections that have a bias."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    parts = attention if config["attention_bias"] else []
    if config["model_type"] == "qwen2":
        parts = attention[:3]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return parts + (mlp if config["mlp_bias"] else [])


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": token, "special": True, **flags}
            for token_id, token in enumerate(_SPECIAL)
        ],
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(_TOKENS)},
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }


_GGUF_NAMES = {hugging_face: gguf for gguf, hugging_face in TENSOR_NAMES.items()}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_GGUF_NAMES[part]}.{kind}"


def _metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    control, normal = 3, 1
    name = _GGUF_ARCHITECTURES[config["architectures"][0]]
    return {
        "general.architecture": name,
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(_TOKENS),
        "tokenizer.ggml.token_type": [
            control if token in _SPECIAL else normal for token in _TOKENS
        ],
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": checkpoint.chat_template,
    }


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


_STRING, _ARRAY = 8, 9
_SCALARS = {int: (4, "I"), float: (6, "f"), bool: (7, "?")}  # GGUF's type, and struct's


def _value(value: Any) -> bytes:
    """One metadata value with its type: bool, u32, f32, string, or an array of such."""
    if isinstance(value, list):
        kind = _kind(next(iter(value), 0))
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(map(_bare, value))
    return struct.pack("<I", _kind(value)) + _bare(value)


def _kind(value: Any) -> int:
    return _STRING if isinstance(value, str) else _SCALARS[type(value)][0]


def _bare(value: Any) -> bytes:
    if isinstance(value, str):
        return _string(value)
    return struct.pack("<" + _SCALARS[type(value)][1], value)
