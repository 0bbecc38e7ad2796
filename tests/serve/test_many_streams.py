"""1,500 streams under way: probes are answered in time, no stream is lost, memory stays bounded.

Real processes, and real time: the goal is one of milliseconds.
"""

from __future__ import annotations

import json
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.test_run_serves import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMS, DEAF, TOKENS = 1500, 100, 1500
GOAL_S = 0.1

CONFIG = """
[[engines]]
name = "e"
model = "echo"
kind = "process"
count = 2
scheduler = {max_num_seqs = 1024, max_num_batched_tokens = 8192}
kv = {num_blocks = 100000}

[server]
listen = "127.0.0.1:0"
"""

READERS = """
import json, selectors, socket, sys

port, streams, deaf, tokens = map(int, sys.argv[1:])

def connect():
    return socket.create_connection(("127.0.0.1", port))

def ask(made, tokens):
    body = {"prompt": "abcdefgh", "ignore_eos": True, "max_tokens": tokens, "stream": True}
    body = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: %d\\r\\n\\r\\n"
    made.sendall((head % len(body)).encode() + body)
    return made

unread = [ask(connect(), 60_000) for _ in range(deaf)]
selector, begun, done, lost = selectors.DefaultSelector(), 0, 0, 0
for made in [connect() for _ in range(streams)]:  # first, lest some have ended when others begin
    selector.register(ask(made, tokens), selectors.EVENT_READ, bytearray())
while done + lost < streams:
    for key, _ in selector.select():
        data = key.fileobj.recv(65536)
        begun += not key.data
        if begun == streams:
            print("all", flush=True)
            begun += 1
        key.data[:] = (key.data + data)[-64:]
        if not data or b"[DONE]" in key.data:
            if not done + lost:
                print("first", flush=True)
            done, lost = done + bool(data), lost + (not data)
            selector.unregister(key.fileobj)
            key.fileobj.close()
print(json.dumps({"done": done, "lost": lost}), flush=True)
"""


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Enough for all connections, in the processes that are started too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 8192)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"THIS NEEDS {wanted} DESCRIPTORS, and at most {hard} are to be had")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def probe(served: Served, path: str) -> float:
    """Ask as Kubernetes does, with a connection each time; how long that took."""
    host, _, port = served.address.rpartition(":")
    since = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=10) as made:
        made.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while data := made.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return time.perf_counter() - since


def memory_of(pid: int) -> int:
    """Its most so far, in bytes."""
    [kib] = re.findall(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024


@pytest.mark.slow
def test_E13_E14_probes_are_answered_amid_1500_streams(tmp_path: Path) -> None:  # noqa: N802
    with serving(tmp_path, CONFIG, "--json", "--audit") as served:
        served.complete(prompt="a")
        paths = ["/health", "/ready"]
        paths += ["/metrics"] * (served.get("/metrics")[0] == 200)
        before = memory_of(served.process.pid)
        _, _, port = served.address.rpartition(":")
        words = [port, *map(str, (STREAMS, DEAF, TOKENS))]
        took: dict[str, list[float]] = {path: [] for path in paths}
        with subprocess.Popen(
            [sys.executable, "-c", READERS, *words], stdout=subprocess.PIPE, text=True
        ) as readers:
            assert readers.stdout is not None
            assert readers.stdout.readline() == "all\n"
            while not select.select([readers.stdout], [], [], 0.02)[0]:
                for path in paths:
                    took[path].append(probe(served, path))
            assert readers.stdout.readline() == "first\n"
            told = json.loads(readers.stdout.readline())
        grown = memory_of(served.process.pid) - before
        served.end(signal.SIGTERM)
        assert served.process.returncode in {0, 143}
    for path, times in took.items():
        times.sort()
        late = times[int(len(times) * 0.99)]
        print(f"{path}: {len(times)} times, p50 {times[len(times) // 2]:.3f} s, p99 {late:.3f} s")
        assert late <= GOAL_S, path
    print(f"memory grew by {grown / 2**20:.0f} MiB")
    assert told == {"done": STREAMS, "lost": 0}
    # Of a client that reads nothing, max_unsent at most, and its tokens as numbers; of others, what
    # their engines are ahead.
    assert grown <= 64 * 2**10 * STREAMS + 2**20 * DEAF
