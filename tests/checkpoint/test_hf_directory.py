"""Hugging Face directories, in the variants one meets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.checkpoint import read_checkpoint
from dpkit.checkpoint.safetensors import write_safetensors
from dpkit.errors import ModelUnsupported
from dpkit.testing.tiny import tiny_checkpoint, write_tiny_directory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_directory(tmp_path / "tiny")


def rewrite(path: Path, **change: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_what_is_written_is_what_is_read(tiny: Path) -> None:
    written, read = tiny_checkpoint(), read_checkpoint(tiny)
    assert read.config == written.config
    assert read.tokenizer_json == written.tokenizer_json
    assert read.chat_template == written.chat_template
    assert read.special_tokens == written.special_tokens
    assert read.eos_token_ids == written.eos_token_ids


@pytest.mark.parametrize(("eos", "ids"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_end_tokens_come_as_one_as_many_or_not_at_all(tiny: Path, eos: Any, ids: set[int]) -> None:
    rewrite(tiny / "generation_config.json", eos_token_id=eos)
    assert read_checkpoint(tiny).eos_token_ids == ids


def test_the_optional_files_may_be_missing(tiny: Path) -> None:
    (tiny / "generation_config.json").unlink()
    (tiny / "tokenizer_config.json").unlink()
    checkpoint = read_checkpoint(tiny)
    assert checkpoint.eos_token_ids == {2}  # config.json has it too
    assert checkpoint.chat_template is None


def test_a_template_in_a_file_of_its_own_wins(tiny: Path) -> None:
    (tiny / "chat_template.jinja").write_text("from the file")
    assert read_checkpoint(tiny).chat_template == "from the file"


def test_the_default_of_several_templates_is_taken(tiny: Path) -> None:
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    rewrite(tiny / "tokenizer_config.json", chat_template=several)
    assert read_checkpoint(tiny).chat_template == "yes"


def test_a_special_token_may_be_an_object(tiny: Path) -> None:
    rewrite(tiny / "tokenizer_config.json", unk_token={"content": "[?]", "lstrip": False})
    assert read_checkpoint(tiny).special_tokens.items() >= {("unk_token", "[?]")}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tiny: Path, name: str) -> None:
    (tiny / name).unlink()
    with pytest.raises(ModelUnsupported, match=f"{name} is missing"):
        read_checkpoint(tiny)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "a JSON object")])
def test_a_damaged_config_is_named(tiny: Path, text: str, message: str) -> None:
    (tiny / "config.json").write_text(text)
    with pytest.raises(ModelUnsupported, match=f"config.json: {message}"):
        read_checkpoint(tiny)


def test_an_index_says_which_files_count(tiny: Path) -> None:
    whole = tiny / "model.safetensors"
    shapes = read_checkpoint(tiny).tensors.shapes()
    read = read_checkpoint(tiny).tensors.read
    names = list(shapes)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        chosen = {name: shapes[name] for name in part}
        write_safetensors(tiny / file, chosen, read, on_bytes=lambda *_: None)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()  # mapped: never write into it
    whole.write_bytes(b"not looked at")
    sharded = read_checkpoint(tiny).tensors
    assert sharded.shapes() == shapes
    assert all((sharded.read(name) == read(name)).all() for name in names)


def test_a_missing_shard_is_named(tiny: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelUnsupported, match=r"00002-of-00002.safetensors is missing, which mode"
    ):
        read_checkpoint(tiny)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_named(tiny: Path, text: str) -> None:
    (tiny / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelUnsupported, match=r"index.json: not an index of safetensors files"):
        read_checkpoint(tiny)
