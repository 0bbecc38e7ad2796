"""What goes wrong over HTTP: the right status, a body for clients, and when to come back."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import EngineLost
from dpkit.names import Cause
from dpkit.serve.face import Ending
from dpkit.serve.front import Front
from dpkit.serve.routes import API, Router
from dpkit.testing.faults import CRASH, HANG
from dpkit.testing.http import Client, open_server, render
from dpkit.testing.idle import check_idle
from dpkit.text.bytes import ByteDecoder, ByteTokenizer
from tests.nursery.lab import Lab, settle
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, SLOW, error_of, events, open_desk, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import LoadView, Pass

ONE_AT_ONCE = SLOW + "[admission]\nmax_inflight = 1\nmax_queued = 1\nqueue_timeout = '3s'\n"
HI = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "abc", "ignore_eos": True, "max_tokens": 1000}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "prompt is missing; give text or token ids"),
        ({"prompt": 3}, "prompt", "not 3"),
        ({"prompt": []}, "prompt", "not []"),
        ({"prompt": ["a", 1]}, "prompt", "it has 'a'"),
        ({"prompt": [True]}, "prompt", "it has True"),
        ({"prompt": ""}, "prompt", "a prompt is empty"),
        ({"prompt": [[1], []]}, "prompt", "a prompt is empty"),
        ({"prompt": [-1]}, "prompt", "token ids must be 0 or more"),
        ({"prompt": [300]}, None, "token ids must be 0 to 256"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature must be a number from 0"),
        (
            {"prompt": "a", "temperature": "hot"},
            "temperature",
            "Expected `float | null`, got `str`",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"prompt": "a", "max_tokens": 10**6}, "max_tokens", "more than the KV cache's"),
        ({"prompt": "a" * 70_000}, "prompt", "70000 prompt tokens are 4464 more than the 65536"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "from 0 to max_tokens"),
        ({"prompt": "a", "n": 0}, "n", "from 1 to 128"),
        ({"prompt": ["a"] * 100, "n": 100}, "n", "100 prompts and n = 100 are more than 1024"),
        ({"prompt": "a", "best_of": 2}, "best_of", "best_of = 2 cannot be had"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "cannot be had"),
        ({"prompt": "a", "stop": [""]}, "stop", "not empty"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "Expected `int`, got `str`"),
        ({"prompt": "a", "logit_bias": {"1": 200}}, "logit_bias", "from -100 to 100"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"prompt": "a", "timeout": 0}, None, "more than 0 seconds"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "needs stream"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "grammar"),
        ({"prompt": "a", "guided_choice": ["b"]}, "guided_choice", "grammar"),
        ({"prompt": "a", "n": 129}, "n", "from 1 to 128"),
        ({"prompt": "a", "n": 2000}, "n", "1 prompt and n = 2000 are more than 1024"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_with_a_completion_is_said_by_name(
    fields: dict[str, Any], param: str | None, says: str, stream: bool
) -> None:
    async with open_desk() as desk:
        more: dict[str, Any] = {"stream": True} if stream and "stream_options" not in fields else {}
        status, error = await desk.refused(COMPLETIONS, **fields, **more)
        assert status == 400
        assert says in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "u", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "u", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "u", "content": "x"}], "functions": [{}]}, "functions"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens"),
        ({"messages": [*HI, {"role": "u", "content": [{}]}]}, "messages[1].content[0].type"),
    ],
)
async def test_what_is_wrong_with_a_chat_is_said_by_name(
    fields: dict[str, Any], param: str
) -> None:
    async with open_desk() as desk:
        status, error = await desk.refused(CHAT, **fields)
        assert (status, error["param"]) == (400, param)
        assert param in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, rb'{"prompt": "\ud800"}'),
        (COMPLETIONS, rb'{"prompt": ["a", "\udcff and more"]}'),
        (COMPLETIONS, rb'{"prompt": "a", "model": "\ud800"}'),
        (COMPLETIONS, rb'{"prompt": "\ud800abc"}'),
        (COMPLETIONS, rb'{"prompt": "\ud800abcd"}'),
        (CHAT, rb'{"messages": [{"role": "user", "content": "\uDBFF"}]}'),
        ("/tokenize", rb'{"prompt": "a\udc00"}'),
    ],
)
async def test_half_of_a_surrogate_pair_is_told_from_what_is_no_json(
    path: str, body: bytes
) -> None:
    async with open_desk() as desk:
        error = error_of(await desk.post(path, body))
        assert error["message"] == ("the body is no Unicode text: it has half of a surrogate pair")
        assert error["code"] == "invalid_json"
        cut = error_of(await desk.post(path, rb'{"prompt": "a\\ud800"'))
        assert cut["message"].startswith("the body is no JSON: ")


TOKENS = [7] * 70_000


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([*TOKENS, "never read"], "70001 prompt tokens are 4465 more than the 65536"),
        ([[7], [*TOKENS, None]], "70001 prompt tokens are 4465 more than the 65536"),
        ([[7]] * 40_000, "40000 prompts are more than 1024 answers"),
        ("a" * (256 * 65_536 + 1), "16777217 characters has more than the 65536 tokens"),
    ],
    ids=["tokens", "rows", "many", "text"],
)
async def test_what_is_far_too_long_is_refused_unread(prompt: Any, says: str) -> None:
    async with open_desk() as desk:
        status, error = await desk.refused(COMPLETIONS, prompt=prompt)
        assert (status, error["param"]) == (400, "prompt")
        assert says in error["message"]
        assert (await desk.ask(COMPLETIONS, prompt="a"))["choices"]


async def test_long_prompts_that_fit_are_read_whole() -> None:
    rows = [list(b"abc" * 10_000), list(b"d" * 20_000)]
    async with open_desk() as desk:
        for prompt in (rows, rows[0], ["abc" * 10_000, "d" * 20_000]):
            told = await desk.ask(COMPLETIONS, prompt=prompt, max_tokens=2)
            texts = [choice["text"] for choice in told["choices"]]
            assert texts == (["ab"] if prompt is rows[0] else ["ab", "dd"])
        for wrong, says in (
            (b'{"prompt": [[' + b"7," * 40_000 + b"7x]]}", "the body is no JSON"),
            (b'{"prompt": [' + b"7," * 40_000 + b'"a"]}', "it has 7"),
        ):
            error = error_of(await desk.post(COMPLETIONS, wrong))
            assert says in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 70_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "a" * 65_530]}, "max_tokens"),
        (CHAT, {"content": "a" * 70_000}, "messages"),
        (CHAT, {"content": "a", "max_tokens": 100_000}, "max_tokens"),
        (CHAT, {"content": "a", "max_completion_tokens": 100_000}, "max_completion_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_long_is_said_by_name(
    path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    if path == CHAT:
        message = {"role": "user", "content": fields["content"]}
        fields = {"messages": [message]} | {k: v for k, v in fields.items() if k != "content"}
    async with open_desk() as desk:
        status, error = await desk.refused(path, **fields, stream=stream)
        assert (status, error["code"], error["param"]) == (400, "request_rejected", param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_what_is_no_json_is_refused(body: bytes) -> None:
    async with open_desk() as desk:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            reply = await desk.post(path, body)
            assert reply.status == 400
            assert error_of(reply)["message"]


async def test_another_model_is_not_found_whatever_else_is_wrong() -> None:
    async with open_desk() as desk:
        status, error = await desk.refused(CHAT, model="gpt-5", messages=[])
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'gpt-5'" in error["message"]
        assert "'echo'" in error["message"]


async def test_paths_and_methods_that_are_not_there() -> None:
    async with open_desk() as desk:
        reply = await desk.get("/v1/embeddings")
        assert (reply.status, error_of(reply)["code"]) == (404, "not_found")
        reply = await desk.get(COMPLETIONS)
        assert reply.status == 405
        assert reply.headers["allow"] == "POST"
        assert error_of(reply)["message"] == "/v1/completions takes POST, not GET"


async def test_a_body_that_is_too_large_is_413() -> None:
    async with open_desk(f"{ECHO}[server]\nmax_body = '1KiB'\n") as desk:
        reply = await desk.post(COMPLETIONS, {"prompt": "a" * 2000})
        assert (reply.status, error_of(reply)["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize("rank", ["9", "-1", "x", "", "0x1"])
async def test_L09_a_rank_that_is_not_there_is_400_with_those_that_are(rank: str) -> None:
    async with open_desk() as desk:
        reply = await desk.post(COMPLETIONS, {"prompt": "a"}, x_data_parallel_rank=rank)
        assert reply.status == 400
        assert "ranks are 0, 1" in error_of(reply)["message"]


class TestKeys:
    """API keys, from the environment."""

    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEST_KEYS", "one,two")
        monkeypatch.setenv("TEST_ADMIN_KEYS", "boss")

    TOML = f"{ECHO}[server]\napi_key_env = 'TEST_KEYS'\n"

    @pytest.mark.parametrize(
        "header", [None, "", "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer oné"]
    )
    async def test_who_brings_none_or_a_wrong_one_is_401(self, header: str | None) -> None:
        async with open_desk(self.TOML) as desk:
            headers = {} if header is None else {"authorization": header}
            for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
                reply = await desk.post(path, b"not even JSON", **headers)
                assert reply.status == 401
                assert error_of(reply)["type"] == "authentication_error"
                assert reply.headers["www-authenticate"] == "Bearer"
            assert (await desk.get("/v1/models", **headers)).status == 401
            assert (await desk.get("/statistics", **headers)).status == 401
            for path in ("/health", "/ready", "/version"):
                assert (await desk.get(path, **headers)).status == 200

    @pytest.mark.parametrize("header", ["Bearer one", "bearer two"])
    async def test_each_key_opens(self, header: str) -> None:
        async with open_desk(self.TOML) as desk:
            reply = await desk.post(COMPLETIONS, {"prompt": "a"}, authorization=header)
            assert reply.status == 200

    async def test_without_keys_any_authorization_will_do(self) -> None:
        async with open_desk() as desk:
            reply = await desk.post(COMPLETIONS, {"prompt": "a"}, authorization="Bearer x")
            assert reply.status == 200

    async def test_an_admin_key_opens_no_more_than_admin_routes(self) -> None:
        async with open_desk(f"{self.TOML}admin_key_env = 'TEST_ADMIN_KEYS'\n") as desk:
            admin, user = {"authorization": "Bearer boss"}, {"authorization": "Bearer one"}
            assert (await desk.get("/v1/models", **admin)).status == 401
            assert (await desk.post("/admin/drain", {}, **user)).status == 401
            assert (await desk.post("/admin/drain", {}, **admin)).status == 200

    async def test_K05_each_key_is_a_tenant_of_its_own(
        self,
        autojump_clock: Any,  # noqa: ARG002
    ) -> None:
        toml = ONE_AT_ONCE.replace("max_queued = 1\n", "max_queued = 9\n")
        toml = f"{toml}[server]\napi_key_env = 'TEST_KEYS'\n".replace("'3s'", "'60s'")
        async with open_desk(toml) as desk, trio.open_nursery() as nursery:
            order: list[str] = []

            async def ask(key: str) -> None:
                asked = {"prompt": "abc", "max_tokens": 3}
                await desk.post(COMPLETIONS, asked, authorization=f"Bearer {key}")
                order.append(key)

            for key in ["one", "one", "one", "one", "two"]:
                nursery.start_soon(ask, key)
                await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as waiting:
                waiting.start_soon(trio.sleep, 5)
            # The one request of the second tenant does not wait for all of the first.
            assert order.index("two") <= 2


async def test_until_the_cluster_is_up_it_is_503_and_when_to_come_back() -> None:
    front = Front()
    async with open_server(Router(front, API)) as server:

        async def ask(method: str, path: str, body: bytes = b"") -> Any:
            return await Client.of(server).request(method, path, body)

        for path in (COMPLETIONS, CHAT):
            reply = await ask("POST", path, b'{"prompt": "a", "messages": []}')
            assert reply.status == 503
            assert error_of(reply)["code"] == "starting"
            assert int(reply.headers["retry-after"]) >= 1
        for path in ("/v1/models", "/statistics"):
            assert (await ask("GET", path)).status == 503
        reply = await ask("GET", "/ready")
        assert reply.status == 503
        assert json.loads(reply.body) == {"status": "starting", "engines": {}}
        reply = await ask("GET", "/health")
        assert (reply.status, reply.body) == (200, b"")


async def test_a_draining_cluster_is_503_and_goes_on_with_what_it_has(
    autojump_clock: Any,
) -> None:
    async with open_desk(SLOW) as desk, trio.open_nursery() as nursery:
        before = desk.client()

        async def finish_before() -> None:
            asked = json.dumps({"prompt": "abcdefgh", "stream": True}).encode()
            reply = await before.request("POST", COMPLETIONS, asked)
            assert text_of(events(reply.body)) == "abcdefgh"

        nursery.start_soon(finish_before)
        await trio.sleep(0.25)
        desk.front.drain()
        assert (await desk.get("/ready")).status == 503
        assert (await desk.get("/health")).status == 200
        nursery.start_soon(desk.cluster.drain)
        await trio.sleep(0.1)
        for stream in (False, True):
            reply = await desk.post(COMPLETIONS, {"prompt": "x", "stream": stream})
            assert (reply.status, error_of(reply)["code"]) == (503, "draining")
            assert int(reply.headers["retry-after"]) >= 1


async def test_K09_what_is_too_much_is_429_at_once_and_when_to_come_back(
    autojump_clock: Any,
) -> None:
    async with open_desk(ONE_AT_ONCE) as desk, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(desk.post, COMPLETIONS, LONG | {"max_tokens": 20})
        await trio.sleep(0.35)
        began_at = trio.current_time()
        for stream in (False, True):
            reply = await desk.post(COMPLETIONS, LONG | {"stream": stream})
            assert reply.status == 429
            assert error_of(reply)["type"] == "rate_limit_error"
            assert int(reply.headers["retry-after"]) >= 1
        assert trio.current_time() == began_at
        status, _ = await desk.refused(COMPLETIONS, prompt=["a", "b"], n=2)
        assert status == 429


async def test_who_waits_too_long_in_the_queue_is_429(autojump_clock: Any) -> None:
    async with open_desk(ONE_AT_ONCE) as desk, trio.open_nursery() as nursery:
        client = desk.client()
        nursery.start_soon(client.request, "POST", COMPLETIONS, json.dumps(LONG).encode())
        await trio.sleep(0.05)
        reply = await desk.post(COMPLETIONS, LONG | {"stream": True})
        assert (reply.status, error_of(reply)["code"]) == (429, "overloaded")
        assert "admission.queue_timeout" in error_of(reply)["message"]
        client.close()
        await settle()


async def test_a_deadline_of_ones_own_is_504(autojump_clock: Any) -> None:
    async with open_desk(SLOW) as desk:
        reply = await desk.post(COMPLETIONS, LONG | {"timeout": 0.45})
        assert (reply.status, error_of(reply)["code"]) == (504, "deadline_exceeded")
        reply = await desk.post(COMPLETIONS, LONG | {"timeout": 0.45, "stream": True})
        assert reply.status == 200
        *said, last = events(reply.body)
        assert text_of(said) == "abca"
        assert last["error"]["code"] == "deadline_exceeded"
        await settle()
        assert [(each.status, each.ending) for each in desk.answered] == [
            (504, Ending.FINISHED),
            (200, Ending.ERROR),
        ]


class Unreadable(ByteTokenizer):
    """Cannot decode an ``x``."""

    def decoder(self, prompt_token_ids: Sequence[int] = ()) -> ByteDecoder:  # noqa: ARG002
        return _Unreadable()


class _Unreadable(ByteDecoder):
    def feed(self, token_ids: Sequence[int]) -> str:
        if ord("x") in token_ids:
            raise ValueError("x marks a secret spot")
        return super().feed(token_ids)


class UnreadableModel(EchoModel):
    """As its tokenizer."""

    def tokenizer(self) -> ByteTokenizer:
        return Unreadable()


@pytest.mark.parametrize("prompt", ["x", "abx", "abxyz"])
async def test_a_bug_is_500_or_an_event_and_for_the_log_alone(
    prompt: str, caplog: pytest.LogCaptureFixture
) -> None:
    toml = f"[[engines]]\nmodel = '{__name__}:UnreadableModel'\n"
    async with open_desk(toml) as desk:
        reply = await desk.post(COMPLETIONS, {"prompt": prompt})
        assert (reply.status, error_of(reply)["type"]) == (500, "server_error")
        assert b"secret" not in reply.body
        assert "x marks a secret spot" in caplog.text
        reply = await desk.post(COMPLETIONS, {"prompt": prompt, "stream": True})
        assert b"secret" not in reply.body
        if prompt == "x":
            assert reply.status == 500
        else:
            *said, last = events(reply.body)
            assert text_of(said) == "ab"
            assert last["error"]["type"] == "server_error"
    caplog.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_J05_an_engine_lost_before_the_first_token_is_made_good_elsewhere(
    stream: bool, autojump_clock: Any
) -> None:
    lab = Lab()
    lab.faulty[0].plan = {0: CRASH}
    with lab.config() as config:
        async with open_desk(config) as desk:
            asked = {"prompt": "abc", "stream": stream}
            reply = await desk.post(COMPLETIONS, asked, x_data_parallel_rank="1")
            reply = await desk.post(COMPLETIONS, asked)
            assert reply.status == 200
            assert reply.headers["x-dpkit-engine"] == "e1-0"


@pytest.mark.parametrize("stream", [False, True])
async def test_J05_an_engine_lost_where_nobody_else_may_go_is_503(
    stream: bool, autojump_clock: Any
) -> None:
    lab = Lab()
    lab.faulty[0].plan = {0: CRASH}
    with lab.config() as config:
        async with open_desk(config) as desk:
            asked = {"prompt": "abc", "stream": stream}
            reply = await desk.post(COMPLETIONS, asked, x_data_parallel_rank="0")
            assert (reply.status, error_of(reply)["code"]) == (503, "engine_lost")
            assert int(reply.headers["retry-after"]) >= 1


async def test_J08_an_engine_lost_in_midstream_is_an_event_and_no_done(
    autojump_clock: Any,
) -> None:
    lab = Lab()
    lab.faulty[0].plan = lab.faulty[1].plan = {3: CRASH}
    with lab.config() as config:
        async with open_desk(config) as desk:
            reply = await desk.post(COMPLETIONS, {"prompt": "abcdefgh", "stream": True})
            assert reply.status == 200
            assert reply.is_complete
            *said, last = events(reply.body)
            assert text_of(said) == "abc"
            assert all(event["choices"][0]["finish_reason"] is None for event in said)
            assert last["error"]["code"] == "engine_lost"
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(desk.generated[0].error, EngineLost)


async def test_J07_what_was_cut_off_is_no_success_in_one_piece(autojump_clock: Any) -> None:
    lab = Lab()
    lab.faulty[0].plan = lab.faulty[1].plan = {3: CRASH}
    with lab.config() as config:
        async with open_desk(config) as desk:
            reply = await desk.post(COMPLETIONS, {"prompt": "abcdefgh"})
            assert (reply.status, error_of(reply)["code"]) == (503, "engine_lost")


async def test_one_of_several_choices_that_fails_ends_them_all(autojump_clock: Any) -> None:
    lab = Lab()
    lab.faulty[0].plan = {3: CRASH}
    with lab.config() as config:
        async with open_desk(config) as desk:
            asked: dict[str, Any] = {"prompt": ["abcdefgh"] * 2, "max_tokens": 100}
            reply = await desk.post(COMPLETIONS, asked | {"stream": True, "ignore_eos": True})
            *said, last = events(reply.body)
            assert "error" in last
            assert sorted([text_of(said, 0), text_of(said, 1)])[1] == "abc"
            await trio.sleep(0.2)
            check_idle(desk.cluster)


async def test_J01_bad_requests_eject_no_engine() -> None:
    async with open_desk() as desk:
        for _ in range(20):
            assert (await desk.refused(COMPLETIONS, prompt="a", max_tokens=10**6))[0] == 400
        statistics = desk.cluster.statistics()
        assert (statistics.health.serving, statistics.health.ejections) == (2, 0)


async def test_J10_while_all_engines_are_away_a_request_waits_for_the_first(
    autojump_clock: Any,
) -> None:
    lab = Lab()
    lab.faulty[0].plan = lab.faulty[1].plan = {0: CRASH}
    with lab.config() as config:
        async with open_desk(config) as desk:
            for rank in "01":
                asked = {"prompt": "abc"}
                reply = await desk.post(COMPLETIONS, asked, x_data_parallel_rank=rank)
                assert reply.status == 503
            reply = await desk.get("/ready")
            assert reply.status == 503
            assert json.loads(reply.body)["status"] == "unready"
            began_at = trio.current_time()
            reply = await desk.post(COMPLETIONS, {"prompt": "abc", "timeout": 10})
            assert reply.status == 200
            assert trio.current_time() > began_at + 0.5
            assert (await desk.get("/ready")).status == 200


async def test_E03_an_engine_that_hangs_is_not_ready(autojump_clock: Any) -> None:
    lab = Lab()
    lab.faulty[0].plan = lab.faulty[1].plan = {0: HANG}
    with lab.config() as config:
        async with open_desk(config) as desk, trio.open_nursery() as nursery:
            for rank in "01":
                ask = partial(desk.post, x_data_parallel_rank=rank)
                nursery.start_soon(ask, COMPLETIONS, {"prompt": "abc"})
            await trio.sleep(5.5)
            assert (await desk.get("/ready")).status == 200  # the watchdog looks twice
            await trio.sleep(0.6)
            assert (await desk.get("/ready")).status == 503
            assert (await desk.get("/health")).status == 200


async def test_M07_every_request_ends_once_with_who_caused_it(autojump_clock: Any) -> None:
    async with open_desk(SLOW) as desk:
        await desk.ask(COMPLETIONS, prompt="abc")
        await desk.refused(COMPLETIONS, prompt="a", max_tokens=10**6)
        await desk.refused(COMPLETIONS, **LONG, timeout=0.3)
        client = desk.client()
        client.send(render("POST", COMPLETIONS, json.dumps(LONG).encode()))
        await trio.sleep(0.3)
        client.close()
        await trio.sleep(0.3)
        causes = desk.cluster.client.statistics().causes
        assert causes == {Cause.STOP: 1, Cause.REFUSED: 1, Cause.DEADLINE: 1, Cause.CLIENT: 1}
        assert [answered.status for answered in desk.answered] == [200, 400, 504, 499]


class Clueless(ExpectedTtft):
    """Raises at whatever comes."""

    def on_charge(self, *_: object) -> None:
        raise ValueError("no idea")


class Undecided(ExpectedTtft):
    """Raises when it is asked who may go."""

    def open_pass(self, _view: LoadView) -> Pass:
        raise ValueError("no idea")


class Fickle(Clueless):
    """Raises when it is asked whether this one may go, too."""

    def open_pass(self, _view: LoadView) -> Pass:
        return Never()


class Never:
    """A pass that sends nobody."""

    is_over = False

    def offer(self, prospect: object, index: int | None = None) -> int | None:  # noqa: ARG002
        raise ValueError("no idea")


@pytest.mark.parametrize(
    ("policy", "binding"),
    [(Clueless, "early"), (Clueless, "late"), (Undecided, "late"), (Fickle, "late")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_policy_that_raises_is_named_and_its_traceback_is_nobodys(
    caplog: pytest.LogCaptureFixture, policy: type, binding: str, stream: bool
) -> None:
    named = f"{__name__}:{policy.__name__}"
    settings = f"[balancer]\npolicy = '{named}'\nbinding = '{binding}'\n"
    caplog.set_level("INFO")
    async with open_desk(ECHO + settings) as desk:
        status, error = await desk.refused(COMPLETIONS, prompt="a", stream=stream)
        assert (status, error["code"]) == (500, "policy_failed")
        assert error["message"].startswith(f"policy {named} raised ValueError: no idea; that was ")
        assert not any(record.exc_info for record in caplog.records)
        assert any(f"policy {named} raised" in record.getMessage() for record in caplog.records)
        check_idle(desk.cluster)
