"""Load on real sockets: on a cluster that is served, and on servers that misbehave."""

from __future__ import annotations

import re
import ssl
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.bench.address import BadAddress, parse_url
from dpkit.bench.http import HttpClient, RequestBroken
from dpkit.bench.lengths import Fixed, Uniform
from dpkit.bench.openai import OpenAITarget, Route, TargetUnusable, open_openai
from dpkit.bench.plan import Load
from dpkit.bench.session import run_bench
from tests.bench.servers import ECHO, MODELS, good, hang_up, scripted, served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dpkit.bench.summary import ErrorKind


def of(**fields) -> Load:
    fields.setdefault("concurrency", 4)
    fields.setdefault("prompt_tokens", Fixed(20))
    fields.setdefault("output_tokens", Fixed(7))
    fields.setdefault("ignore_eos", True)
    return Load(**fields)


@asynccontextmanager
async def target_at(url: str, load: Load, **fields) -> AsyncIterator[OpenAITarget]:
    options = {"route": Route.COMPLETIONS, "model": None, "api_key": None} | fields
    async with open_openai(url, load=load, **options) as target:
        yield target


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("kind", ["closed", "open"])
async def test_every_request_ends_once_and_every_token_counts(route: Route, kind: str) -> None:
    loop = {"concurrency": 8} if kind == "closed" else {"rate": 400.0, "concurrency": None}
    load = of(requests=60, warm_up_requests=5, **loop)
    async with served() as (cluster, url):
        async with target_at(url, load, route=route) as target:
            report = await run_bench(target, load)
        counts = cluster.client.statistics()
    summary = report.summary
    assert (summary.finished, summary.failed, summary.unfinished, summary.warm_up) == (60, 0, 0, 5)
    assert summary.output_tokens == 60 * 7
    assert [record.index for record in report.records] == list(range(65))
    assert {len(record.moments) for record in report.records} == {7}
    assert counts.started == counts.finished == 66  # and the one that tried the route
    assert [each.engine for each in summary.engines] == ["e-0", "e-1"]
    assert sum(each.requests for each in summary.engines) == 60
    for spread in (summary.ttft, summary.e2e, summary.itl, summary.tpot):
        assert spread is not None
        assert 0 <= spread.p50 <= spread.p90 <= spread.p95 <= spread.p99 <= spread.max
    for record in report.records:
        assert record.intended <= record.began <= record.moments[0]
        assert record.moments[-1] <= record.ended


async def test_prompts_of_completions_are_as_long_as_asked_for() -> None:
    load = of(requests=40, prompt_tokens=Uniform(3, 90), output_tokens=Uniform(1, 5))
    async with served() as (_, url), target_at(url, load) as target:
        assert target.is_exact
        report = await run_bench(target, load)
        maker = target.prompts(seed=load.seed, prefix=0)
    assert maker.make(11).ids is not None
    lengths = [record.prompt_tokens for record in report.records]
    assert min(lengths) >= 3
    assert max(lengths) <= 90
    assert len(set(lengths)) > 10
    assert report.summary.prompt_tokens == sum(lengths)


async def test_prompts_of_chats_are_words_of_about_that_length() -> None:
    load = of(requests=10, prompt_tokens=Fixed(400))
    async with served() as (_, url), target_at(url, load, route=Route.CHAT) as target:
        report = await run_bench(target, load)
    assert 300 < report.summary.prompt_tokens / 10 < 500
    assert report.notes[-1].startswith("prompts are words, and about as long as asked for")


async def test_a_unix_socket_is_a_server_too(tmp_path: Path) -> None:
    load = of(requests=5)
    toml = ECHO.replace("127.0.0.1:0", f"unix:{tmp_path}/s")
    async with served(toml) as (_, url), target_at(url, load) as target:
        report = await run_bench(target, load)
    assert report.summary.finished == 5
    assert report.target == f"unix:{tmp_path}/s"


async def test_connections_are_used_again() -> None:
    connections = 0

    def answer(path: str, before: int) -> bytes:
        nonlocal connections
        connections += before == 0
        return good(MODELS) if path == "/v1/models" else good(STREAM)

    load = of(requests=20, concurrency=1)
    async with scripted(answer) as url, target_at(url, load) as target:
        report = await run_bench(target, load)
    assert report.summary.finished == 20
    assert connections == 1


async def test_a_key_opens_a_server_that_asks_for_one(monkeypatch) -> None:
    monkeypatch.setenv("BENCH_KEYS", "sesame")
    load = of(requests=3)
    async with served(f"{ECHO}api_key_env = 'BENCH_KEYS'\n") as (_, url):
        async with target_at(url, load, api_key="sesame") as target:
            assert (await run_bench(target, load)).summary.finished == 3
        with pytest.raises(TargetUnusable, match=r"/v1/models: 401: .*; --api-key-env names"):
            async with target_at(url, load):
                pass
        with pytest.raises(TargetUnusable, match=r"completions: 401: .*; --api-key-env names"):
            async with target_at(url, load, model="echo"):
                pass


