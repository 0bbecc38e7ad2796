"""The Hugging Face directory format, read and written.

Files: config.json, *.safetensors, tokenizer.json, and where they are there generation_config.json,
tokenizer_config.json and chat_template.jinja. Knows nothing of what the configuration means.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dpkit.checkpoint.checkpoint import Checkpoint
from dpkit.checkpoint.safetensors import SafetensorsFolder, write_safetensors
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def read_directory(folder: Path) -> Checkpoint:
    """Read a Hugging Face directory.

    Raises:
        ModelUnsupported: a file that is needed is missing or is not JSON; names it.
    """
    config = read_config(folder)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", missing_ok=True)
    generation = _read_json(folder / "generation_config.json", missing_ok=True)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return Checkpoint(
        path=folder,
        config=config,
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        tokenizer_json=_read_text(folder / "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        tensors=SafetensorsFolder(folder),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read its config.json.

    Raises:
        ModelUnsupported: it is missing or is no JSON object.
    """
    return _read_json(folder / "config.json")


def write_directory(
    checkpoint: Checkpoint, folder: Path, *, on_bytes: Callable[[int, int], None]
) -> None:
    """Write `checkpoint` into `folder`, weights as float32; `on_bytes(done, total)` as they go.

    float32, though it is twice the size of bfloat16: dequantised weights don't fit bfloat16, so
    the directory would be another model than its source; and float32 is mapped and used as it is.
    """
    _write_json(folder / "config.json", checkpoint.config)
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": checkpoint.config.get("bos_token_id"),
            "eos_token_id": sorted(checkpoint.eos_token_ids),
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
            **checkpoint.special_tokens,
            "chat_template": checkpoint.chat_template,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer_json, encoding="utf-8")
    write_safetensors(
        folder / "model.safetensors",
        checkpoint.tensors.shapes(),
        checkpoint.tensors.read,
        on_bytes=on_bytes,
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelUnsupported(
            f"{path} is missing; a model directory needs config.json, tokenizer.json and "
            "*.safetensors"
        ) from None


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.exists():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelUnsupported(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{path}: a JSON object is expected")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Newer directories keep it in its own file; some have several, of which one is the default."""
    if (own_file := folder / "chat_template.jinja").exists():
        return _read_text(own_file)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin: a string, or an object with its string in `content`."""
    tokens = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = tokenizer_config.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[role] = content
    return tokens
