"""The Hugging Face directory format, read and written.

Files: config.json, *.safetensors, tokenizer.json, and where they are there generation_config.json,
tokenizer_config.json and chat_template.jinja. Knows nothing of what the configuration means.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dpkit.checkpoint.checkpoint import Checkpoint, NoWeights
from dpkit.checkpoint.fields import Fields, parse_object, read_text
from dpkit.checkpoint.safetensors import SafetensorsFolder, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def read_directory(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Read a Hugging Face directory; without `weights` it need have none.

    Raises:
        ModelUnsupported: a file that is needed is missing, or one is damaged; names it.
    """
    config = read_config(folder)
    tokenizer_config = _read_fields(folder / "tokenizer_config.json")
    generation = _read_fields(folder / "generation_config.json")
    told = generation if "eos_token_id" in generation.values else _config_fields(folder, config)
    return Checkpoint(
        path=folder,
        config=config,
        eos_token_ids=_eos_token_ids(told),
        tokenizer_json=read_text(folder / "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        tensors=SafetensorsFolder(folder) if weights else NoWeights(),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read its config.json.

    Raises:
        ModelUnsupported: it is missing or is no JSON object.
    """
    path = folder / "config.json"
    return parse_object(read_text(path), str(path))


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


def _read_fields(path: Path) -> Fields:
    """A file that may be missing."""
    return Fields(str(path), parse_object(read_text(path), str(path)) if path.exists() else {})


def _config_fields(folder: Path, config: Mapping[str, Any]) -> Fields:
    return Fields(str(folder / "config.json"), config)


def _eos_token_ids(told: Fields) -> frozenset[int]:
    """One, several or none."""
    key = "eos_token_id"
    if not told.has(key):
        return frozenset()
    if isinstance(told.values[key], list):
        ids = frozenset(told.wholes(key))
        if ids and min(ids) < 0:
            told.refuse(key, "must be a list of token ids", sorted(ids))
        return ids
    return frozenset({told.whole(key, least=0)})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _chat_template(folder: Path, tokenizer_config: Fields) -> str | None:
    """Newer directories keep it in its own file; some have several, of which one is the default."""
    if (own_file := folder / "chat_template.jinja").exists():
        return read_text(own_file)
    key = "chat_template"
    template = tokenizer_config.values.get(key)
    if isinstance(template, list):
        named = {}
        for number, entry in enumerate(template):
            if not isinstance(entry, dict):
                tokenizer_config.refuse(key, "must be a list of named templates", template)
            one = Fields(tokenizer_config.where, entry, f"{key}.{number}")
            named[one.string("name")] = one.string("template")
        return named.get("default")
    return None if template is None else tokenizer_config.string(key)


def _special_tokens(tokenizer_config: Fields) -> dict[str, str]:
    """`bos_token` and its kin: a string, or an object with its string in `content`."""
    tokens = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if isinstance(tokenizer_config.values.get(role), dict):
            tokens[role] = tokenizer_config.table(role).string("content")
        elif tokenizer_config.has(role):
            tokens[role] = tokenizer_config.string(role)
    return tokens
