"""What engines in processes of their own cost: to start, in memory, in tokens a second, in latency.

* Start: a cluster of eight against a cluster of one, until all serve.
* Memory that a further engine has for itself, its KV cache aside: what the kernel calls private in
  the maps of its processes, after it has answered a request.
* Tokens a second of `open_cluster` against the same engines stepped bare, each in a process of its
  own: one engine that may use all cores, and two that share them.
* One short request through all of it, alone, against a blocking client that speaks to the same
  engine over the same wire, and against a blocking echo of the same bytes.

    python benchmarks/bench_processes.py [--rounds 5]

Needs `dpkit fetch smollm2-135m`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
import zmq
from harness import Rounds, compete, print_table

import dpkit
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models import load_model
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.wire import codec
from dpkit.wire.convert import to_wire
from dpkit.wire.structs import Addresses, Init

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODEL = "smollm2-135m"
ENGINES = 8
BLOCKS = 512
REQUESTS = 8
"""For each engine, all at once."""
TOKENS = 32
TRIPS = 500
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
BRIEF = SamplingParams(max_tokens=1, ignore_eos=True)
PROMPT = tuple(range(32))
CORES = len(os.sched_getaffinity(0))


def config(engines: int, *, model: str = MODEL, blocks: int = BLOCKS) -> dpkit.Config:
    """Engines in processes; nothing is found in a cache."""
    return dpkit.parse_config(
        f'[[engines]]\nmodel = "{model}"\nkind = "process"\ncount = {engines}\n'
        f"kv.num_blocks = {blocks}\nkv.prefix_cache = false\n"
    )


def prompts(count: int) -> list[tuple[int, ...]]:
    """Made-up prompts of 32 tokens; no two begin alike."""
    return [tuple(100 + (n * 7919 + i * 31) % 40_000 for i in range(32)) for n in range(count)]


# -- Start, and memory -----------------------------------------------------------------------------


def start(engines: int) -> float:
    """Seconds until a cluster serves."""

    async def main() -> float:
        began = time.perf_counter()
        async with dpkit.open_cluster(config(engines, blocks=1)):
            return time.perf_counter() - began

    return trio.run(main)


def memory(engines: int) -> int:
    """Bytes that all processes below this one have for themselves, once every engine has worked.

    Each engine has a KV cache of one block, which counts.
    """

    async def main() -> int:
        async with dpkit.open_cluster(config(engines, blocks=1)) as cluster:
            for number in range(engines):
                pin = f"engine-{number}"
                await cluster.client.complete(prompts(1)[0][:8], BRIEF, engine=pin)
            return sum(private_bytes(pid) for pid in descendants(os.getpid()))

    return trio.run(main)


def descendants(pid: int) -> Iterator[int]:
    """All processes below one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def private_bytes(pid: int) -> int:
    """What nobody else has mapped."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


# -- Tokens a second -------------------------------------------------------------------------------


def step_bare(threads: int) -> None:
    """Be a process with one engine and nothing else: at each line on stdin, do the work once."""
    model = load_model(MODEL)
    model.threads_per_engine = threads
    core = EngineCore(
        model, limits=resolve_limits(model.spec, num_blocks=BLOCKS, prefix_cache=False)
    )
    cache = model.allocate(num_blocks=BLOCKS, block_size=16)
    gc.freeze()  # as a zygote does
    print("ready", flush=True)
    for line in sys.stdin:
        for number, prompt in enumerate(prompts(int(line))):
            core.add(
                GenerateRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=GREEDY)
            )
        while core.has_requests():
            core.step(cache)
        print("done", flush=True)


@contextmanager
def bare_processes(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """So many of those, ready."""
    command = [sys.executable, __file__, "--bare", str(max(1, CORES // count))]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                # In a session of its own, as workers are: where the kernel shares the processors
                # out by session, they shall get as much.
                subprocess.Popen(  # noqa: S603
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            hear(process)
        yield processes
        for process in processes:
            process.kill()


def hear(process: subprocess.Popen[str]) -> None:
    """Wait for a line."""
    assert process.stdout is not None  # noqa: S101
    if not process.stdout.readline():
        raise RuntimeError("a bare engine has failed")


class Work:
    """What one engine, or several, take for their tokens: by the clock, and of the processors."""

    def __init__(self) -> None:
        self.cpu: dict[str, list[float]] = {}

    def measure(self, name: str, engines: int, work: Callable[[], object]) -> float:
        """Run it once and return seconds a token; how much CPU that was is kept."""
        cpu, began = cpu_seconds(), time.perf_counter()
        work()
        tokens = engines * REQUESTS * TOKENS
        seconds = (time.perf_counter() - began) / tokens
        self.cpu.setdefault(name, []).append((cpu_seconds() - cpu) / tokens)
        return seconds


def cpu_seconds() -> float:
    """Of this process, and all below it that live."""
    ticks = 0
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def bare(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Have all of them do their work, side by side."""
    for process in processes:
        assert process.stdin is not None  # noqa: S101
        process.stdin.write(f"{REQUESTS}\n")
        process.stdin.flush()
    for process in processes:
        hear(process)


