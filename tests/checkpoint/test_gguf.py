"""GGUF files are read to the byte, and refused by the name of what isn't read."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dpkit.checkpoint import read_checkpoint
from dpkit.checkpoint.gguf import GgufFile
from dpkit.errors import ModelUnsupported
from dpkit.testing.tiny import tiny_checkpoint, write_gguf, write_tiny_directory, write_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path


def test_metadata_comes_back_as_it_was_written(tmp_path: Path) -> None:
    metadata = {
        "text": "naïve 日本",
        "number": 7,
        "real": 0.5,
        "words": ["a", "", "é"],
        "ids": [3, 1],
    }
    write_gguf(tmp_path / "m.gguf", metadata, {})
    assert GgufFile(tmp_path / "m.gguf").metadata == metadata


def test_tensors_come_back_in_numpys_order_of_dimensions(tmp_path: Path) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_gguf(tmp_path / "m.gguf", {}, {"one": np.ones(5, np.float32), "two": weights})
    assert np.array_equal(GgufFile(tmp_path / "m.gguf").read("two"), weights)


def test_both_formats_of_one_model_are_the_same_checkpoint(tmp_path: Path) -> None:
    directory = read_checkpoint(write_tiny_directory(tmp_path / "tiny"))
    file = read_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert file.eos_token_ids == directory.eos_token_ids
    assert file.chat_template == directory.chat_template
    assert file.special_tokens == directory.special_tokens
    assert file.config == directory.config
    shapes = {name: tuple(shape) for name, shape in directory.tensors.shapes().items()}
    assert {name: tuple(shape) for name, shape in file.tensors.shapes().items()} == shapes
    for name in shapes:
        assert np.array_equal(file.tensors.read(name), directory.tensors.read(name)), name


def test_an_untied_head_is_found(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tie_word_embeddings=False)
    checkpoint = read_checkpoint(path)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.tensors.shapes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "falcon"},
            "architecture 'falcon'; read are 'llama'",
        ),
        ({"general.architecture": None}, "'general.architecture' is missing"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'; read are 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "'tokenizer.ggml.scores' is missing"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'; known are smollm, gpt-2"),
    ],
)
def test_what_is_not_read_is_named(
    tmp_path: Path, change: dict[str, str | None], message: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    metadata = GgufFile(path).metadata | change
    write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, {})
    with pytest.raises(ModelUnsupported, match=rf"tiny.gguf: .*{message}"):
        read_checkpoint(path)


def with_first_tensor_of_type(path: Path, kind: int) -> Path:
    """Change the type of the only tensor, `t` of shape [32], in place."""
    write_gguf(path, {}, {"t": np.ones(32, np.float32)})
    data = path.read_bytes()
    entry = struct.pack("<Q1sIQ", 1, b"t", 1, 32)
    path.write_bytes(data.replace(entry + bytes(4), entry + struct.pack("<I", kind)))
    return path


@pytest.mark.parametrize(("kind", "name"), [(14, "Q6_K"), (12, "Q4_K"), (99, "of GGML type 99")])
def test_a_quantisation_that_is_not_read_is_named(tmp_path: Path, kind: int, name: str) -> None:
    file = GgufFile(with_first_tensor_of_type(tmp_path / "m.gguf", kind))
    with pytest.raises(ModelUnsupported, match=rf"tensor 't' is {name}; F32, F16, BF16, Q8_0"):
        file.read("t")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelUnsupported, match=r"not a GGUF file; it begins with b'PK"):
        GgufFile(tmp_path / "m.gguf")


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelUnsupported, match="GGUF version 1"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [5, 40, 500, 4000])
def test_a_header_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelUnsupported, match="cut short or damaged"):
        GgufFile(path)


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


@pytest.mark.parametrize(
    ("tensors", "pairs", "rest", "why"),
    [
        (0, 1, struct.pack("<Q", 2**40), "a string reaches beyond the file"),
        (0, 1, text("key") + struct.pack("<I", 99), "metadata of unknown type 99"),
        (0, 1, text("key") + struct.pack("<IIQ", 9, 99, 1), "array of unknown type 99"),
        (1, 0, text("tensor") + struct.pack("<I", 9), "a tensor of 9 dimensions"),
    ],
    ids=["string", "metadata", "array", "tensor"],
)
def test_what_is_damaged_in_a_header_is_the_cause(
    tmp_path: Path, tensors: int, pairs: int, rest: bytes, why: str
) -> None:
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelUnsupported, match="cut short or damaged") as caught:
        GgufFile(tmp_path / "m.gguf")
    assert str(caught.value.__cause__) == why


def test_a_tensor_of_nothing_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {"t": np.ones((0, 4), np.float32)})
    with pytest.raises(ModelUnsupported, match=r"tensor 't' has no shape: \(0, 4\)"):
        GgufFile(tmp_path / "m.gguf").read("t")


def test_weights_cut_short_are_refused_by_the_tensors_name(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    checkpoint = read_checkpoint(path)
    with pytest.raises(ModelUnsupported, match=r"cut short at tensor 'blk.2.ffn_down.weight'"):
        checkpoint.tensors.read("model.layers.2.mlp.down_proj.weight")


def test_weights_may_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {"t": np.ones(8, np.float32)})
    GgufFile(tmp_path / "m.gguf").read("t")[:] = 5
    assert GgufFile(tmp_path / "m.gguf").read("t").tolist() == [1.0] * 8


def test_reading_a_tiny_checkpoint_needs_no_file() -> None:
    assert tiny_checkpoint().tensors.read("model.norm.weight").shape == (64,)
