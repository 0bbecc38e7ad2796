"""A model that others serve: its tokens are known from its small files, whatever computes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dpkit.engine.models import load_face, load_served, load_tokenizer
from dpkit.errors import ModelNotFound, ModelUnsupported
from dpkit.testing.tiny import write_tiny_directory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory without weights."""
    path = write_tiny_directory(tmp_path / "tiny")
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    return path


def change(folder: Path, **keys: object) -> None:
    """Say other things in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_no_weights_are_needed(folder: Path) -> None:
    with pytest.raises(ModelUnsupported):
        load_face(str(folder))
    face = load_served(str(folder))
    tokenizer = load_tokenizer(face, str(folder))
    assert tokenizer.decoder().feed(tokenizer.encode("a b")) in {"a b", " a b"}
    assert face.spec.eos_token_ids
    assert face.spec.tells_logprobs
    assert face.spec.max_model_len is None, "its engines say"


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": ["DeepseekV3ForCausalLM"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_attention_heads": "many"},
    ],
)
def test_what_dpkit_cannot_compute_may_be_served(folder: Path, keys: dict[str, object]) -> None:
    size = load_served(str(folder)).spec.vocab_size
    change(folder, **keys)
    assert load_served(str(folder)).spec.vocab_size == size


def test_a_model_that_sees_as_well_says_the_size_of_its_vocabulary_further_down(
    folder: Path,
) -> None:
    change(folder, vocab_size=None, text_config={"vocab_size": 123})
    assert load_served(str(folder)).spec.vocab_size == 123


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    change(folder, vocab_size=None)
    with pytest.raises(ModelUnsupported, match=r"'text_config\.vocab_size' is missing"):
        load_served(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json is missing"):
        load_served(str(folder))
    with pytest.raises(ModelNotFound):
        load_served(str(tmp_path / "nowhere"))


def test_models_that_cost_nothing_are_what_they_are() -> None:
    assert load_served("echo").spec == load_face("echo").spec