async def test_a_client_that_stops_leaves_nothing_behind() -> None:
    load = of(concurrency=10, duration=60.0, output_tokens=Fixed(40_000))
    stop = trio.Event()
    async with served() as (cluster, url), target_at(url, load) as target:

        async def stop_under_way() -> None:
            while cluster.client.statistics().started < 10:  # noqa: ASYNC110 - nobody tells
                await trio.sleep(0.001)
            stop.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_under_way)
            report = await run_bench(target, load, stop=stop)
    assert report.summary.unfinished == 10


STREAM = (
    b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 until-the-end\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def error_of(bad: bytes | None) -> ErrorKind:
    """What a run says of a server that answers so, from the second request for text on."""
    asked = 0

    def answer(path: str, before: int) -> bytes | None:
        nonlocal asked
        if path == "/v1/models":
            return good(MODELS)
        if path == "/tokenize":
            return good(b"{}", status=b"404 Not Found")
        asked += 1
        return good(STREAM) if asked == 1 else bad

    load = of(concurrency=1, requests=2)
    async with scripted(answer) as url, target_at(url, load) as target:
        assert not target.is_exact
        report = await run_bench(target, load)
    assert (report.summary.finished, report.summary.failed) == (0, 2)
    [error] = report.summary.errors
    assert error.count == 2
    return error


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        (
            good(b'{"error": {"message": "full\\nnow"}}', status=b"429 Too Many Requests"),
            "HTTP 429",
            "full now",
        ),
        (good(b'{"detail": "no"}', status=b"422 Unprocessable"), "HTTP 422", "no"),
        (good(b"<h1>Bad\n gateway</h1>", status=b"502 Bad Gateway"), "HTTP 502", "<h1>Bad gateway"),
        (good(b"", status=b"500 Oh"), "HTTP 500", "no word of explanation"),
        (good(b"[1]", status=b"500 Oh"), "HTTP 500", "[1]"),
        (
            good(b'data: {"error": {"message": "engine lost"}}\n\n'),
            "error in the stream",
            "engine lost",
        ),
        (good(b'data: {"error": "lost"}\n\n'), "error in the stream", "lost"),
        (good(b"{}"), "bad answer", "the answer is no stream that ends with [DONE]"),
        (good(b"data: {\n\n"), "bad answer", "an event cannot be read: "),
        (CHUNKED + b"5\r\ndata:\r\ncut here", "no HTTP", "the answer is no HTTP: "),
        (CHUNKED + b"8\r\ncut here", "connection lost", "the server closed the connection too ear"),
        (b"SSH-2.0-cut here\r\n\r\n", "no HTTP", "the answer is no HTTP: "),
        (b"reset here", "connection lost", "the connection broke: "),
        (None, "connection lost", "the server closed the connection too early"),
    ],
    ids=(
        *("full", "unprocessable", "html", "empty", "list", "event", "event_text", "json"),
        *("nonsense", "no_chunk", "cut", "no_http", "reset", "hung_up"),
    ),
)
async def test_errors_are_told_by_kind(bad: bytes | None, kind: str, said: str) -> None:
    error = await error_of(bad)
    assert error.kind == kind
    assert error.example.startswith(said)


async def test_a_stream_without_done_is_no_answer() -> None:
    error = await error_of(good(b'data: {"choices": [{"text": "a"}]}\n\n'))
    assert error.kind == "bad answer"
    assert error.example == "the answer is no stream that ends with [DONE]"


async def test_an_answer_may_end_with_its_connection_and_bring_no_usage() -> None:
    events = b'data: {"choices": [{"text": "a"}]}\n\n' * 3 + b"data: [DONE]\n\n"

    def answer(path: str, before: int) -> bytes:
        return good(MODELS) if path == "/v1/models" else HEAD + events

    load = of(requests=4)
    async with scripted(answer) as url, target_at(url, load) as target:
        report = await run_bench(target, load)
    assert report.summary.finished == 4
    assert report.summary.output_tokens == 12  # pieces, for want of better
    assert report.summary.prompt_tokens == 80  # as wanted, likewise
    assert report.summary.engines == ()


async def test_a_connection_that_was_dropped_while_idle_is_no_failure() -> None:
    def answer(path: str, before: int) -> bytes | None:
        return None if before else good(STREAM)

    async with scripted(answer) as url:
        client = HttpClient(parse_url(url), {})
        for _ in range(3):
            assert (await client.request("POST", "/", b"{}")).status == 200
        await client.close()


