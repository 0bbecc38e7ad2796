"""A model's own tokenizer: text comes out whole however the tokens come in."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpkit.errors import RequestRejected
from dpkit.testing.tiny import tiny_checkpoint

tokenizers = pytest.importorskip("tokenizers")

from dpkit.text.hf import HfTokenizer, LongIds  # noqa: E402 - after the check that it can be imported

CHECKPOINT = tiny_checkpoint()
TOKENIZER = HfTokenizer(
    CHECKPOINT.tokenizer_json,
    chat_template=CHECKPOINT.chat_template,
    special_tokens=CHECKPOINT.special_tokens,
)
REFERENCE = tokenizers.Tokenizer.from_str(CHECKPOINT.tokenizer_json)

token_ids = st.lists(st.integers(0, CHECKPOINT.config["vocab_size"] - 1), max_size=40)


def decode(pieces: list[list[int]]) -> str:
    decoder = TOKENIZER.decoder()
    return "".join(decoder.feed(piece) for piece in pieces) + decoder.finish()


@given(st.text())
def test_any_text_survives_encoding_and_decoding_token_by_token(text: str) -> None:
    assert decode([[token_id] for token_id in TOKENIZER.encode(text)]) == text


@given(token_ids, st.lists(st.integers(0, 40)))
def test_any_tokens_in_any_pieces_give_the_text_of_the_whole(
    ids: list[int], cuts: list[int]
) -> None:
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    whole = REFERENCE.decode(ids, skip_special_tokens=True)
    assert decode([ids[begin:end] for begin, end in pairwise(edges)]) == whole


@given(token_ids)
def test_what_is_out_never_changes(ids: list[int]) -> None:
    decoder, said = TOKENIZER.decoder(), ""
    for count, token_id in enumerate(ids, start=1):
        said += decoder.feed([token_id])
        assert REFERENCE.decode(ids[:count]).startswith(said)


def test_a_character_comes_with_its_last_token() -> None:
    decoder = TOKENIZER.decoder()
    assert [decoder.feed([i]) for i in TOKENIZER.encode("a😀")] == ["a", "", "", "", "😀"]


def test_half_a_character_comes_out_at_the_end() -> None:
    decoder = TOKENIZER.decoder()
    assert decoder.feed(TOKENIZER.encode("a😀")[:-1]) == "a"
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    first, *rest = TOKENIZER.encode("é")
    assert decode([[1, first], [2], rest, [0]]) == "é"


def test_text_that_looks_like_a_special_token_is_that_token() -> None:
    assert TOKENIZER.encode("<|im_end|>") == [2]


def test_a_conversation_is_put_into_the_models_own_template() -> None:
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "the inn"}])
    text = REFERENCE.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nthe inn<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1


def sentence_piece() -> HfTokenizer:
    """A word a token, as SentencePiece writes them; its decoder strips the text's first space."""
    words = ["<unk>", "<s>", "\u2581the", "\u2581inn", "s", "\u2581"]
    decoder = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    source = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "<s>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}}
        | {"unk_token": "<unk>"},
    }
    return HfTokenizer(json.dumps(source), chat_template=None, special_tokens={})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "the inns the inn"),
        ([1], "the inns the inn"),
        ([1, 2], " the inns the inn"),
        ([1, *[2, 3] * 30, 1, 1], " the inns the inn"),
        ([5], " the inns the inn"),  # the prompt's own space is the one that is stripped
    ],
)
def test_the_first_space_after_a_prompt_is_not_lost(prompt: list[int], text: str) -> None:
    tokenizer = sentence_piece()
    decoder = tokenizer.decoder(prompt)
    said = "".join(decoder.feed([token_id]) for token_id in [2, 3, 4, 2, 3]) + decoder.finish()
    assert said == text


@given(token_ids, token_ids)
def test_prompt_and_answer_make_the_whole_text(prompt: list[int], ids: list[int]) -> None:
    """Where the prompt ends inside a character, it is the prompt's."""
    before = REFERENCE.decode(prompt)
    assume(not before.endswith("\N{REPLACEMENT CHARACTER}"))
    decoder = TOKENIZER.decoder(prompt)
    said = "".join(decoder.feed([token_id]) for token_id in ids) + decoder.finish()
    assert before + said == REFERENCE.decode([*prompt, *ids])


def test_a_model_without_a_template_says_so() -> None:
    plain = HfTokenizer(CHECKPOINT.tokenizer_json, chat_template=None, special_tokens={})
    with pytest.raises(RequestRejected, match="no chat template; send the prompt as plain text"):
        plain.encode_chat([{"role": "user", "content": "hello"}])


def test_the_tokens_of_a_long_text_are_counted_before_they_are_listed() -> None:
    text = "the inn " * 4000
    ids = TOKENIZER.encode(text)
    assert isinstance(ids, LongIds)
    expected = REFERENCE.encode(text).ids
    assert len(ids) == len(expected)
    assert [*ids] == expected
    assert (ids[0], ids[-3:]) == (expected[0], expected[-3:])
