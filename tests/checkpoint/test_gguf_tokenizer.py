"""A GGUF file's tokenizer cuts and merges as its kind does."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.checkpoint import read_checkpoint
from dpkit.checkpoint.gguf import GgufFile
from dpkit.testing.tiny import write_gguf, write_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

tokenizers = pytest.importorskip("tokenizers")

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def tokenizer(path: Path, **change: Any) -> Any:
    """The tokenizer of a tiny file whose metadata `tokenizer.ggml.*` is changed."""
    write_tiny_gguf(path)
    metadata = GgufFile(path).metadata
    write_gguf(path, metadata | {f"tokenizer.ggml.{k}": v for k, v in change.items()}, {})
    return tokenizers.Tokenizer.from_str(read_checkpoint(path).tokenizer_json)


def pieces(tokenizer: Any, text: str) -> list[str]:
    """Into what a text is cut before merging."""
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "He's 12345 years,\n\n  I'LL say naïve x2!"


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", "He|'s| 12345| years|,|\n\n | I|'|LL| say| naïve| x|2|!"),
        ("smollm", "He|'s| |1|2|3|4|5| years|,|\n\n | I|'|LL| say| naïve| x|2|!"),
        ("qwen2", "He|'s| |1|2|3|4|5| years|,\n\n| | I|'LL| say| naïve| x|2|!"),
        ("llama-bpe", "He|'s| |123|45| years|,\n\n| | I|'LL| say| naïve| x|2|!"),
    ],
)
def test_text_is_cut_as_its_kind_does(tmp_path: Path, pre: str, cut: str) -> None:
    assert "|".join(pieces(tokenizer(tmp_path / "m.gguf", pre=pre), TEXT)) == cut


def test_any_text_survives(tmp_path: Path) -> None:
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        built = tokenizer(tmp_path / "m.gguf", pre=pre)
        assert built.decode(built.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"pre": "llama-bpe"}, 1),
        ({"pre": "llama-bpe", "add_bos_token": False}, None),
        ({"pre": "qwen2"}, None),
        ({"pre": "qwen2", "add_bos_token": True}, 1),
    ],
)
def test_a_text_begins_with_bos_where_the_file_or_its_kind_says(tmp_path, change, first) -> None:
    built = tokenizer(tmp_path / "m.gguf", **change)
    ids = built.encode("the").ids
    assert ids[:-1] == ([] if first is None else [first])
    assert built.encode("the", add_special_tokens=False).ids == ids[-1:]


def test_qwen_composes_characters(tmp_path: Path) -> None:
    built = tokenizer(tmp_path / "m.gguf", pre="qwen2")
    assert built.encode("e\N{COMBINING ACUTE ACCENT}").ids == built.encode("é").ids


WORDS = ["t", "h", "e", "i", "n", "s", SPACE, "th", "the", f"{SPACE}t", f"{SPACE}the", "in", "nn"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
SCORES = [0.0] * 259 + [
    -9.0,
    -9.0,
    -9.0,
    -9.0,
    -9.0,
    -9.0,
    -9.0,
    -2.0,
    -3.0,
    -1.0,
    -4.0,
    -5.0,
    -2.5,
]
SENTENCE_PIECE = {
    "model": "llama",
    "tokens": TOKENS,
    "scores": SCORES,
    "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(WORDS),
    "unknown_token_id": 0,
}


def merged_by_the_book(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token, those of the best score first."""
    parts = list(SPACE + text.replace(" ", SPACE))
    score = dict(zip(TOKENS, SCORES, strict=True))
    while True:
        options = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not options:
            return parts
        at = -max(options)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def in_bytes(parts: Sequence[str]) -> list[str]:
    return [
        piece
        for part in parts
        for piece in ([part] if part in TOKENS else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@pytest.mark.parametrize(
    "text", ["the inn", "then", "thinness", "the  the", "naïve inns", "", "hethethe", "nnn", "😀"]
)
def test_sentence_piece_merges_by_score(tmp_path: Path, text: str) -> None:
    built = tokenizer(tmp_path / "m.gguf", **SENTENCE_PIECE)
    expected = in_bytes(merged_by_the_book(text)) if text else []
    assert built.encode(text).tokens == ["<s>", *expected]
    assert built.decode(built.encode(text).ids) == text


def test_a_file_may_want_no_space_in_front(tmp_path: Path) -> None:
    change = {"add_space_prefix": False, "add_bos_token": False}
    built = tokenizer(tmp_path / "m.gguf", **SENTENCE_PIECE, **change)
    assert built.encode("the").tokens == ["the"]
    assert built.decode(built.encode(" the").ids) == " the"
