"""A group of engines in processes, in lockstep, with a coordinator and one frontend for all."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from attrs import asdict, define, field

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.launch.zygote import open_zygote
from dpkit.link.coordinator import open_coordinator
from dpkit.wire.address import AddressFailed
from dpkit.wire.codec import Utility, decode_output, encode_input, rank_identity
from dpkit.wire.frontend import open_frontend
from dpkit.wire.structs import Envelope, UtilityCall
from dpkit.wire.zsocket import open_context
from tests.link.lab import LIMITS
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dpkit.abc import Launcher, Worker
    from dpkit.engine.limits import EngineLimits
    from dpkit.link.coordinator import WireCoordinator
    from dpkit.wire.codec import Abort, Add
    from dpkit.wire.frontend import FrontendSockets
    from dpkit.wire.structs import WireOutput
    from dpkit.wire.zsocket import Context

LOOPBACK = "tcp://127.0.0.1:*"
ECHO = {"model": "echo", "dtype": "auto", "quant": "none", "lockstep": True}
INTERVAL = 4


@define(eq=False)
class Ranks:
    """The group, as its frontend has it."""

    workers: list[Worker]
    sockets: FrontendSockets
    heard: list[Envelope] = field(factory=list)
    dead: int = 0
    news: trio.Condition = field(factory=trio.Condition)

    def say(self, rank: int, message: Add | Abort | Utility) -> None:
        self.sockets.input.send_nowait([rank_identity(rank), *encode_input(message)])

    def call_all(self, method: str, *args: Any) -> None:
        for rank in range(len(self.workers)):
            self.call(rank, method, *args)

    def call(self, rank: int, method: str, *args: Any) -> None:
        self.say(rank, Utility(UtilityCall(0, rank, method, args)))

    @property
    def answered(self) -> list[int]:
        """Ranks whose calls have been answered, in order."""
        answers = [each.utility_output for each in self.heard]
        return [answer.call_id for answer in answers if answer is not None]

    def entries(self, request_id: str) -> list[WireOutput]:
        entries = [entry for envelope in self.heard for entry in envelope.outputs]
        return [entry for entry in entries if entry.request_id == request_id]

    async def ended(self, request_id: str) -> list[WireOutput]:
        await until(lambda: any(e.finish_reason is not None for e in self.entries(request_id)))
        return self.entries(request_id)

    async def wait_dead(self, count: int) -> None:
        """Wait until so many have said that they die."""
        await until(lambda: self.dead == count)

    def take(self, frames: list[bytes]) -> None:
        message = decode_output(frames)
        if isinstance(message, Envelope):
            self.heard.append(message)
        else:
            self.dead += 1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def job(
    handshake: str, rank: int, count: int, *, limits: EngineLimits, vote_timeout: float
) -> dict[str, Any]:
    return {
        "handshake": handshake,
        "rank": rank,
        "name": f"e{rank}",
        "limits": asdict(limits),
        "threads": 1,
        "kv_publish_delta": 0.02,
        "max_message": 2**20,
        "log_level": logging.WARNING,
        "count": count,
        "lockstep": {
            "sync_interval": INTERVAL,
            "vote_timeout": vote_timeout,
            "start_timeout": 10.0,
        },
    }


@asynccontextmanager
async def open_ballot_zygote() -> AsyncIterator[Launcher]:
    """What ranks are forked from: it has torch."""
    async with open_zygote("dpkit.launch.child:prepare", ECHO, name="ranks") as zygote:
        yield zygote


def rules_of(count: int) -> CoordinatorRules:
    return CoordinatorRules(count, now=trio.current_time(), wave_coordination=True)


async def keep_coordinator(
    context: Context,
    rules: CoordinatorRules,
    *,
    bind: str = LOOPBACK,
    task_status: trio.TaskStatus[tuple[WireCoordinator, trio.CancelScope]],
) -> None:
    """Be a coordinator until the scope that it starts with is cancelled."""
    with trio.CancelScope() as scope:
        while True:
            try:
                async with open_coordinator(context, rules, bind=bind) as coordinator:
                    task_status.started((coordinator, scope))
                    await coordinator.run()
            except AddressFailed:
                await trio.sleep(0.01)  # another one has just left


@asynccontextmanager
async def open_running_coordinator(
    context: Context, rules: CoordinatorRules
) -> AsyncIterator[WireCoordinator]:
    async with trio.open_nursery() as nursery:
        coordinator, scope = await nursery.start(keep_coordinator, context, rules)
        yield coordinator
        scope.cancel()


@asynccontextmanager
async def open_ranks(
    zygote: Launcher,
    coordinator: WireCoordinator,
    limits: Sequence[EngineLimits] = (LIMITS, LIMITS),
    *,
    vote_timeout: float = 10.0,
    told: dict[str, Any] | None = None,
    welcome: bool = True,
) -> AsyncIterator[Ranks]:
    """Start a group; with `welcome`, wait until it serves."""
    count = len(limits)
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(open_context())
        sockets = await stack.enter_async_context(
            open_frontend(
                context,
                ranks=range(count),
                bind_handshake=LOOPBACK,
                bind_input=LOOPBACK,
                bind_output=LOOPBACK,
                coordinator_input=coordinator.addresses.back_publish,
                coordinator_output=coordinator.addresses.back_output,
            )
        )
        meet = {"data_parallel_master_ip": "127.0.0.1", "data_parallel_master_port": free_port()}
        sockets.init.parallel_config.update(meet if told is None else told)
        workers = [
            await stack.enter_async_context(
                zygote.open_worker(
                    "dpkit.launch.child:work",
                    job(
                        sockets.handshake_address,
                        rank,
                        count,
                        limits=limits[rank],
                        vote_timeout=vote_timeout,
                    ),
                    name=f"e{rank}",
                )
            )
            for rank in range(count)
        ]
        nursery = await stack.enter_async_context(trio.open_nursery())
        ranks = Ranks(workers, sockets)
        if welcome:
            for rank in range(count):
                await sockets.welcome(rank, trio.current_time() + 10)
        else:
            nursery.start_soon(_answer, sockets)
        nursery.start_soon(sockets.output.pump, ranks.take)
        yield ranks
        nursery.cancel_scope.cancel()


async def _answer(sockets: FrontendSockets) -> None:
    """Answer HELLOs of engines that will not be ready."""
    with trio.move_on_after(10):
        await sockets.welcome(0, trio.current_time() + 10)
