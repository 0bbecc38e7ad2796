"""Stop strings, against the plain thing: look at every beginning of the text in turn."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpkit.text.bytes import ByteDecoder
from dpkit.text.stop import StopScanner
from dpkit.text.transcript import Transcript

LETTERS = st.text("abå\N{GRINNING FACE}", max_size=20)
STOPS = st.lists(st.text("abå\N{GRINNING FACE}", min_size=1, max_size=4), min_size=1, max_size=4)


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({cut for cut in cuts if cut <= len(text)} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def plainly(text: str, stops: list[str], blind: int = 0) -> str:
    """Letter by letter, with the whole text at hand."""
    for end in range(blind + 1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return text


@given(LETTERS, STOPS, st.lists(st.integers(0, 20)))
@example("abcd", ["abcd", "c"], [])
@example("aab", ["ab"], [1, 2])
@example("aaab", ["aab", "aaa"], [3])
def test_the_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops)
    said = ""
    for piece in pieces(text, cuts):
        said += scanner.feed(piece)
        assert plainly(text, stops).startswith(said)  # nothing is said that must be taken back
    assert scanner.stopped == any(stop in text for stop in stops)
    assert said + scanner.finish() == plainly(text, stops)


@given(LETTERS, st.text("abå", min_size=1, max_size=3), st.lists(st.integers(0, 20)))
def test_one_stop_string_splits(text: str, stop: str, cuts: list[int]) -> None:
    scanner = StopScanner([stop])
    said = "".join([scanner.feed(piece) for piece in pieces(text, cuts)])
    assert said + scanner.finish() == text.split(stop, maxsplit=1)[0]


@given(LETTERS, STOPS, st.integers(0, 20), st.lists(st.integers(0, 20)))
@example("abab", ["abcd", "b"], 2, [2])
def test_a_stop_string_counts_only_if_it_ends_where_it_may(
    text: str, stops: list[str], blind: int, cuts: list[int]
) -> None:
    blind = min(blind, len(text))
    scanner = StopScanner(stops)
    said = scanner.feed(text[:blind], may_stop=False)
    said += "".join([scanner.feed(piece) for piece in pieces(text[blind:], cuts)])
    assert said + scanner.finish() == plainly(text, stops, blind)


@given(LETTERS, STOPS, st.lists(st.integers(0, 60)))
def test_no_more_is_held_back_than_may_begin_a_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops)
    fed = said = ""
    for piece in pieces(text, cuts):
        said += scanner.feed(piece)
        fed += piece
        if not scanner.stopped:
            held = fed.removeprefix(said)
            begins = [fed[i:] for i in range(len(fed)) if any(s.startswith(fed[i:]) for s in stops)]
            assert held == max(begins, key=len, default="")


def test_nothing_comes_after_a_stop_string() -> None:
    scanner = StopScanner(["."])
    assert scanner.feed("a.b") == "a"
    assert scanner.feed("c") == scanner.finish() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    scanner = StopScanner(())
    assert scanner.feed("anything") == "anything"
    assert not scanner.stopped


# --- transcripts


@given(LETTERS, STOPS, st.lists(st.integers(0, 80)))
def test_stop_strings_may_begin_and_end_inside_tokens(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    transcript = Transcript(ByteDecoder(), stop=stops)
    token_ids = text.encode()
    ends = [*sorted({cut for cut in cuts if cut < len(token_ids)}), len(token_ids)]
    said = "".join(
        transcript.feed(token_ids[a:b], last=b == len(token_ids))
        for a, b in zip([0, *ends], ends, strict=False)
    )
    assert said == plainly(text, stops)
    assert transcript.stopped == any(stop in text for stop in stops)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_min_tokens_come_before_a_stop_string_may_end(size: int) -> None:
    def text(min_tokens: int) -> str:
        transcript = Transcript(ByteDecoder(), stop=["b."], min_tokens=min_tokens)
        token_ids = b"ab.ab.ab"
        fed = [transcript.feed(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
        return "".join(fed) + transcript.feed((), last=True)

    assert [text(n) for n in range(9)] == ["a"] * 3 + ["ab.a"] * 3 + ["ab.ab.ab"] * 3


def test_the_prefix_comes_once_in_front_and_is_not_searched() -> None:
    transcript = Transcript(ByteDecoder(), stop=["b"], prefix="abc ")
    assert transcript.feed(b"x") == "abc x"
    assert transcript.feed(b"b") == ""
    assert transcript.stopped


def test_the_prefix_comes_even_if_nothing_else_does() -> None:
    assert Transcript(ByteDecoder(), prefix="abc").feed((), last=True) == "abc"


def test_half_a_character_at_the_end_is_no_stop_string() -> None:
    transcript = Transcript(ByteDecoder(), stop=["\N{REPLACEMENT CHARACTER}"])
    assert transcript.feed("å".encode()[:1], last=True) == "\N{REPLACEMENT CHARACTER}"
    assert not transcript.stopped
