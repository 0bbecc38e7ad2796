"""The same routes as an ASGI application, under Trio: by the letter of ASGI's own messages."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import define, field

from dpkit.config.load import parse_config
from dpkit.names import Cause
from dpkit.nursery.cluster import open_cluster
from dpkit.serve.asgi import AsgiApp
from dpkit.serve.asgiresponder import CutOff
from dpkit.serve.face import Ending
from dpkit.testing.idle import check_idle
from tests.nursery.lab import settle
from tests.serve.desk import COMPLETIONS, ECHO, SLOW, events, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    from dpkit.nursery.cluster import Cluster

    App = Callable[[Any, Any, Any], Awaitable[None]]

ENDLESS = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 5000}


@define(eq=False)
class Visit:
    """One request, as a server of ASGI 2.3 brings it to an application, and what it sends."""

    app: App
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(factory=dict)
    scope: dict[str, Any] = field(factory=dict)
    pieces: int = 1
    """In which the body comes."""
    reads: bool = True
    """Whether the client takes what is sent."""
    sent: list[dict[str, Any]] = field(factory=list)
    _gone: trio.Event = field(factory=trio.Event)
    _received: int = 0

    async def run(self) -> None:
        """Be answered."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 5),
            **self.scope,
        }
        await self.app(scope, self._receive, self._send)

    def leave(self) -> None:
        """The client has gone."""
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if self._received >= self.pieces:
            await self._gone.wait()
        if self._gone.is_set():
            return {"type": "http.disconnect"}
        size = -(-len(self.body) // self.pieces)
        begin = self._received * size
        self._received += 1
        body, more = self.body[begin : begin + size], self._received < self.pieces
        return {"type": "http.request", "body": body, "more_body": more}

    async def _send(self, message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        if not self.reads:
            await trio.sleep_forever()
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def answer_headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def answer(self) -> bytes:
        """The whole body, which has come to its end."""
        assert [each["more_body"] for each in self.sent[1:]] == [True] * (len(self.sent) - 2) + [
            False
        ]
        return b"".join(each["body"] for each in self.sent[1:])


@asynccontextmanager
async def open_app(toml: str = ECHO) -> AsyncIterator[tuple[Cluster, AsgiApp]]:
    """An application; at the end nothing is left of any request."""
    async with open_cluster(parse_config(toml)) as cluster:
        yield cluster, AsgiApp(cluster)
        check_idle(cluster)


def _asked(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_a_whole_answer(pieces: int) -> None:
    async with open_app() as (_, app):
        body = _asked(prompt="hello")
        visit = Visit(app, COMPLETIONS, body, headers={"x-request-id": "r"}, pieces=pieces)
        await visit.run()
        assert visit.status == 200
        assert json.loads(visit.answer)["choices"][0]["text"] == "hello"
        assert visit.answer_headers[b"x-request-id"] == b"r"
        assert int(visit.answer_headers[b"content-length"]) == len(visit.answer)


async def test_a_stream_comes_piece_by_piece(autojump_clock: MockClock) -> None:
    async with open_app(SLOW) as (_, app):
        visit = Visit(app, COMPLETIONS, _asked(prompt="hello", stream=True))
        await visit.run()
        said = events(visit.answer)
        assert text_of(said) == "hello"
        assert said[-1] == "[DONE]"
        assert len(visit.sent) > 5


async def test_errors_probes_and_heads() -> None:
    async with open_app() as (_, app):
        for method, path, status in [
            ("GET", "/health", 200),
            ("HEAD", "/v1/models", 200),
            ("GET", "/nope", 404),
            ("DELETE", COMPLETIONS, 405),
            ("POST", COMPLETIONS, 400),
        ]:
            visit = Visit(app, path, method=method)
            await visit.run()
            assert visit.status == status
            assert (visit.answer == b"") is (path == "/health" or method == "HEAD")


async def test_mounted_below_a_path_it_knows_its_own() -> None:
    async with open_app() as (_, app):
        for scope in ({"root_path": "/llm"}, {"root_path": "/llm", "path": "/v1/models"}):
            visit = Visit(app, "/llm/v1/models", method="GET", scope=scope)
            await visit.run()
            assert json.loads(visit.answer)["data"][0]["id"] == "echo"


async def test_a_body_that_is_too_large_is_413() -> None:
    async with open_app(f"{ECHO}[server]\nmax_body = '1KiB'\n") as (_, app):
        visit = Visit(app, COMPLETIONS, b"x" * 5000, pieces=5)
        await visit.run()
        assert visit.status == 413


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0.05, 0.35])
async def test_D12_a_client_that_leaves_frees_its_engine(
    after: float, stream: bool, autojump_clock: MockClock
) -> None:
    """Behind middleware too, if that hands `receive` on, as it should."""

    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        async def receive_too() -> Any:
            return await receive()

        await app(scope, receive_too, send)

    async with open_app(SLOW) as (cluster, app), trio.open_nursery() as nursery:
        told: list[Any] = []
        app.front.observers.append(told.append)
        visit = Visit(middleware, COMPLETIONS, _asked(**ENDLESS, stream=stream))
        nursery.start_soon(visit.run)
        await trio.sleep(after)
        visit.leave()
        await settle()
        check_idle(cluster)
        assert cluster.client.statistics().causes == {Cause.CLIENT: 1}
        assert [each.ending for each in told] == [Ending.CLIENT_GONE]


async def test_who_leaves_before_the_body_is_complete_asked_for_nothing() -> None:
    async with open_app() as (cluster, app):
        visit = Visit(app, COMPLETIONS, b"x" * 100, pieces=5)
        visit.leave()
        await visit.run()
        assert visit.sent == []
        assert cluster.client.statistics().started == 0


async def test_a_server_whose_send_fails_has_lost_its_client(autojump_clock: MockClock) -> None:
    async with open_app(SLOW) as (cluster, app):
        visit = Visit(app, COMPLETIONS, _asked(**ENDLESS, stream=True))

        async def app_with_broken_send(scope: Any, receive: Any, send: Any) -> None:
            async def send_once(message: Any) -> None:
                if visit.sent:
                    raise OSError("the client has gone")
                await send(message)

            await app(scope, receive, send_once)

        visit.app = app_with_broken_send
        await visit.run()
        await settle()
        assert cluster.client.statistics().causes == {Cause.CLIENT: 1}


async def test_D11_a_client_that_does_not_read_is_given_up(autojump_clock: MockClock) -> None:
    async with open_app(f"{SLOW}[server]\nsend_timeout = '5s'\n") as (cluster, app):
        visit = Visit(app, COMPLETIONS, _asked(**ENDLESS, stream=True), reads=False)
        began_at = trio.current_time()
        with pytest.raises(CutOff, match="ended as stalled"):
            await visit.run()
        assert trio.current_time() - began_at < 6
        await settle()
        assert cluster.client.statistics().causes == {Cause.CLIENT: 1}


async def test_while_nobody_reads_pieces_grow(autojump_clock: MockClock) -> None:
    async with open_app(SLOW) as (_, app):
        visit = Visit(app, COMPLETIONS, _asked(prompt="abcdefgh" * 8, stream=True, max_tokens=64))

        async def app_with_slow_send(scope: Any, receive: Any, send: Any) -> None:
            async def send_slowly(message: Any) -> None:
                await trio.sleep(1.05)
                await send(message)

            await app(scope, receive, send_slowly)

        visit.app = app_with_slow_send
        await visit.run()
        assert text_of(events(visit.answer)) == "abcdefgh" * 8
        assert len(visit.sent) < 12


async def test_cancelled_with_its_server_it_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_app(SLOW) as (cluster, app):
        async with trio.open_nursery() as nursery:
            for stream in (True, False):
                visit = Visit(app, COMPLETIONS, _asked(**ENDLESS, stream=stream))
                nursery.start_soon(visit.run)
            await trio.sleep(0.35)
            nursery.cancel_scope.cancel()
        await settle()
        check_idle(cluster)


async def test_an_engine_lost_in_midstream_is_an_event(autojump_clock: MockClock) -> None:
    async with open_app(SLOW) as (_, app):
        told: list[Any] = []
        app.front.http_observers.append(told.append)
        visit = Visit(app, COMPLETIONS, _asked(**ENDLESS, stream=True, timeout=0.35))
        await visit.run()
        *said, last = events(visit.answer)
        assert text_of(said) == "abc"
        assert last["error"]["code"] == "deadline_exceeded"
        assert [each.ending for each in told] == [Ending.ERROR]
        await settle()


async def test_servers_may_ask_it_to_start_and_to_stop() -> None:
    async with open_app() as (_, app):
        messages = iter(["lifespan.startup", "lifespan.shutdown"])
        sent: list[Any] = []

        async def receive() -> Any:
            await trio.lowlevel.checkpoint()
            return {"type": next(messages)}

        async def send(message: Any) -> None:
            await trio.lowlevel.checkpoint()
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_web_sockets_are_turned_away() -> None:
    async with open_app() as (_, app):
        sent: list[Any] = []

        async def receive() -> Any:
            await trio.lowlevel.checkpoint()
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            await trio.lowlevel.checkpoint()
            sent.append(message["type"])

        await app({"type": "websocket"}, receive, send)
        assert sent == ["websocket.close"]