async def clustered(cluster: dpkit.Cluster, engines: int) -> None:
    """Have as many streams read, each as it comes."""

    async def read(prompt: tuple[int, ...]) -> None:
        async with cluster.client.generate(prompt, GREEDY) as stream:
            async for _ in stream:
                pass

    async with trio.open_nursery() as nursery:
        for prompt in prompts(engines * REQUESTS):
            nursery.start_soon(read, prompt)


async def throughput(engines: int, rounds: int) -> tuple[str, ...]:
    """A row: tokens a second, bare and clustered, and the share; the same for a CPU second."""
    work = Work()
    with bare_processes(engines) as processes:
        async with dpkit.open_cluster(config(engines)) as cluster:
            contest: dict[str, Callable[[], object]] = {
                "bare": partial(bare, processes),
                "open_cluster": lambda: trio.from_thread.run(clustered, cluster, engines),
            }
            works = {name: partial(work.measure, name, engines, contest[name]) for name in contest}
            by_clock = await trio.to_thread.run_sync(lambda: compete(works, rounds=rounds))
    # The first one warmed up.
    of_cpu = Rounds({name: costs[1:] for name, costs in work.cpu.items()})
    row = ["1 engine" if engines == 1 else f"{engines} engines"]
    for measured in (by_clock, of_cpu):
        row += [f"{1 / measured.median(name):.1f}" for name in contest]
        row.append(f"{measured.times_faster('open_cluster', than='bare'):.2f}x")
    return tuple(row)


# -- One short request -----------------------------------------------------------------------------


def through_all() -> float:
    """Seconds of `complete`, with an engine that computes nothing; the median."""

    async def main() -> float:
        trips = []
        async with dpkit.open_cluster(config(1, model="echo")) as cluster:
            for _ in range(TRIPS):
                began = time.perf_counter()
                await cluster.client.complete(PROMPT, BRIEF)
                trips.append(time.perf_counter() - began)
        return statistics.median(trips)

    return trio.run(main)


