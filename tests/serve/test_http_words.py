"""What is said of what goes wrong over HTTP, word for word."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import dpkit.serve
from dpkit.messages import EngineOutput
from dpkit.names import FinishReason
from dpkit.serve import listeners
from dpkit.serve.asgi import AsgiApp
from dpkit.serve.asgiresponder import AsgiResponder, CutOff
from dpkit.serve.face import Ending
from dpkit.serve.front import Front
from dpkit.serve.listeners import ListenFailed, open_listeners
from dpkit.serve.parser import Refusal
from dpkit.serve.routes import ADMIN, API, Router
from dpkit.serve.target import BadTarget, split_target
from dpkit.testing.http import Client, MemoryTransport, open_server, render
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, SLOW, error_of, open_desk
from tests.serve.mauled import BAD
from tests.serve.test_asgi import Visit
from tests.serve.test_http_parser import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from dpkit.serve.face import Request, Responder

CHATTING = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("HTTP/2", "HTTP/2.0 is not spoken here: HTTP/1.1 is"),
        ("proxy method", "this is no proxy"),
        ("compressed", "no transfer encoding but chunked is known here"),
        ("chunks in HTTP/1.0", "HTTP/1.0 has no transfer encodings"),
        ("unknown expectation", "no expectation but 100-continue is known here"),
        ("no host", "a request has exactly one Host header"),
        ("long body", "the body is longer than 2048 bytes"),
    ],
)
def test_a_refusal_says_what_is_not_understood(what: str, says: str) -> None:
    [refusal] = parse([BAD[what][1]])
    assert isinstance(refusal, Refusal)
    assert refusal.message == says


@pytest.mark.parametrize(
    ("method", "target", "says"),
    [
        ("GET", b"*", "only OPTIONS can ask for *"),
        ("GET", b"/a#b", "the target has a fragment, or what is not ASCII"),
        ("GET", b"a", "the target is no path"),
    ],
)
def test_a_target_says_what_is_wrong_with_it(method: str, target: bytes, says: str) -> None:
    with pytest.raises(BadTarget) as caught:
        split_target(method, target)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"tool_choice": "required"}, "no tool can be called here; leave tool_choice out"),
        (CHAT, {"audio": {"voice": "x"}}, "audio cannot be had; leave it out"),
        (CHAT, {"messages": []}, "messages is empty; give one at least"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: only text is understood here, not image_url",
        ),
        (CHAT, b'{"tools": ' + b"[" * 100_000, "the body is nested too deeply"),
        (CHAT, b"{", "the body is no JSON: Input data was truncated"),
        (COMPLETIONS, {"model": "x"}, "there is no model 'x' here, only 'echo'"),
        ("/tokenize", {"messages": None}, "give prompt, or messages"),
        ("/nowhere", {}, "there is no '/nowhere' here"),
    ],
)
async def test_a_body_is_told_what_is_wrong_with_it(path: str, body: Any, says: str) -> None:
    async with open_desk(ECHO) as desk:
        reply = await desk.post(path, body if isinstance(body, bytes) else CHATTING | body)
        assert error_of(reply)["message"] == says


async def test_a_field_of_the_wrong_kind_is_named_and_so_is_a_body() -> None:
    async with open_desk(ECHO) as desk:
        for body, says in (({"n": "x"}, "n: Expected `int"), ([], "the body: Expected `object`")):
            assert error_of(await desk.post(CHAT, body))["message"].startswith(says)


async def test_keys_are_asked_for_and_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDS_KEY", "sesame")
    async with open_desk(f"{ECHO}[server]\napi_key_env = 'WORDS_KEY'\n") as desk:
        reply = await desk.get("/v1/models")
        assert error_of(reply)["message"] == "a key is needed: send `Authorization: Bearer KEY`"
        reply = await desk.get("/v1/models", authorization="Bearer x")
        assert error_of(reply)["message"] == "this key opens nothing here"


async def test_admins_are_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDS_KEY", "sesame")
    async with open_desk(f"{ECHO}[server]\nadmin_key_env = 'WORDS_KEY'\n") as desk:
        key = {"authorization": "Bearer sesame"}
        reply = await desk.post("/admin/reload", {}, **key)
        assert error_of(reply)["message"] == "dpkit has no file to be read again"
        reply = await desk.post("/admin/drain", {"deadline": "soon"}, **key)
        assert error_of(reply)["message"].startswith("deadline: expected a ")


async def test_before_there_is_a_cluster_clients_are_asked_to_wait() -> None:
    async with open_server(Router(Front(), API + ADMIN)) as server:
        reply = await Client.of(server).request("POST", COMPLETIONS, b'{"prompt": "a"}')
        said = error_of(reply)["message"]
        assert said == "the engines are starting; try again in a moment"


async def test_a_bug_is_told_with_the_number_of_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Request, __: Responder) -> None:
        raise KeyError("what nobody shall know")

    async with open_desk(ECHO, metrics=fail) as desk:
        reply = await desk.get("/metrics", x_request_id="mine")
        said = error_of(reply)["message"]
        assert said == "request mine failed within the server; its log says why"
    assert "what nobody shall know" in caplog.text


async def test_a_whole_answer_that_a_stop_cuts_short_says_so(autojump_clock: MockClock) -> None:
    async with open_desk(SLOW) as desk:
        client = desk.client()
        body = json.dumps({"prompt": "abc", "ignore_eos": True, "max_tokens": 999}).encode()
        client.send(render("POST", COMPLETIONS, body))
        await trio.sleep(0.35)
        desk.server.stop(trio.current_time() + 1)
        reply = await client.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert error_of(reply)["message"] == (
            "the server is stopping: the answer was cut off after 13 tokens; "
            "ask again elsewhere or later"
        )
        await trio.sleep(1)


async def test_a_cluster_that_is_closed_is_a_server_that_stops() -> None:
    async with open_desk(ECHO) as desk:
        front = desk.front
    async with open_server(Router(front, API)) as server:
        reply = await Client.of(server).request("POST", COMPLETIONS, b'{"prompt": "a"}')
        error = error_of(reply)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert error["code"] == "shutdown"
        assert error["message"] == "the server is stopping; ask again elsewhere or later"


async def test_an_engine_that_gives_a_request_up_without_a_word_is_503(
    autojump_clock: MockClock,
) -> None:
    async with open_desk(SLOW) as desk:
        client = desk.client()
        client.send(render("POST", COMPLETIONS, b'{"prompt": "abcdef"}'))
        await trio.sleep(0.25)
        (flights,) = desk.cluster._flights
        [flight] = flights._flights.values()
        # As an engine of somebody else's may end what it has, by an order from elsewhere.
        flight.receiver.deliver(
            EngineOutput(request_id=flight.request.request_id, finish_reason=FinishReason.ABORT)
        )
        reply = await client.reply()
        assert (reply.status, error_of(reply)["message"]) == (503, "the engine gave this up")
        await trio.sleep(1)


async def test_an_asgi_body_that_is_too_large_says_how_large_it_may_be() -> None:
    async with open_desk(f"{ECHO}[server]\nmax_body = '1KiB'\n") as desk:
        visit = Visit(AsgiApp(desk.cluster), COMPLETIONS, b"x" * 2000)
        await visit.run()
    [error] = [json.loads(each["body"]) for each in visit.sent if each.get("body")]
    assert error["error"]["message"] == "the body is larger than 1024 bytes"


def asgi_responder() -> AsgiResponder:
    async def send(_: Any) -> None:
        await trio.lowlevel.checkpoint()

    return AsgiResponder(send, "r", head=False, settings=Front().settings)


async def test_an_answer_is_given_once_and_begun_before_it_goes_on() -> None:
    responder = asgi_responder()
    for misuse in (lambda: responder.write(b"x"), responder.finish):
        with pytest.raises(RuntimeError, match="the answer was not started, or is finished"):
            misuse()
    responder.start(200)
    with pytest.raises(RuntimeError, match="the request was answered with 200 already"):
        responder.start(200)
    responder.cancel(Ending.STALLED)
    with pytest.raises(CutOff, match=r"^request r ended as stalled$"):
        responder.check_complete()


async def test_after_the_end_of_an_answer_nothing_can_be_added() -> None:
    said: list[str] = []

    async def add(_: Request, responder: Responder) -> None:
        await trio.lowlevel.checkpoint()
        responder.start(200)
        responder.finish()
        for misuse in (lambda: responder.write(b"x"), responder.finish):
            with pytest.raises(RuntimeError) as caught:
                misuse()
            said.append(str(caught.value))

    async with open_server(add) as server:
        assert (await Client.of(server).request("GET", "/")).status == 200
    assert said == ["the answer is finished: nothing can be added"] * 2


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EADDRNOTAVAIL, "Cannot assign requested address; try another address"),
        (errno.EACCES, "Permission denied; choose a port from 1024 on, or a directory that you"),
    ],
)
async def test_an_address_that_cannot_be_had_says_why(
    number: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(listeners, "_open_tcp", fail)
    with pytest.raises(ListenFailed) as caught:
        await open_listeners("127.0.0.1:0")
    assert str(caught.value).startswith(f"cannot listen at 127.0.0.1:0: {says}")


def test_what_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'dpkit.serve' has no attribute 'tea'"):
        _ = dpkit.serve.tea


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        (lambda client: client.transport.close(), OSError, "closed here"),
        (lambda client: client.reset(), ConnectionResetError, "the client has gone"),
    ],
)
async def test_a_connection_in_memory_ends_as_a_real_one(
    what: Callable[[Client], None], error: type[OSError], says: str
) -> None:
    client = Client(MemoryTransport())
    what(client)
    with pytest.raises(error, match=says):
        client.transport.send_nowait(b"x")


async def test_a_client_in_memory_notices_a_reset() -> None:
    client = Client(MemoryTransport())
    client.transport.close(reset=True)
    with pytest.raises(ConnectionResetError, match="the server has reset the connection"):
        await client.receive()


def test_a_connection_in_memory_that_is_closed_cannot_be_attached() -> None:
    transport = MemoryTransport()
    transport.close()
    with pytest.raises(ValueError, match="a closed transport cannot be attached"):
        transport.attach(lambda: None)
