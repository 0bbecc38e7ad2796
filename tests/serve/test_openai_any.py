"""Whatever is asked, in whatever form: an answer, or a refusal in words; nothing is left of it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkit.serve.openapi import document
from dpkit.serve.requests import ChatBody, CompletionBody
from dpkit.serve.routes import ADMIN, API
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, error_of, events, open_desk

if TYPE_CHECKING:
    from dpkit.testing.http import Reply

EXAMPLES = int(os.environ.get("DPKIT_TEST_EXAMPLES", "50"))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SMALL = st.integers(-2, 30)
PROMPTS = (
    st.text(max_size=20)
    | st.lists(st.text(max_size=5), max_size=3)
    | st.lists(st.integers(-1, 300), max_size=8)
    | st.lists(st.lists(st.integers(0, 256), max_size=4), max_size=3)
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "developer", ""])},
        optional={
            "content": st.none()
            | st.text(max_size=9)
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}))
        },
    ),
    max_size=3,
)
SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["echo", "gpt-5", None]),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "max_tokens": SMALL,
    "max_completion_tokens": SMALL,
    "min_tokens": SMALL,
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "top_k": SMALL,
    "min_p": st.floats(-1, 2),
    "seed": st.integers(),
    "n": st.integers(-1, 4),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
    "stop_token_ids": st.lists(SMALL, max_size=2),
    "ignore_eos": st.booleans(),
    "presence_penalty": st.floats(-3, 3),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-200, 200), max_size=2),
    "priority": st.integers(),
    "cache_salt": st.text(max_size=3),
    "logprobs": st.booleans() | SMALL,
    "top_logprobs": SMALL,
    "echo": st.booleans(),
    "best_of": SMALL,
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "tools": JSON,
}
BODIES = st.fixed_dictionaries(
    {},
    optional={"prompt": PROMPTS, "messages": MESSAGES, "frobnicate": JSON}
    | {name: strategy | st.none() for name, strategy in SENSIBLE.items()},
)
WILD = st.dictionaries(
    st.sampled_from([*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__]), JSON
)


def _check(reply: Reply) -> None:
    assert reply.status in {200, 400, 404}, reply
    assert reply.is_complete
    if reply.status != 200:
        assert error_of(reply)["message"]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        *_, last = events(reply.body)
        assert last == "[DONE]" or last["error"]["type"] == "invalid_request_error"
    else:
        assert json.loads(reply.body)["choices"]


@settings(max_examples=EXAMPLES)
@given(st.lists(BODIES | WILD | JSON, min_size=1, max_size=5))
def test_anything_is_answered_or_refused_in_words(bodies: list[Any]) -> None:
    async def ask() -> None:
        async with open_desk(ECHO) as desk:
            for body in bodies:
                data = json.dumps(body).encode()
                for path in (COMPLETIONS, CHAT):
                    _check(await desk.post(path, data))
                for path in ("/tokenize", "/detokenize"):
                    assert (await desk.post(path, data)).status in {200, 400, 404}

    trio.run(ask)


async def test_the_document_tells_what_is_there() -> None:
    async with open_desk() as desk:
        told = json.loads((await desk.get("/openapi.json")).body)
        assert told["openapi"] == "3.1.0"
        assert "/admin/drain" not in told["paths"]
        completions = told["paths"][COMPLETIONS]["post"]
        body = completions["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/CompletionBody"}
        assert set(told["components"]["schemas"]["CompletionBody"]["properties"]) >= {
            "prompt",
            "max_tokens",
            "stream",
        }
        for path, methods in told["paths"].items():
            for method in methods:
                client = desk.client()
                reply = await client.request(method.upper(), path.format(name="echo"))
                assert reply.status != 404 or path == "/metrics"
                assert methods[method]["summary"]


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": [[1, 2], [3]], "n": 2, "stop": ["x"], "logit_bias": {"1": 3}}, True),
        ({"prompt": [1, 2], "temperature": None, "frobnicate": 3}, True),
        ({"prompt": 3}, False),
        ({"prompt": "a", "temperature": "hot"}, False),
    ],
)
def test_its_schemas_are_what_is_read(body: dict[str, Any], is_right: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'dpkit[dev]' brings it")
    told = document(API + ADMIN)
    schema = {"$ref": "#/components/schemas/CompletionBody", "components": told["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(body) is is_right
