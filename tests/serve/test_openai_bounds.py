"""Fields of a request have bounds: beyond them it is refused by name, within them it is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkit.serve.errors import ApiError
from dpkit.serve.messages import MOST_PIECES
from dpkit.serve.requests import read_completion
from dpkit.serve.unread import LONGEST
from tests.serve.desk import CHAT, COMPLETIONS, error_of, open_desk

PART = {"type": "text", "text": "a"}
MESSAGE = {"role": "user", "content": "{"}
TOO_MANY = f"messages: more than {MOST_PIECES} messages, or parts of them, are not read"
HUGE: list[Any] = [{}] * (LONGEST // 3)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"stop": ["x"] * 65}, "stop", "length <= 64"),
        ({"stop": ["x" * 1025]}, "stop[0]", "length <= 1024"),
        ({"stop": "x" * 1025}, "stop", "length <= 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "length <= 1024"),
        ({"logit_bias": {str(each): 1 for each in range(1025)}}, "logit_bias", "length <= 1024"),
        ({"suffix": "x" * LONGEST}, "suffix", "262146 bytes of JSON are more than the 262144"),
    ],
)
async def test_what_has_too_much_in_a_field_is_told_how_much_it_may_have(
    fields: dict[str, Any], param: str, says: str
) -> None:
    async with open_desk() as desk:
        status, error = await desk.refused(COMPLETIONS, prompt="a", **fields)
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: ")
        assert says in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "field",
    ["stop", "stop_token_ids", "logit_bias", "response_format", "guided_json", "tool_choice"],
)
async def test_a_field_that_is_far_too_long_is_refused_unread(path: str, field: str) -> None:
    asked = {"prompt": "a", "messages": [MESSAGE], field: HUGE}
    async with open_desk() as desk:
        reply = await desk.post(path, asked)
        if (path, field) == (COMPLETIONS, "tool_choice"):  # a field of chats
            assert reply.status == 200
            return
        assert (reply.status, error_of(reply)["param"]) == (400, field)
        assert "bytes of JSON" in error_of(reply)["message"]


async def test_of_a_field_that_is_said_twice_only_the_last_is_read() -> None:
    huge = json.dumps(HUGE).encode()
    async with open_desk() as desk:
        reply = await desk.post(COMPLETIONS, b'{"prompt": "a", "stop": ' + huge + b', "stop": "x"}')
        assert reply.status == 200


async def test_what_is_just_within_is_served() -> None:
    async with open_desk() as desk:
        told = await desk.ask(
            COMPLETIONS,
            prompt="abc",
            max_tokens=3,
            stop=["z" * 1024] * 64,
            stop_token_ids=[200] * 1024,
            logit_bias={str(each): 0 for each in range(256)},  # the model knows no more
        )
        assert told["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    "messages",
    [
        [MESSAGE] * (MOST_PIECES + 1),
        [{"role": "user", "content": [PART] * (MOST_PIECES + 1)}],
        [{"role": "user", "content": [PART] * 100}] * (MOST_PIECES // 100 + 1),
    ],
    ids=["messages", "parts of one", "parts of all"],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_conversation_has_no_more_pieces_than_are_read(
    path: str, messages: list[dict[str, Any]]
) -> None:
    async with open_desk() as desk:
        status, error = await desk.refused(path, messages=messages)
        assert (status, error["param"], error["message"]) == (400, "messages", TOO_MANY)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * (MOST_PIECES - 1),
        [{"role": "user", "content": [{"type": "text", "text": ""}] * MOST_PIECES}],
        [{"role": "user", "content": "{" * MOST_PIECES}],
    ],
    ids=["messages", "parts", "braces"],
)
async def test_as_many_as_may_be_are_read_to_the_same_text(messages: list[dict[str, Any]]) -> None:
    last = {"role": "user", "content": [PART, {"type": "text", "text": "{"}]}
    async with open_desk() as desk:
        told = await desk.ask("/tokenize", messages=[*messages[:-1], {"role": "user"}, last])
        text = (await desk.ask("/detokenize", tokens=told["tokens"]))["prompt"]
        assert text.count("user") == len(messages) + 1
        assert "a{" in text


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": 3}, "messages[1].role"),
        ({"role": "user", "content": [PART, 3]}, "messages[1].content[1]"),
    ],
)
async def test_what_is_wrong_is_found_in_a_long_one_too(wrong: Any, param: str) -> None:
    full = {"role": "user", "content": "{" * MOST_PIECES}
    async with open_desk() as desk:
        status, error = await desk.refused(CHAT, messages=[full, wrong])
        assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ([""] * 40_000, "prompt", "40000 prompts are more than 1024 answers"),
        (["\\"] * 40_000, "prompt", "20000 prompts are more than 1024 answers"),
        (["a", *[1] * 40_000], "prompt[1]", "Expected `str`, got `int`"),
        ([None] * 40_000, "prompt[0]", "Expected `str`, got `null`"),
        ({"a": [1] * 40_000}, "prompt", "got `object`"),
    ],
    ids=["texts", "backslashes", "mixed", "nulls", "object"],
)
async def test_prompts_are_counted_before_they_are_read(prompt: Any, param: str, says: str) -> None:
    async with open_desk() as desk:
        status, error = await desk.refused(COMPLETIONS, prompt=prompt)
        assert (status, error["param"]) == (400, param)
        assert says in error["message"]


@given(st.lists(st.sampled_from(['"', "\\", '\\"', "a,", '","', "é", ""]), max_size=9))
def test_no_text_is_counted_as_two(pieces: list[str]) -> None:
    prompts = ["".join(pieces) or "a"] * 1023 + ["z" * 70_000]
    assert read_completion(json.dumps({"prompt": prompts}).encode(), most=10**6).prompts == tuple(
        prompts
    )


async def test_a_chat_stops_where_it_is_told_to() -> None:
    async with open_desk() as desk:
        told = await desk.ask(CHAT, messages=[{"role": "user", "content": "abc"}], stop=["c"])
        assert told["choices"][0]["message"]["content"].endswith("ab")


def test_a_program_that_reads_bodies_hears_the_same() -> None:
    with pytest.raises(ApiError, match="stop: 300002 bytes"):
        read_completion(b'{"prompt": "a", "stop": "' + b"x" * 300_000 + b'"}')