def by_hand() -> float:
    """Seconds of a request to the same engine, whose client blocks and does nothing else."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, ExitStack() as stack:
        handshake, requests, outputs = (
            stack.enter_context(context.socket(kind)) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL)
        )
        for name, socket in {"h": handshake, "i": requests, "o": outputs}.items():
            socket.linger = 0
            socket.bind(f"ipc://{folder}/{name}")
        toml = Path(folder, "dpkit.toml")
        toml.write_text('[[engines]]\nmodel = "echo"\nkv.prefix_cache = false\n')
        command = [sys.executable, "-m", "dpkit", "engine", "--config", str(toml), "--rank", "0"]
        command += ["--handshake", f"ipc://{folder}/h"]
        with subprocess.Popen(command) as engine:  # noqa: S603
            welcome(handshake, requests, folder)
            trips = [ask(requests, outputs, number) for number in range(TRIPS)]
            engine.kill()
    return statistics.median(trips)


def welcome(handshake: Any, requests: Any, folder: str) -> None:
    """Let one engine in."""
    identity, _hello = handshake.recv_multipart()
    addresses = Addresses(inputs=(f"ipc://{folder}/i",), outputs=(f"ipc://{folder}/o",))
    handshake.send_multipart([identity, codec.encode_init(Init(addresses=addresses))])
    requests.recv_multipart()
    handshake.recv_multipart()


def ask(requests: Any, outputs: Any, number: int) -> float:
    """Send one request and wait for its end."""
    began = time.perf_counter()
    request = GenerateRequest(request_id=f"r{number}", prompt_token_ids=PROMPT, sampling=BRIEF)
    wire = to_wire(request, wire_id=request.request_id)
    requests.send_multipart([codec.rank_identity(0), *codec.encode_input(codec.Add(wire))])
    while True:
        message = codec.decode_output(outputs.recv_multipart())
        if isinstance(message, codec.EngineDead):
            raise RuntimeError("the engine is dead")  # noqa: TRY004 - it is no wrong argument
        if message.outputs and message.outputs[-1].finish_reason is not None:
            return time.perf_counter() - began


def bare_echo() -> float:
    """Seconds of as many bytes there and back, to a process that blocks as well."""
    trips = []
    with (
        tempfile.TemporaryDirectory() as folder,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as there,
        context.socket(zmq.PULL) as back,
        subprocess.Popen([sys.executable, __file__, "--echo", folder]) as other,  # noqa: S603
    ):
        there.bind(f"ipc://{folder}/there")
        back.bind(f"ipc://{folder}/back")
        for _ in range(TRIPS):
            began = time.perf_counter()
            there.send(bytes(400))
            back.recv()
            trips.append(time.perf_counter() - began)
        other.kill()
    return statistics.median(trips)


def echo(folder: str) -> None:
    """Send back what comes, for ever."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as there,
        context.socket(zmq.PUSH) as back,
    ):
        there.connect(f"ipc://{folder}/there")
        back.connect(f"ipc://{folder}/back")
        while True:
            back.send(there.recv())


# -- The tables ------------------------------------------------------------------------------------


def show_start(rounds: int) -> None:
    measured = compete({"one": partial(start, 1), "eight": partial(start, ENGINES)}, rounds=rounds)
    ratio = 1 / measured.times_faster("eight", than="one")
    print_table(
        f"Until a cluster serves, {MODEL} ({rounds} rounds)",
        ("", "1 engine", f"{ENGINES} engines", "ratio"),
        [
            (
                "s",
                f"{measured.median('one'):.2f}",
                f"{measured.median('eight'):.2f}",
                f"{ratio:.2f}x",
            )
        ],
    )


def show_memory() -> None:
    one, eight = memory(1), memory(ENGINES)
    mib = 2**20
    print_table(
        f"Private memory below the head, {MODEL}, a KV cache of one block each",
        ("", "1 engine", f"{ENGINES} engines", "a further one"),
        [("MiB", *(f"{v / mib:.1f}" for v in (one, eight, (eight - one) / (ENGINES - 1))))],
    )


def show_throughput(rounds: int) -> None:
    print_table(
        f"{REQUESTS} requests x {TOKENS} tokens on each engine, {MODEL} ({rounds} rounds)",
        ("", "tokens/s bare", "open_cluster", "", "tokens/CPU-s bare", "open_cluster", ""),
        [trio.run(throughput, engines, rounds) for engines in (1, 2)],
    )


def show_trips(rounds: int) -> None:
    contest = {
        "dpkit, complete": through_all,
        "by hand, blocking": by_hand,
        "echo, blocking": bare_echo,
    }
    measured = compete(contest, rounds=rounds)
    print_table(
        f"One short request, alone, to an engine that computes nothing ({rounds} rounds)",
        ("", "us", "of echo"),
        [
            (
                name,
                f"{measured.median(name) * 1e6:.0f}",
                f"{1 / measured.times_faster(name, than='echo, blocking'):.1f}x",
            )
            for name in measured.costs
        ],
    )


def main(rounds: int) -> None:
    show_start(rounds)
    show_memory()
    show_throughput(rounds)
    show_trips(rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        step_bare(args.bare)
    elif args.echo:
        echo(args.echo)
    else:
        main(args.rounds)
