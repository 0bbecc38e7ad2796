"""`dpkit run` with engines in processes: clients that leave, and a stop in the midst of a crowd.

Real processes, sockets and signals.
"""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.test_run_serves import PACED, SERVER, Served, serving

if TYPE_CHECKING:
    import http.client
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENGINES = """
[[engines]]
name = "e"
model = "serve_models:Paced"
kind = "process"
count = 2
scheduler = {max_num_batched_tokens = 64}
"""
ASKED = {"prompt": "abcdefgh", "ignore_eos": True}
ENDLESS = ASKED | {"max_tokens": 60_000}
CROWD = 60


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines, each a process; in the end nothing is left of any request."""
    with serving(tmp_path_factory.mktemp("served"), ENGINES + SERVER, "--audit") as served:
        yield served
        code, _, err = served.end(signal.SIGTERM)
        assert (code, err) == (0, "")


def close(connection: http.client.HTTPConnection) -> None:
    """As a client does that has had enough."""
    connection.close()


def reset(connection: http.client.HTTPConnection) -> None:
    """As a client's host does that has crashed and is back."""
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def cores(served: Served) -> list[dict[str, Any]]:
    """What the engines say of themselves."""
    told = json.loads(served.get("/statistics")[1])
    return [engine["core"] for engine in told["engines"]]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what happens in other processes; the test's own time limit ends it."""
    while not is_so():
        time.sleep(0.005)


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["abcdefgh", "x" * 5000])
def test_D03_D04_D05_whoever_leaves_frees_the_blocks_in_another_process(
    prompt: str, stream: bool, leave: Any, processes: Served
) -> None:
    """In the midst of an answer, or, with the long prompt, most likely of its prefill."""
    connection = processes.connect()
    asked = ENDLESS | {"prompt": prompt, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(asked))
    wait_until(lambda: any(core["running"] for core in cores(processes)))
    leave(connection)
    wait_until(lambda: not any(core["running"] + core["waiting"] for core in cores(processes)))
    wait_until(lambda: not any(core["kv_cache_usage"] for core in cores(processes)))


def test_sigterm_in_a_crowd_loses_no_answer(tmp_path: Path) -> None:
    with serving(tmp_path, ENGINES + SERVER, "--audit") as served:
        asked = ASKED | {"max_tokens": 60}
        responses = [
            served.post("/v1/completions", **asked, stream=number % 2 == 0)
            for number in range(0, CROWD, 2)
        ]
        plain = [served.connect() for _ in range(CROWD // 2)]
        for connection in plain:
            connection.request("POST", "/v1/completions", json.dumps(asked))
        wait_until(lambda: sum(core["running"] for core in cores(served)) >= CROWD // 2)
        served.process.send_signal(signal.SIGTERM)
        for response in responses:
            assert response.read().endswith(b"data: [DONE]\n\n")
            response.close()
        for connection in plain:
            response = connection.getresponse()
            assert response.status in {200, 503}  # 503: it came too late
            assert json.loads(response.read())
            connection.close()
        out, err = served.process.communicate()
        assert (served.process.returncode, err) == (0, "")
        assert " failed" not in out


def test_D11_behind_a_proxy_that_stalls_a_request_is_aborted_in_time(tmp_path: Path) -> None:
    """The proxy keeps its connection to us, whatever has become of its client, and reads nothing.

    A large request id makes each piece large, so that the kernel's buffers are soon full.
    """
    toml = f"{PACED}send_timeout = '500ms'\n"
    with serving(tmp_path, toml) as served:
        host, _, port = served.address.rpartition(":")
        with socket.socket() as proxy:
            proxy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            proxy.connect((host, int(port)))
            body = json.dumps(ENDLESS | {"stream": True, "logprobs": 5}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: {'x' * 120}\r\n"
            proxy.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: any(core["running"] for core in cores(served)))
            wait_until(lambda: not any(core["running"] for core in cores(served)))
            assert not any(core["kv_cache_usage"] for core in cores(served))
        served.end(signal.SIGTERM)


def test_M07_each_request_has_one_line_that_says_how_it_ended(tmp_path: Path) -> None:
    with serving(tmp_path, PACED, "--log-format", "json", "--set", "log.level=info") as served:
        for name, asked in (
            ("finishes", ASKED | {"max_tokens": 2}),
            ("fails", {"prompt": 3}),
            ("late", ENDLESS | {"timeout": 0.1}),
            ("leaves", ENDLESS | {"stream": True}),
        ):
            connection = served.connect()
            body = json.dumps(asked)
            connection.request("POST", "/v1/completions", body, {"X-Request-Id": name})
            if name == "leaves":
                connection.getresponse().readline()
            else:
                connection.getresponse().read()
            connection.close()
        wait_until(lambda: not any(core["running"] for core in cores(served)))
        _, _, err = served.end(signal.SIGTERM)
    told = [json.loads(line) for line in err.splitlines()]
    ended = {
        each["request_id"]: (each["status"], each["ending"])
        for each in told
        if each["logger"] == "dpkit.serve.access" and each["path"] == "/v1/completions"
    }
    assert ended == {
        "finishes": (200, "finished"),
        "fails": (400, "finished"),
        "late": (504, "finished"),
        "leaves": (499, "client_gone"),
    }
    lines = [each for each in told if each.get("path") == "/v1/completions"]
    assert len(lines) == 4