async def test_an_answer_of_100_is_not_the_answer() -> None:
    def answer(path: str, before: int) -> bytes:
        return b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + good(b"hello")

    async with scripted(answer) as url:
        client = HttpClient(parse_url(url), {})
        got = await client.request("GET", "/")
        assert (got.status, bytes(got.body), got.headers.get("x")) == (200, b"hello", None)
        await client.close()


async def test_a_server_that_is_not_there_is_told_of() -> None:
    async with scripted(hang_up) as url:
        pass
    load = of(requests=1)
    said = rf"{url}: GET /v1/models: connecting to {url}: .*; is the server up, and is --url its"
    with pytest.raises(TargetUnusable, match=said):
        async with target_at(url, load):
            pass


async def test_a_server_that_goes_away_is_told_of() -> None:
    load = of(concurrency=1, requests=2)
    async with trio.open_nursery() as nursery:
        server = scripted(lambda path, _: good(MODELS) if path == "/v1/models" else good(STREAM))
        url = await server.__aenter__()
        async with target_at(url, load) as target:
            await server.__aexit__(None, None, None)
            report = await run_bench(target, load)
        nursery.cancel_scope.cancel()
    [error] = report.summary.errors
    assert error.kind == "unreachable"
    assert error.example.startswith(f"connecting to {url}: ")


async def test_a_server_that_says_nothing_is_given_up(autojump_clock, monkeypatch) -> None:
    async def hang(self: object) -> trio.abc.Stream:
        return trio.testing.memory_stream_pair()[0]

    monkeypatch.setattr("dpkit.bench.address.Address.connect", hang)
    with pytest.raises(TargetUnusable, match="GET /v1/models: no answer within 30 s"):
        async with target_at("http://there", of(requests=1)):
            pass


async def test_a_wrong_path_is_told_of() -> None:
    load = of(requests=1)
    hint = "is --url the address of an OpenAI-compatible server, without the path of a route"
    async with served() as (_, url):
        with pytest.raises(TargetUnusable, match=rf"GET /v1/models: 404: .*{hint}.*--model names"):
            async with target_at(f"{url}/v1/completions", load):
                pass
        with pytest.raises(TargetUnusable, match=rf"POST /v1/completions: 404: .*{hint}"):
            async with target_at(f"{url}/api", load, model="echo"):
                pass


async def test_no_such_model_is_told_of_with_the_nearest() -> None:
    async with served() as (_, url):
        with pytest.raises(TargetUnusable, match="there is no model 'ecco'; there is echo"):
            async with target_at(url, of(requests=1), model="ecco"):
                pass


async def test_a_server_that_refuses_all_is_told_of_once() -> None:
    refusal = good(b'{"error": {"message": "starting"}}', status=b"503 Unavailable")

    def answer(path: str, before: int) -> bytes:
        return good(MODELS) if path == "/v1/models" else refusal

    async with scripted(answer) as url:
        said = re.escape(f"{url}: POST /v1/completions: 503: starting")
        with pytest.raises(TargetUnusable, match=said):
            async with target_at(url, of(requests=1)):
                pass


@pytest.mark.parametrize(
    ("url", "host", "port", "authority", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "127.0.0.1:8000", ""),
        ("http://a/v1/", "a", 80, "a", ""),
        ("https://a.b/llm/v1", "a.b", 443, "a.b", "/llm"),
        ("http://[::1]:80", "::1", 80, "[::1]", ""),
        ("https://[::1]:8443/x", "::1", 8443, "[::1]:8443", "/x"),
    ],
)
def test_urls_are_read(url: str, host: str, port: int, authority: str, prefix: str) -> None:
    address = parse_url(url)
    assert (address.host, address.port, address.authority) == (host, port, authority)
    assert address.prefix == prefix
    assert address.is_tls == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://a",
        "http://",
        "http://a?b=c",
        "http://a#b",
        "unix:",
        "http://http://a",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    said = f"{url!r}: expected http://HOST:PORT, https://HOST or unix:PATH"
    with pytest.raises(BadAddress, match=re.escape(said)):
        parse_url(url)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(BadAddress, match="'http://a:99999': Port out of range"):
        parse_url("http://a:99999")


def test_a_server_with_a_certificate_is_read_and_without_one_refused(tmp_path, monkeypatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate}"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    def hello(path: str, before: int) -> bytes:
        return good(b"hello")

    async def ask() -> bytes:
        async with scripted(hello, tls=tls) as url:
            client = HttpClient(parse_url(url), {})
            try:
                return bytes((await client.request("GET", "/")).body)
            finally:
                await client.close()

    with pytest.raises(ExceptionGroup) as refused:
        trio.run(ask)
    [error] = refused.value.exceptions
    assert isinstance(error, RequestBroken)
    assert error.kind == "unreachable"
    assert re.match(r"connecting to https://localhost:\d+: .*certificate verify failed", str(error))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert trio.run(ask) == b"hello"
