"""What HTTP costs: dpkit's front against vLLM's, and its server against uvicorn. All by one client.

* Streams: 100 at once, 100 tokens each, of two engines that say at once what they were told, each
  a process. `dpkit run` against `vllm-rs frontend`, vLLM's own frontend in Rust, over the same
  engines: tokens a second from end to end, and processor time of the frontend for a token. The
  client is `dpkit bench`'s, a core's worth of Python: what it cannot take, nobody is seen to give.
* The server: processor time for a token of such streams, and for a `GET /health` over 50
  connections, against uvicorn with uvloop and httptools under Starlette. dpkit's server is there
  twice: alone, with the same handlers as Starlette, whose tokens come from nowhere, and in `dpkit
  run`, with engines, their wire and the ledger behind it. Those engines run ahead of it, and what
  several steps bring to a stream it writes as one piece, where the others write each token.

    python benchmarks/bench_http.py [--rounds 5]

The first needs `make frontend`, the second `dpkit[bench]`; what is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import frozen
from harness import Rounds, compete, print_table

from dpkit.bench.address import parse_url
from dpkit.bench.http import HttpClient
from dpkit.bench.lengths import Fixed
from dpkit.bench.openai import Route, open_openai
from dpkit.bench.plan import Load
from dpkit.bench.session import run_bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
STREAMS, REQUESTS, TOKENS = 100, 300, 100
CONNECTIONS, PINGS = 50, 10_000
ENGINES = "[[engines]]\nname = 'e'\nmodel = 'echo'\ncount = 2\n"
CONFIG = f"""{ENGINES}kind = "process"
[server]
listen = "127.0.0.1:0"
model_name = "served"
"""
_TICK = os.sysconf("SC_CLK_TCK")


@frozen
class Server:
    """What is asked, and whose processor time counts."""

    url: str
    pid: int

    def cpu(self) -> float:
        """Seconds that it has used, all of its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is told to end when the block is left."""
    process = subprocess.Popen(  # noqa: S603 - our own words
        words, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@contextmanager
def dpkit_run(folder: Path) -> Iterator[Server]:
    """`dpkit run`, its engines in processes."""
    (folder / "dpkit.toml").write_text(CONFIG)
    with command(
        sys.executable, "-m", "dpkit", "run", str(folder / "dpkit.toml"), "--json"
    ) as process:
        told = json.loads(first_line(process))["serving"]
        yield Server(told["addresses"][0], process.pid)


@contextmanager
def vllm_rs(folder: Path) -> Iterator[Server]:
    """`vllm-rs frontend` over two `dpkit engine`s."""
    sys.path.insert(0, str(ROOT))  # the harness of the tests starts it
    from tests.peers.byte_model import write_byte_model  # noqa: PLC0415
    from tests.peers.fetch import cached_path  # noqa: PLC0415
    from tests.peers.harness import open_frontend  # noqa: PLC0415

    (folder / "engines.toml").write_text(ENGINES)

    def engine(rank: int, handshake: str) -> list[str]:
        words = [sys.executable, "-m", "dpkit", "engine", "--config", str(folder / "engines.toml")]
        return [*words, "--rank", str(rank), "--handshake", handshake]

    model = write_byte_model(folder / "bytes")
    with open_frontend(Path(cached_path()), model, engine, folder) as served:
        yield Server(f"http://127.0.0.1:{served.port}", served.frontend.pid)


@contextmanager
def script(name: str) -> Iterator[Server]:
    """A server of this directory."""
    with command(sys.executable, str(Path(__file__).with_name(name))) as process:
        yield Server(first_line(process), process.pid)


def first_line(process: subprocess.Popen[str]) -> str:
    """What a server says when it listens."""
    if process.stdout is None or not (line := process.stdout.readline().strip()):
        raise RuntimeError(f"{process.args} does not serve")
    return line


async def stream(url: str) -> int:
    """Ask for all streams; how many tokens came."""
    load = Load(
        concurrency=STREAMS,
        requests=REQUESTS,
        prompt_tokens=Fixed(64),
        output_tokens=Fixed(TOKENS),
        ignore_eos=True,
    )
    async with open_openai(
        url, route=Route.COMPLETIONS, model=None, api_key=None, load=load
    ) as target:
        summary = (await run_bench(target, load)).summary
    if summary.output_tokens != REQUESTS * TOKENS:
        raise RuntimeError(f"{url}: {summary.finished} of {REQUESTS} finished: {summary.errors}")
    return summary.output_tokens


async def ping(url: str) -> int:
    """Ask for `/health`, again and again; how often."""
    client = HttpClient(parse_url(url), {})

    async def ask() -> None:
        for _ in range(PINGS // CONNECTIONS):
            answer = await client.request("GET", "/health")
            if answer.status != 200:
                raise RuntimeError(f"{url}/health: {answer.status}")

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(ask)
    await client.close()
    return PINGS


class Meter:
    """What one server costs for each item of a kind: seconds, and processor seconds."""

    def __init__(self, server: Server, work: Callable[[str], object]) -> None:
        self.cpu: list[float] = []
        self._server = server
        self._work = work

    def wall_each(self) -> float:
        """Run the work; seconds for each item."""
        items = self._run()
        return self._seconds / items

    def cpu_each(self) -> float:
        """Run the work; the server's processor seconds for each item."""
        self._run()
        return self.cpu[-1]

    def _run(self) -> int:
        cpu, began = self._server.cpu(), time.perf_counter()
        items: int = trio.run(self._work, self._server.url)
        self._seconds = time.perf_counter() - began
        self.cpu.append((self._server.cpu() - cpu) / items)
        return items


