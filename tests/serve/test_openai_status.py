"""Probes, models, tokens, statistics; and what whoever runs the server may ask for."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.errors import ConfigError, ModelNotFound
from dpkit.nursery.reload import Plan
from dpkit.serve.face import Ending
from dpkit.testing.http import render
from tests.nursery.lab import settle
from tests.serve.desk import COMPLETIONS, ECHO, SLOW, Desk, error_of, events, open_desk, text_of

if TYPE_CHECKING:
    from trio.testing import MockClock

    from dpkit.serve.face import Request, Responder
    from dpkit.testing.http import Reply


async def test_probes_answer_get_and_head() -> None:
    async with open_desk() as desk:
        for path in ("/health", "/ready", "/version", "/v1/models", "/statistics"):
            got = await desk.get(path)
            head = await desk.client().request("HEAD", path)
            assert got.status == head.status == 200
            assert head.body == b""
        assert (await desk.get("/health")).body == b""


async def test_a_ready_server_says_who_is_how() -> None:
    async with open_desk() as desk:
        reply = await desk.get("/ready")
        assert json.loads(reply.body) == {
            "status": "ready",
            "engines": {"e-0": "ready", "e-1": "ready"},
        }


async def test_the_model_is_listed_with_its_length() -> None:
    async with open_desk(ECHO + "kv = { num_blocks = 4 }\n") as desk:
        [model] = json.loads((await desk.get("/v1/models")).body)["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("echo", "model", 65)
        assert json.loads((await desk.get("/v1/models/echo")).body) == model
        reply = await desk.get("/v1/models/other")
        assert (reply.status, error_of(reply)["code"]) == (404, "model_not_found")


async def test_a_model_may_have_another_name_and_slashes_in_it() -> None:
    async with open_desk(f"{ECHO}[server]\nmodel_name = 'org/echo-1'\n") as desk:
        for path in ("/v1/models/org/echo-1", "/v1/models/org%2Fecho-1"):
            model = json.loads((await desk.get(path)).body)
            assert (model["id"], model["root"]) == ("org/echo-1", "echo")
        assert (await desk.ask(COMPLETIONS, model="org/echo-1", prompt="a"))["model"] == model["id"]
        assert (await desk.refused(COMPLETIONS, model="echo", prompt="a"))[0] == 404


async def test_texts_and_tokens_become_each_other() -> None:
    async with open_desk() as desk:
        told = await desk.ask("/tokenize", model="echo", prompt="hé")
        assert told == {"count": 3, "max_model_len": 65537, "tokens": [104, 195, 169]}
        told = await desk.ask("/tokenize", messages=[{"role": "user", "content": "x"}])
        assert bytes(told["tokens"]) == b"user: x\nassistant: "
        assert await desk.ask("/detokenize", tokens=[104, 195, 169]) == {"prompt": "hé"}
        assert (await desk.refused("/tokenize"))[1]["param"] == "prompt"
        assert (await desk.refused("/detokenize"))[1]["param"] == "tokens"
        for tokens, says in (
            ([104, 99999999], "token ids must be 0 to 256, not 99999999 (at index 1)"),
            ([-1], "token ids must be 0 or more, in 31 bits, not -1 (at index 0)"),
        ):
            status, error = await desk.refused("/detokenize", tokens=tokens)
            assert (status, error["message"], error["param"]) == (400, says, "tokens")
        assert (await desk.refused("/tokenize", model="other", prompt="a"))[0] == 404


async def test_O10_a_long_prompt_is_tokenized_elsewhere() -> None:
    """The loop goes on meanwhile, and the answer is the same."""
    async with open_desk() as desk:
        text = "x" * 60_000
        told = await desk.ask("/tokenize", prompt=text)
        assert told["count"] == 60_000
        tokens = told["tokens"]
        assert (await desk.ask("/detokenize", tokens=tokens))["prompt"] == text
        for prompt in (text, tokens):
            told = await desk.ask(COMPLETIONS, prompt=prompt, max_tokens=3, echo=True)
            assert told["choices"][0]["text"] == text + "xxx"


async def test_statistics_are_json_all_the_way_down(autojump_clock: MockClock) -> None:
    async with open_desk(SLOW) as desk, trio.open_nursery() as nursery:
        nursery.start_soon(partial(desk.ask, COMPLETIONS, prompt="abcdef"))
        await trio.sleep(0.25)
        told = json.loads((await desk.get("/statistics")).body)
        assert told["status"] == "ready"
        assert told["ranks"] == {"e-0": 0, "e-1": 1}
        assert sum(told["clients"][0]["inflight"].values()) == 1
        assert told["clients"][0]["requests"][0]["request_id"].startswith("cmpl-")
        assert [engine["engine"] for engine in told["engines"]] == ["e-0", "e-1"]
        assert told["clients"][0]["admission"]["queued_by_tenant"] == {}


async def test_metrics_are_there_if_somebody_brings_them() -> None:
    async def metrics(_request: Request, responder: Responder) -> None:
        responder.respond(200, (), b"up 1\n")

    async with open_desk() as desk:
        assert (await desk.get("/metrics")).status == 404
    async with open_desk(metrics=metrics) as desk:
        assert (await desk.get("/metrics")).body == b"up 1\n"


async def test_an_observer_that_fails_is_its_own_affair(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_generated: object) -> None:
        raise KeyError("seen nothing")

    async with open_desk() as desk:
        desk.front.observers.insert(0, fail)
        await desk.ask(COMPLETIONS, prompt="a")
        await trio.testing.wait_all_tasks_blocked()
        assert len(desk.generated) == 1
    assert "seen nothing" in caplog.text
    caplog.clear()


class TestAdmin:
    """Drain, scale, reload."""

    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEST_ADMIN_KEYS", "boss")

    KEYS = "[server]\nadmin_key_env = 'TEST_ADMIN_KEYS'\n"

    @staticmethod
    async def order(desk: Desk, path: str, body: Any) -> Reply:
        return await desk.post(path, body, authorization="Bearer boss")

    async def test_without_a_key_or_an_address_there_are_no_such_routes(self) -> None:
        async with open_desk() as desk:
            for path in ("/admin/drain", "/admin/scale", "/admin/reload"):
                assert (await self.order(desk, path, {})).status == 404

    async def test_more_engines_and_fewer(self) -> None:
        async with open_desk(ECHO + self.KEYS) as desk:
            for count in (3, 1):
                reply = await self.order(desk, "/admin/scale", {"group": "e", "count": count})
                assert reply.status == 200
                assert len(json.loads(reply.body)["engines"]) == count

    @pytest.mark.parametrize(
        "body",
        [
            {"group": "e", "count": 0},  # N02
            {"group": "e", "count": -1},
            {"group": "f", "count": 1},
            {"group": "e"},
            {"group": "e", "count": 3, "deadline": "soon"},
            {"group": "e", "count": 3, "replicas": 3},  # L03
            b"",
        ],
    )
    async def test_L03_an_order_that_is_not_understood_changes_nothing(self, body: Any) -> None:
        async with open_desk(ECHO + self.KEYS) as desk:
            reply = await self.order(desk, "/admin/scale", body)
            assert reply.status == 400
            assert error_of(reply)["message"]
            assert len(desk.cluster.engines) == 2

    async def test_a_drain_is_answered_when_all_has_ended(
        self,
        autojump_clock: MockClock,  # noqa: ARG002
    ) -> None:
        async with open_desk(SLOW + self.KEYS) as desk, trio.open_nursery() as nursery:
            nursery.start_soon(partial(desk.ask, COMPLETIONS, prompt="abcdefgh"))
            await trio.sleep(0.25)
            began_at = trio.current_time()
            reply = await self.order(desk, "/admin/drain", b"")
            assert json.loads(reply.body) == {"status": "drained"}
            assert round(trio.current_time() - began_at, 3) >= 0.5
            assert (await desk.get("/ready")).status == 503
            assert (await desk.refused(COMPLETIONS, prompt="a"))[0] == 503

    async def test_a_drain_with_a_deadline_ends_what_is_left_with_an_event(
        self,
        autojump_clock: MockClock,  # noqa: ARG002
    ) -> None:
        async with open_desk(SLOW + self.KEYS) as desk:
            client = desk.client()
            body = {"prompt": "abc", "ignore_eos": True, "max_tokens": 1000, "stream": True}
            client.send(render("POST", COMPLETIONS, json.dumps(body).encode()))
            await trio.sleep(0.25)
            reply = await self.order(desk, "/admin/drain", {"deadline": "300ms"})
            assert reply.status == 200
            *said, last = events((await client.reply()).body)
            assert text_of(said) == "abcab"
            assert last["error"]["code"] == "draining"
            assert last["error"]["message"] == (
                "the server is stopping: the answer was cut off after 5 tokens; "
                "ask again elsewhere or later"
            )
            await settle()
            assert [each.ending for each in desk.answered] == [Ending.FINISHED, Ending.SHUTDOWN]

    async def test_a_reload_says_what_has_changed(self) -> None:
        async def reload() -> Plan:
            return Plan(changes=("balancer.policy: 'a' → 'b'",))

        async with open_desk(ECHO + self.KEYS, reload=reload) as desk:
            reply = await self.order(desk, "/admin/reload", {})
            assert json.loads(reply.body) == {"changes": ["balancer.policy: 'a' → 'b'"]}
            reply = await self.order(desk, "/admin/reload", {"file": "other.toml"})  # L03
            assert (reply.status, error_of(reply)["type"]) == (400, "invalid_request_error")

    @pytest.mark.parametrize(
        "error", [ConfigError(["f.toml:1:1: a: b", "f.toml:2:1: c: d"]), ModelNotFound("no x")]
    )
    async def test_a_reload_of_a_wrong_file_is_400_with_all_that_is_wrong(
        self, error: Exception
    ) -> None:
        async def reload() -> Plan:
            raise error

        async with open_desk(ECHO + self.KEYS, reload=reload) as desk:
            reply = await self.order(desk, "/admin/reload", {})
            assert (reply.status, error_of(reply)["message"]) == (400, str(error))

    async def test_without_a_file_there_is_nothing_to_reload(self) -> None:
        async with open_desk(ECHO + self.KEYS) as desk:
            assert (await self.order(desk, "/admin/reload", {})).status == 501
