"""A cluster served over real sockets: by `serve_http`, to real clients."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.serve.listeners import ListenFailed
from dpkit.serve.service import serve_http
from dpkit.testing.http import ReplyReader, render
from dpkit.testing.idle import check_idle
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, error_of, events, text_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dpkit.nursery.cluster import Cluster
    from dpkit.serve.service import HttpService
    from dpkit.testing.http import Reply

openai = pytest.importorskip("openai", reason="pip install 'dpkit[dev]' brings it")

SERVER = "[server]\nlisten = '127.0.0.1:0'\n"
QUICK = "[[engines]]\nname = 'e'\nmodel = 'cost:h100-8b'\ncount = 2\n"
ENDLESS = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": 50_000}


@asynccontextmanager
async def served(toml: str = ECHO + SERVER) -> AsyncIterator[tuple[Cluster, HttpService]]:
    """A cluster that is served; at the end nothing is left of any request."""
    async with open_cluster(parse_config(toml)) as cluster:
        async with trio.open_nursery() as nursery:
            yield cluster, await nursery.start(serve_http, cluster)
            nursery.cancel_scope.cancel()
        await wait_idle(cluster)


async def until_started(cluster: Cluster, count: int) -> None:
    """Wait until so many requests have come."""
    await until(lambda: cluster.client.statistics().started >= count)


async def wait_idle(cluster: Cluster) -> None:
    """Engines drop what was aborted before their next step, which is not far."""

    def is_idle() -> bool:
        statistics = cluster.statistics()
        cores = [each.core for each in statistics.engines]
        under_way = any(client.requests for client in statistics.clients)
        return not under_way and not any(core.running + core.waiting for core in cores)

    await until(is_idle)
    check_idle(cluster)


async def connect(address: str) -> trio.SocketStream:
    """Be a client."""
    if address.startswith("unix:"):
        return await trio.open_unix_socket(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host.strip("[]"), int(port))


async def ask(address: str, path: str, **fields: Any) -> Reply:
    """POST, and wait for the answer."""
    async with await connect(address) as stream:
        await stream.send_all(render("POST", path, json.dumps(fields).encode()))
        reader = ReplyReader(head_only=False)
        while not reader.is_complete and (data := await stream.receive_some()):
            reader.feed(data)
    return reader.reply()


async def test_it_serves_at_tcp_and_unix_sockets(tmp_path: Path) -> None:
    for listen in ("127.0.0.1:0", "[::1]:0", f"unix:{tmp_path}/s", "localhost:0"):
        async with served(f"{ECHO}[server]\nlisten = '{listen}'\n") as (_, service):
            for address in service.addresses:
                reply = await ask(address, COMPLETIONS, prompt="hi", stream=True)
                assert text_of(events(reply.body)) == "hi"
    assert not (tmp_path / "s").exists()


async def test_an_address_in_use_is_said_and_leaves_nothing_open() -> None:
    async with served() as (cluster, service):
        taken = parse_config(f"{ECHO}[server]\nlisten = '{service.addresses[0]}'\n").server
        with pytest.raises(ListenFailed, match="Address already in use; stop what listens there"):
            await serve_http(cluster, settings=taken)
        taken = parse_config(f"{ECHO}{SERVER}admin_listen = '{service.addresses[0]}'\n").server
        with pytest.raises(ListenFailed, match="Address already in use"):
            await serve_http(cluster, settings=taken)


async def test_admin_routes_may_have_an_address_of_their_own() -> None:
    async with served(f"{ECHO}{SERVER}admin_listen = '127.0.0.1:0'\n") as (cluster, service):
        [public], [admin] = service.addresses, service.admin_addresses
        assert (await ask(public, "/admin/scale", group="e", count=1)).status == 404
        assert (await ask(admin, COMPLETIONS, prompt="a")).status == 404
        assert (await ask(admin, "/admin/scale", group="e", count=1)).status == 200
        assert len(cluster.engines) == 1


async def test_a_second_listener_may_need_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEYS", "k")
    admin = "admin_listen = '127.0.0.1:0'\nadmin_key_env = 'TEST_KEYS'\n"
    async with served(ECHO + SERVER + admin) as (_, service):
        assert (await ask(service.addresses[0], "/admin/drain")).status == 404
        assert (await ask(service.admin_addresses[0], "/admin/drain")).status == 401


def _fin(stream: trio.SocketStream) -> None:
    stream.socket.close()


def _rst(stream: trio.SocketStream) -> None:
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("leave", [_fin, _rst])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [True, False])
async def test_whoever_leaves_frees_its_engine(
    first: bool, stream: bool, leave: Callable[[trio.SocketStream], None]
) -> None:
    async with served(QUICK + SERVER) as (cluster, service):
        connection = await connect(service.addresses[0])
        body = json.dumps(ENDLESS | {"stream": stream}).encode()
        await connection.send_all(render("POST", COMPLETIONS, body))
        if first and stream:
            await connection.receive_some()
        else:
            await until_started(cluster, 1)
        leave(connection)
        await wait_idle(cluster)
        assert cluster.client.statistics().aborted == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_D03_a_curl_that_is_killed_frees_its_engine() -> None:
    async with served(QUICK + SERVER) as (cluster, service):
        url = f"http://{service.addresses[0]}{COMPLETIONS}"
        command = ["curl", "-sN", url, "-d", json.dumps(ENDLESS | {"stream": True})]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
            assert process.stdout is not None
            await trio.to_thread.run_sync(process.stdout.readline)
            process.send_signal(signal.SIGKILL)
        await wait_idle(cluster)
        assert cluster.client.statistics().aborted == 1


async def test_cancelled_from_outside_it_leaves_nothing() -> None:
    async with open_cluster(parse_config(QUICK + SERVER)) as cluster:
        async with trio.open_nursery() as nursery:
            service = await nursery.start(serve_http, cluster)
            clients = [await connect(service.addresses[0]) for _ in range(20)]
            for number, client in enumerate(clients):
                body = json.dumps(ENDLESS | {"stream": number % 2 == 0}).encode()
                await client.send_all(render("POST", COMPLETIONS, body))
            await until_started(cluster, 20)
            nursery.cancel_scope.cancel()
        await wait_idle(cluster)
        for client in clients:
            await client.aclose()


async def test_stopped_it_ends_streams_with_an_event_and_lets_others_finish() -> None:
    async with open_cluster(parse_config(QUICK + SERVER)) as cluster:
        async with trio.open_nursery() as nursery:
            service = await nursery.start(serve_http, cluster)
            replies: dict[str, Reply] = {}

            async def be(name: str, **fields: Any) -> None:
                replies[name] = await ask(service.addresses[0], COMPLETIONS, **fields)

            nursery.start_soon(partial(be, "stream", **ENDLESS, stream=True))
            nursery.start_soon(partial(be, "whole", **ENDLESS))
            nursery.start_soon(partial(be, "short", prompt="abc", max_tokens=15))
            await until_started(cluster, 3)
            service.stop(trio.current_time() + 0.5)
        *_, last = events(replies["stream"].body)
        assert last["error"]["code"] == "shutdown"
        assert replies["stream"].is_complete
        assert (replies["whole"].status, error_of(replies["whole"])["code"]) == (503, "shutdown")
        assert replies["short"].status == 200
        await wait_idle(cluster)


async def test_openais_client_works_unmodified() -> None:
    async with served() as (_, service):
        await trio.to_thread.run_sync(_use_openai, f"http://{service.addresses[0]}/v1")


def _use_openai(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=10) as client:
        assert [model.id for model in client.models.list()] == ["echo"]
        assert client.models.retrieve("echo").id == "echo"
        hi: Any = [{"role": "user", "content": "hi"}]
        chat = partial(client.chat.completions.create, model="echo", messages=hi)
        whole = chat(max_tokens=3, n=2, logprobs=True, top_logprobs=1, seed=3)
        assert [choice.message.content for choice in whole.choices] == ["use", "use"]
        assert whole.choices[0].logprobs.content[0].bytes == [117]
        assert whole.usage.total_tokens == 26
        usage = {"include_usage": True}
        pieces = list(chat(max_tokens=3, stream=True, stream_options=usage))
        assert [piece.choices[0].delta.content for piece in pieces[:-1]] == ["", "u", "s", "e"]
        assert pieces[-1].usage.total_tokens == 23
        stream = client.completions.create(model="echo", prompt=["ab", "c"], stream=True)
        assert "".join(piece.choices[0].text for piece in stream if piece.choices[0].index) == "c"
        raw = client.chat.completions.with_raw_response.create(model="echo", messages=hi)
        assert raw.headers["x-dpkit-engine"].startswith("e-")
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nope", messages=[])
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            chat(temperature=9000)
        assert refused.value.param == "temperature"
        with (
            pytest.raises(openai.APIError, match="its deadline passed"),
            chat(stream=True, extra_body={"timeout": 0.2, "ignore_eos": True}) as long,
        ):
            for _ in long:
                pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_sees_usage_and_the_end() -> None:
    async with served() as (_, service):
        url = f"http://{service.addresses[0]}"
        curl = partial(trio.run_process, capture_stdout=True)
        assert (await curl(["curl", "-fsS", f"{url}/health"])).stdout == b""
        body = {
            "model": "echo",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 4,
            "stream_options": {"include_usage": True},
        }
        command = ["curl", "-fsSN", url + CHAT, "-d", json.dumps(body)]
        said = events((await curl(command)).stdout)
        assert said[-1] == "[DONE]"
        assert said[-2]["choices"] == []
        assert said[-2]["usage"]["completion_tokens"] == 4
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url + CHAT, "-d"]
        done = await curl([*command, '{"model": "nope", "messages": []}'])
        assert done.stdout == b"404"