def fronts(rounds: int, folder: Path) -> None:
    """Two fronts over the same engines."""
    with dpkit_run(folder) as ours, vllm_rs(folder) as theirs:
        meters = {"dpkit run": Meter(ours, stream), "vllm-rs frontend": Meter(theirs, stream)}
        wall = compete({name: meter.wall_each for name, meter in meters.items()}, rounds=rounds)
    cpu = Rounds({name: meter.cpu[1:] for name, meter in meters.items()})  # without the warm-up
    rows = [
        (
            name,
            f"{1 / wall.median(name):,.0f}",
            f"{wall.times_faster(name, 'vllm-rs frontend'):.2f}",
            f"{1e6 * cpu.median(name):.1f}",
            f"{1 / cpu.times_faster(name, 'vllm-rs frontend'):.2f}",
        )
        for name in meters
    ]
    header = ("", "tokens/s", "of vllm-rs", "frontend's CPU us/token", "of vllm-rs")
    print_table(f"{STREAMS} streams of {TOKENS} tokens, two echo engines", header, rows)


def servers(rounds: int, folder: Path) -> None:
    """HTTP servers, ours twice."""
    with (
        script("bare_server.py") as bare,
        dpkit_run(folder) as whole,
        script("starlette_server.py") as uvicorn,
    ):
        contenders = {
            "dpkit's server": bare,
            "dpkit run": whole,
            "uvicorn": uvicorn,
        }
        for title, work in (("a token of a stream", stream), ("a GET /health", ping)):
            meters = {name: Meter(server, work).cpu_each for name, server in contenders.items()}
            costs = compete(meters, rounds=rounds)
            rows = [
                (
                    name,
                    f"{1e6 * costs.median(name):.1f}",
                    f"{1 / costs.times_faster(name, 'uvicorn'):.2f}",
                )
                for name in contenders
            ]
            print_table(f"CPU of the server for {title}", ("", "us", "of uvicorn"), rows)


def main() -> None:
    """Run what can be run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    sys.path.insert(0, str(ROOT))
    from tests.peers.fetch import cached_path  # noqa: PLC0415

    parts = {
        "vllm-rs (`make frontend`)": (Path(cached_path()).is_file(), fronts),
        "uvicorn, uvloop, starlette": (
            all(map(find_spec, ("uvicorn", "uvloop", "starlette"))),
            servers,
        ),
    }
    for needs, (is_there, part) in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            if is_there:
                part(rounds, Path(folder))
            else:
                print(f"left out: {needs} is not there")


if __name__ == "__main__":
    main()
