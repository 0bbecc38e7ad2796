"""What it costs an engine to step in a group: a vote of two processes, spread over its steps.

The bar is the same engine alone. It echoes, so a step is all overhead: the busy loop's, and that of
a vote at the first step and at every so many. The other rank does dummy steps in a process of its
own, on the same machine. CPU time is this process's, gloo's threads included.

Run it:  python benchmarks/bench_lockstep.py [rounds]
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio
from harness import compete, print_table

from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.echo import EchoModel
from dpkit.engine.publish import PublishGate
from dpkit.engine.waves import EngineWaves
from dpkit.link.gloo import Meeting, open_gloo
from dpkit.messages import EngineId, GenerateRequest, SamplingParams
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.inbox import Inbox
from dpkit.nursery.lockstep import Lockstep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.messages import EngineOutput

STEPS = 4_000
INTERVALS = (64, 16, 4, 1)
ROUNDS = 5
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, block_size=16, num_blocks=512)


@asynccontextmanager
async def open_lockstep(
    rank: int, port: int, interval: int, inbox: Inbox
) -> AsyncIterator[Lockstep]:
    """Meet the other rank."""
    meeting = Meeting(
        host="127.0.0.1",
        port=port,
        place=rank,
        ranks=(0, 1),
        patience=60.0,
        time_limit=60.0,
        limit_key="",
    )
    waves = EngineWaves(rank, speaks=rank == 0, sync_interval=interval)
    async with open_gloo(meeting, {}) as ballots:
        yield Lockstep(engine=EngineId(f"e{rank}"), waves=waves, ballots=ballots, inbox=inbox)


def make_loop(inbox: Inbox, lockstep: Lockstep | None) -> BusyLoop:
    """An engine that echoes."""
    model = EchoModel()
    return BusyLoop(
        engine=EngineId("e"),
        index=0,
        model=model,
        core=EngineCore(model, limits=LIMITS),
        inbox=inbox,
        publish=None,
        gate=PublishGate(1.0),
        lockstep=lockstep,
    )


async def accompany(port: int, interval: int) -> None:
    """Be the other rank for one wave."""
    inbox = Inbox()
    async with open_lockstep(1, port, interval, inbox) as lockstep:
        lockstep.note_start(0, 0)
        inbox.close()
        await make_loop(inbox, lockstep).run()


async def answer(inbox: Inbox, lockstep: Lockstep | None, clock: Callable[[], float]) -> float:
    """Seconds that each step of a request takes."""
    began = ended = clock()

    def deliver(_: EngineId, output: EngineOutput) -> None:
        nonlocal ended
        if output.finish_reason is not None:
            ended = clock()

    sampling = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    request = GenerateRequest(request_id="a", prompt_token_ids=(1, 2, 3), sampling=sampling)
    inbox.submit(request, deliver)
    inbox.close()
    began = clock()
    await make_loop(inbox, lockstep).run()
    return (ended - began) / STEPS


def by_itself(clock: Callable[[], float]) -> float:
    """Step alone."""

    async def run() -> float:
        return await answer(Inbox(), None, clock)

    return trio.run(run)


async def together(interval: int, port: int, clock: Callable[[], float]) -> float:
    """Step in a group."""
    inbox = Inbox()
    async with open_lockstep(0, port, interval, inbox) as lockstep:
        return await answer(inbox, lockstep, clock)


def with_company(other: subprocess.Popen[str], interval: int, clock: Callable[[], float]) -> float:
    """Have the other process come along."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(port, interval, file=other.stdin, flush=True)
    return trio.run(together, interval, port, clock)


def main(rounds: int = ROUNDS) -> None:
    """Print one table."""
    command = [sys.executable, __file__, "--accompany"]
    rows = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as other:  # noqa: S603 - this very file
        for title, clock in (("wall", time.perf_counter), ("CPU", time.process_time)):
            contenders: dict[str, Callable[[], float]] = {"alone": partial(by_itself, clock)}
            for interval in INTERVALS:
                contenders[str(interval)] = partial(with_company, other, interval, clock)
            result = compete(contenders, rounds=rounds)
            rows.append([title, *(f"{result.median(name) * 1e6:.1f}" for name in contenders)])
    print_table(
        f"us of each of {STEPS:,} steps; two ranks that vote every so many ({rounds} rounds)",
        ("", "alone", *map(str, INTERVALS)),
        rows,
    )


def follow() -> None:
    """Accompany whoever says where, for as long as somebody says so."""
    for line in sys.stdin:
        port, interval = map(int, line.split())
        trio.run(accompany, port, interval)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--accompany"]:
        follow()
    else:
        main(*map(int, sys.argv[1:2]))
