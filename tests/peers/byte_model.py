"""A model directory for a frontend whose engines echo: a tokenizer of bytes, and no weights.

Its ids are those of `dpkit.text.bytes`, so what an echo engine says is the text that was sent.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dpkit.text.bytes import EOS_TOKEN_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

END = "</s>"
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def write_byte_model(folder: Path) -> Path:
    """Write the four files that a frontend reads; returns the folder."""
    files = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65_536,
            "eos_token_id": EOS_TOKEN_ID,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"eos_token_id": EOS_TOKEN_ID},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def write_byte_model_of_experts(folder: Path) -> Path:
    """Likewise, of a model whose ranks must step together."""
    config = write_byte_model(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | EXPERTS))
    return folder


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without a merge: each byte is a token, under the letter that stands for it."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    end = {"id": EOS_TOKEN_ID, "content": END, "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": byte_level | {"trim_offsets": False},
        "decoder": byte_level | {"trim_offsets": False},
        "model": {"type": "BPE", "vocab": letters | {END: EOS_TOKEN_ID}, "merges": []},
    }
