"""A GGUF file's tokenizer as Hugging Face's tokenizer.json.

Two kinds: byte-level BPE (`gpt2`), which differ in how text is cut before merging, and
SentencePiece's BPE (`llama`), which names no merges but has a score for each token. Refuses any
other by name. Knows nothing of files or weights.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpkit.checkpoint.fields import Fields

T = TypeVar("T")

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's tokens

# How both Qwen and Llama 3 cut: contractions, words, numbers, punctuation, line ends, spaces.
# They differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _words(digits: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": _WORDS % digits}, "behavior": "Isolated"}
    return _cut({**split, "invert": False}, {**_BYTE_LEVEL, "use_regex": False})


@frozen(kw_only=True)
class _PreTokenizer:
    """What stands between a text and the merges of a byte-level BPE."""

    cut: Mapping[str, Any]
    normalizer: Mapping[str, Any] | None = None
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False  # where the file doesn't say


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = MappingProxyType(
    {
        "smollm": _PreTokenizer(
            cut=_cut(
                {"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}
            )
        ),
        "gpt-2": _PreTokenizer(cut={**_BYTE_LEVEL, "use_regex": True}),
        "llama-bpe": _PreTokenizer(cut=_words(r"\p{N}{1,3}"), whole_words=True, adds_bos=True),
        "qwen2": _PreTokenizer(cut=_words(r"\p{N}"), normalizer={"type": "NFC"}),
    }
)


def tokenizer_json(metadata: Fields) -> dict[str, Any]:
    """What tokenizer.json would hold.

    Raises:
        ModelUnsupported: a tokenizer or a pre-tokenizer that isn't read; names it.
    """
    match model := metadata.string("tokenizer.ggml.model"):
        case "gpt2":
            parts = _byte_level(metadata)
        case "llama":
            parts = _sentence_piece(metadata)
        case _:
            raise ModelUnsupported(
                f"{metadata.where}: tokenizer {model!r}; read are 'gpt2' (byte-level BPE) and "
                "'llama' (SentencePiece)"
            )
    return {"version": "1.0", "added_tokens": _added_tokens(metadata), **parts}


def _byte_level(metadata: Fields) -> dict[str, Any]:
    name = metadata.string("tokenizer.ggml.pre", default="gpt-2")
    if (pre := _PRE_TOKENIZERS.get(name)) is None:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelUnsupported(f"{metadata.where}: pre-tokenizer {name!r}; known are {known}")
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.cut,
        "post_processor": _bos_first(metadata, default=pre.adds_bos),
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": _vocabulary(metadata),
            "merges": [merge.split(" ") for merge in metadata.strings("tokenizer.ggml.merges")],
            "ignore_merges": pre.whole_words,
        },
    }


def _sentence_piece(metadata: Fields) -> dict[str, Any]:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    unknown = metadata.token_id(
        "tokenizer.ggml.unknown_token_id", vocabulary=len(tokens), default=0
    )
    scores = _one_each(metadata, "tokenizer.ggml.scores", metadata.numbers)
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    first = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, space]},
        "pre_tokenizer": None,
        "post_processor": _bos_first(metadata, default=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": _vocabulary(metadata),
            "merges": _merges(tokens, scores),
        },
    }


def _one_each(metadata: Fields, key: str, read: Callable[[str], Sequence[T]]) -> Sequence[T]:
    """A list that has one entry for each token."""
    found, tokens = read(key), metadata.strings("tokenizer.ggml.tokens")
    if len(found) != len(tokens):
        metadata.refuse(key, f"must have an entry for each of {len(tokens)} tokens", len(found))
    return found


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token of the best score first."""
    known = set(tokens)
    by_score = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, by_score)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _vocabulary(metadata: Fields) -> dict[str, int]:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    return {token: token_id for token_id, token in enumerate(tokens)}


def _bos_first(metadata: Fields, *, default: bool) -> dict[str, Any] | None:
    """Put the begin-of-text token before every text, if the file wants that."""
    if not metadata.flag("tokenizer.ggml.add_bos_token", default=default):
        return None
    tokens = metadata.strings("tokenizer.ggml.tokens")
    bos = metadata.token_id("tokenizer.ggml.bos_token_id", vocabulary=len(tokens))
    token = tokens[bos]
    single = [
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def _added_tokens(metadata: Fields) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is cut; those that control have no text."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    kinds = _one_each(metadata, "tokenizer.ggml.token_type", metadata.wholes)
    return [
        {"id": token_id, "content": tokens[token_id], "special": kind != _USER_DEFINED, **plain}
        for token_id, kind in enumerate(kinds)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]
