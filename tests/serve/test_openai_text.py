"""Generated text over HTTP: completions and chats, whole and in pieces, as clients expect it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio.testing

from dpkit.serve.chunks import Usage
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, Desk, events, open_desk, text_of

HI = [{"role": "user", "content": "hi"}]
SAID = "user: hi\nassistant: "


async def _stream(desk: Desk, path: str, **fields: Any) -> list[Any]:
    reply = await desk.post(path, {"stream": True, **fields})
    assert reply.status == 200, reply
    assert reply.is_complete
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    said = events(reply.body)
    assert said[-1] == "[DONE]"
    return said


async def test_a_completion_in_one_piece() -> None:
    async with open_desk() as desk:
        told = await desk.ask(COMPLETIONS, model="echo", prompt="hello")
        assert told["id"].startswith("cmpl-")
        assert told["object"] == "text_completion"
        assert told["model"] == "echo"
        assert isinstance(told["created"], int)
        assert told["choices"] == [
            {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}
        ]
        assert told["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_a_chat_in_one_piece() -> None:
    async with open_desk() as desk:
        told = await desk.ask(CHAT, model="echo", messages=HI)
        assert told["id"].startswith("chatcmpl-")
        assert told["object"] == "chat.completion"
        [choice] = told["choices"]
        assert choice["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert told["usage"]["prompt_tokens"] == len(SAID)


async def test_a_completion_in_pieces() -> None:
    async with open_desk() as desk:
        said = await _stream(desk, COMPLETIONS, prompt="hello", max_tokens=5)
        assert text_of(said) == "hello"
        assert [event["choices"][0]["finish_reason"] for event in said[:-1]] == [None] * 4 + [
            "length"
        ]
        assert all("usage" not in event for event in said[:-1])
        assert len({event["id"] for event in said[:-1]}) == 1
        assert {event["object"] for event in said[:-1]} == {"text_completion"}


async def test_a_chat_in_pieces_begins_with_who_speaks() -> None:
    async with open_desk() as desk:
        said = await _stream(desk, CHAT, messages=HI)
        assert said[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {event["object"] for event in said[:-1]} == {"chat.completion.chunk"}
        assert text_of(said) == SAID
        assert said[-2]["choices"][0]["finish_reason"] == "stop"


async def test_usage_comes_last_and_alone_if_it_is_asked_for() -> None:
    async with open_desk() as desk:
        options = {"include_usage": True}
        said = await _stream(desk, CHAT, messages=HI, stream_options=options)
        assert said[-2]["choices"] == []
        assert said[-2]["usage"]["total_tokens"] == 2 * len(SAID) + 1
        assert all(event["usage"] is None for event in said[:-2])


async def test_usage_comes_all_the_time_if_that_is_asked_for() -> None:
    async with open_desk() as desk:
        options = {"include_usage": True, "continuous_usage_stats": True}
        said = await _stream(desk, COMPLETIONS, prompt="abc", stream_options=options)
        told = [event["usage"]["completion_tokens"] for event in said[:-1]]
        assert told == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_what_was_found_in_a_cache(stream: bool) -> None:
    async with open_desk() as desk:
        where = {"x_data_parallel_rank": "0"}
        for path, fields, found in (
            (COMPLETIONS, {"prompt": "x" * 40}, 0),
            (COMPLETIONS, {"prompt": "x" * 40}, 32),  # whole blocks of 16, and never the last token
            (COMPLETIONS, {"prompt": ["x" * 40, "x" * 20], "n": 2}, 48),  # each prompt once
            (CHAT, {"messages": [{"role": "user", "content": "x" * 60}]}, 0),
            (CHAT, {"messages": [{"role": "user", "content": "x" * 60}]}, 64),
        ):
            asked: dict[str, Any] = {**fields, "max_tokens": 2, "stream": stream}
            if stream:
                asked["stream_options"] = {"include_usage": True}
            reply = await desk.post(path, asked, **where)
            told = events(reply.body)[-2] if stream else json.loads(reply.body)
            assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": found}
            await trio.testing.wait_all_tasks_blocked()
            assert desk.generated[-1].cached_tokens == found


async def test_usage_says_nothing_of_a_cache_that_no_engine_has_told_of() -> None:
    assert "prompt_tokens_details" not in Usage(prompt=3, completion=2).fields
    async with open_desk() as desk:
        assert (await desk.refused(COMPLETIONS, prompt="abc", max_tokens=10**6))[0] == 400
        assert desk.generated[-1].cached_tokens is None


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hé", ["hé"]),
        (["ab", "c"], ["ab", "c"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [97]], ["hi", "a"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_come_in_four_forms(prompt: Any, texts: list[str], stream: bool) -> None:
    async with open_desk() as desk:
        if stream:
            said = await _stream(desk, COMPLETIONS, prompt=prompt)
            assert [text_of(said, index) for index in range(len(texts))] == texts
        else:
            told = await desk.ask(COMPLETIONS, prompt=prompt)
            assert [choice["text"] for choice in told["choices"]] == texts
            assert [choice["index"] for choice in told["choices"]] == [*range(len(texts))]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_of_several_prompts_are_numbered_through(stream: bool) -> None:
    async with open_desk() as desk:
        asked: dict[str, Any] = {"prompt": ["ab", "cd"], "n": 2}
        if stream:
            usage = {"include_usage": True}
            said = await _stream(desk, COMPLETIONS, **asked, stream_options=usage)
            assert [text_of(said, index) for index in range(4)] == ["ab", "ab", "cd", "cd"]
            assert said[-2]["usage"] == {
                "prompt_tokens": 4,
                "completion_tokens": 12,
                "total_tokens": 16,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        else:
            told = await desk.ask(COMPLETIONS, **asked)
            assert [choice["text"] for choice in told["choices"]] == ["ab", "ab", "cd", "cd"]
            assert told["usage"]["prompt_tokens"] == 4


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with open_desk() as desk:
        told = await desk.ask(COMPLETIONS, prompt="one. two", stop=["."])
        assert told["choices"][0]["text"] == "one"
        assert told["choices"][0]["finish_reason"] == "stop"
        said = await _stream(desk, COMPLETIONS, prompt="one. two", stop=".")
        assert text_of(said) == "one"


async def test_the_knobs_of_sampling_reach_the_engine() -> None:
    async with open_desk() as desk:
        asked = {"prompt": "abc", "max_tokens": 7, "min_tokens": 7, "ignore_eos": True}
        told = await desk.ask(COMPLETIONS, **asked)
        assert told["choices"][0] | {"index": 0} == told["choices"][0]
        assert told["choices"][0]["text"] == "abcabca"
        told = await desk.ask(COMPLETIONS, prompt="abc", stop_token_ids=[ord("b")])
        assert told["usage"]["completion_tokens"] == 2


async def test_a_chat_may_be_as_long_as_there_is_room_for() -> None:
    text = ECHO + "kv = { num_blocks = 4 }\n"
    async with open_desk(text) as desk:
        told = await desk.ask(CHAT, messages=HI, ignore_eos=True)
        assert told["usage"]["total_tokens"] == 4 * 16 + 1
        assert told["choices"][0]["finish_reason"] == "length"
        told = await desk.ask(CHAT, messages=HI, max_completion_tokens=2, max_tokens=9)
        assert told["usage"]["completion_tokens"] == 2


async def test_content_may_come_in_parts_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with open_desk() as desk:
        messages = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]
        told = await desk.ask(CHAT, messages=messages)
        said = told["choices"][0]["message"]["content"]
        assert said == "system: ab\nassistant: \nassistant: "


async def test_what_nobody_knows_is_ignored() -> None:
    async with open_desk() as desk:
        told = await desk.ask(
            CHAT, messages=HI, tools=[{"type": "function"}], user="u", frobnicate={"deep": [1]}
        )
        assert told["choices"][0]["message"]["content"] == SAID


async def test_echo_and_logprobs_score_a_prompt_as_lm_eval_asks() -> None:
    async with open_desk() as desk:
        told = await desk.ask(
            COMPLETIONS, prompt=[[97, 98], [99, 100, 101]], echo=True, logprobs=1, max_tokens=1
        )
        first, second = told["choices"]
        assert first["text"] == "aba"
        assert first["logprobs"] == {
            "tokens": ["a", "b", "a"],
            "token_logprobs": [None, 0.0, 0.0],
            "top_logprobs": [None, {"b": 0.0}, {"a": 0.0}],
            "text_offset": [0, 1, 2],
        }
        assert second["text"] == "cdec"
        assert second["logprobs"]["token_logprobs"] == [None, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_a_token_more_tells_only_the_prompt(stream: bool) -> None:
    async with open_desk() as desk:
        asked: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}
        if stream:
            said = await _stream(desk, COMPLETIONS, **asked)
            assert text_of(said) == "ab"
            [choice] = said[0]["choices"]
        else:
            told = await desk.ask(COMPLETIONS, **asked)
            [choice] = told["choices"]
            assert choice["text"] == "ab"
            assert told["usage"]["completion_tokens"] == 0
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        assert choice["finish_reason"] == "length"


async def test_logprobs_of_a_stream_add_up_to_those_of_the_whole() -> None:
    async with open_desk() as desk:
        asked: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 3}
        whole = (await desk.ask(COMPLETIONS, **asked))["choices"][0]["logprobs"]
        said = await _stream(desk, COMPLETIONS, **asked)
        pieces = [event["choices"][0]["logprobs"] for event in said[:-1]]
        for key, told in whole.items():
            assert [each for piece in pieces for each in piece[key]] == told


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_tells_logprobs_with_the_bytes_of_each_token(stream: bool) -> None:
    async with open_desk() as desk:
        asked: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": 1}
        if stream:
            said = await _stream(desk, CHAT, **asked)
            told = said[1]["choices"][0]["logprobs"]["content"]
        else:
            whole = await desk.ask(CHAT, **asked)
            told = whole["choices"][0]["logprobs"]["content"][:1]
            assert whole["choices"][0]["logprobs"]["content"][-1]["token"] == "token_id:256"  # noqa: S105
        entry = {"token": "u", "logprob": 0.0, "bytes": [117]}
        assert told == [{**entry, "top_logprobs": [entry]}]


async def test_half_a_character_is_never_sent() -> None:
    async with open_desk() as desk:
        said = await _stream(desk, COMPLETIONS, prompt="h😀", max_tokens=99)
        texts = [event["choices"][0]["text"] for event in said[:-1]]
        assert texts == ["h", "😀", ""]


async def test_who_answered_and_why_is_told() -> None:
    async with open_desk() as desk:
        reply = await desk.post(COMPLETIONS, {"prompt": "a"}, x_request_id="mine")
        assert reply.headers["x-request-id"] == "mine"
        assert reply.headers["x-dpkit-engine"] in {"e-0", "e-1"}
        assert "x-dpkit-pick" not in reply.headers
        asked = {"prompt": "a", "stream": True, "n": 2}
        reply = await desk.post(COMPLETIONS, asked, x_dpkit_explain="1")
        assert sorted(reply.headers["x-dpkit-engine"].split(", ")) == ["e-0", "e-1"]
        assert reply.headers["x-dpkit-pick"].startswith("kv_pressure with score 0: 0 in flight")


async def test_B08_a_request_may_be_pinned_to_a_rank() -> None:  # noqa: N802
    async with open_desk() as desk:
        for rank in [0, 1, 1, 0]:
            asked = {"prompt": "a"}
            reply = await desk.post(
                COMPLETIONS, asked, x_data_parallel_rank=str(rank), x_dpkit_explain="1"
            )
            assert reply.headers["x-dpkit-engine"] == f"e-{rank}"
            assert reply.headers["x-dpkit-pick"].startswith("pinned: ")


async def test_H13_requests_of_one_id_are_served_side_by_side() -> None:  # noqa: N802
    async with open_desk() as desk:
        client, other = desk.client(), desk.client()
        for each in (client, other):
            body = b'{"prompt": "abc"}'
            each.send(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: same\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
        replies = [await client.reply(), await other.reply()]
        assert [reply.status for reply in replies] == [200, 200]
        assert [reply.headers["x-request-id"] for reply in replies] == ["same", "same"]
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(each.id for each in desk.generated) == ["cmpl-same", "cmpl-same~2"]


async def test_what_was_generated_is_told_to_observers() -> None:
    async with open_desk() as desk:
        await desk.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 9}, x_request_id="r")
        await trio.testing.wait_all_tasks_blocked()
        [told] = desk.generated
        assert (told.id, told.prompt_tokens, told.output_tokens) == ("cmpl-r", 3, 4)
        [engine] = told.engines
        assert engine.name.startswith("e-")
        assert told.finish_reasons == ("stop",)
        assert told.error is None
        assert told.first_token_at is not None
        assert told.received_at <= told.first_token_at <= told.ended_at
