"""The byte tokenizer: exact, and never half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpkit.text.bytes import EOS_TOKEN_ID, ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text(), st.data())
def test_any_text_comes_back_whole_however_its_tokens_arrive(
    text: str, data: st.DataObject
) -> None:
    token_ids = TOKENIZER.encode(text)
    decoder = TOKENIZER.decoder()
    decoded = ""
    while token_ids:
        count = data.draw(st.integers(1, len(token_ids)))
        decoded += decoder.feed(token_ids[:count])
        assert text.startswith(decoded)
        token_ids = token_ids[count:]
    assert decoder.finish() == ""
    assert decoded == text


def test_half_a_character_is_held_back_until_the_end() -> None:
    decoder = TOKENIZER.decoder()
    assert decoder.feed([0x61, 0xE2, 0x82]) == "a"
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"


def test_malformed_bytes_are_replaced_and_the_rest_goes_on() -> None:
    decoder = TOKENIZER.decoder()
    assert decoder.feed([0xFF, 0x61]) == "\N{REPLACEMENT CHARACTER}a"
    assert decoder.finish() == ""


def test_tokens_that_are_no_bytes_have_no_text() -> None:
    assert TOKENIZER.decoder().feed([0x61, EOS_TOKEN_ID, 70_000, 0x62]) == "ab"


def test_text_that_utf8_cannot_hold_is_a_question_mark() -> None:
    assert TOKENIZER.encode("a\ud800") == [0x61, 0x3F]


def test_a_conversation_is_one_line_a_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "system: Be brief.\nuser: Hi\nassistant: "
    assert bytes(TOKENIZER.encode_chat(messages)).decode() == expected


def test_a_long_text_is_encoded_like_a_short_one() -> None:
    text = "the inn \N{EURO SIGN}" * 20_000
    assert bytes(TOKENIZER.encode(text)) == text.encode()
