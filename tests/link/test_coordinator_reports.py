"""Users' reports of other coordinators, against ours: on real sockets, some with real engines."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import threading
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq
from attrs import define, field

from dpkit.engine.models.echo import EchoModel
from dpkit.link.coordinator import serve_coordinator
from dpkit.link.engine import Loaded, Place, serve_engine
from dpkit.messages import EngineId
from dpkit.testing.leaks import Belongings
from dpkit.wire.address import AddressFailed
from dpkit.wire.codec import (
    CoordinatorReady,
    Utility,
    decode_output,
    encode_input,
    encode_publish,
    rank_identity,
)
from dpkit.wire.coordinator import LOOPBACK, CoordinatorAddresses, open_coordinator_sockets
from dpkit.wire.frontend import open_frontend
from dpkit.wire.structs import CoordinatorPublish, Envelope, StartWave, UtilityCall
from dpkit.wire.zsocket import open_context, open_zsocket
from tests.link.coordination import open_again, open_client, open_engine, open_served, settle
from tests.link.lab import LIMITS, ask

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from dpkit.abc import Model
    from dpkit.wire.frontend import FrontendSockets
    from dpkit.wire.zsocket import Context
    from tests.link.coordination import Client, Engine


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


class Held(EchoModel):
    """Its steps wait in their thread, each until it is let go."""

    inline = False

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)

    def execute(self, batch: Any, cache: Any) -> Any:
        self.steps.acquire(timeout=10)
        return super().execute(batch, cache)


@define(eq=False)
class Engines:
    """dpkit's own engines behind a coordinator, and who asks them."""

    frontend: FrontendSockets
    scopes: dict[int, trio.CancelScope] = field(factory=dict)
    answered: trio.Event = field(factory=trio.Event)

    def ask(self, rank: int, request_id: str, **sampling: Any) -> None:
        """Send a request."""
        frames = encode_input(ask(request_id, **sampling))
        self.frontend.input.send_nowait([rank_identity(rank), *frames])

    async def wait_taken(self, rank: int) -> None:
        """Wait until the engine has all that it was asked: it answers in turn."""
        self.answered = trio.Event()
        frames = encode_input(Utility(UtilityCall(0, 1, "is_sleeping")))
        self.frontend.input.send_nowait([rank_identity(rank), *frames])
        await self.answered.wait()

    def hear(self, frames: list[bytes]) -> None:
        """Take what engines say; of interest are answers only."""
        envelope = decode_output(frames)
        if isinstance(envelope, Envelope) and envelope.utility_output is not None:
            self.answered.set()


@asynccontextmanager
async def open_engines(
    context: Context, addresses: CoordinatorAddresses, count: int, model: Model | None = None
) -> AsyncIterator[Engines]:
    """Have so many engines serve."""
    async with (
        open_frontend(
            context,
            ranks=range(count),
            bind_handshake=LOOPBACK,
            bind_input=LOOPBACK,
            bind_output=LOOPBACK,
            coordinator_input=addresses.back_publish,
            coordinator_output=addresses.back_output,
        ) as frontend,
        trio.open_nursery() as nursery,
    ):
        engines = Engines(frontend)
        for rank in range(count):
            scope = engines.scopes[rank] = trio.CancelScope()
            nursery.start_soon(serve_one, engines, rank, count, scope, model or EchoModel())
        for rank in range(count):
            await frontend.welcome(rank, trio.current_time() + 10)
        nursery.start_soon(frontend.output.pump, engines.hear)
        yield engines
        nursery.cancel_scope.cancel()


async def serve_one(
    engines: Engines, rank: int, count: int, scope: trio.CancelScope, model: Model
) -> None:
    """Be one of them."""
    place = Place(
        engine=EngineId(f"e{rank}"),
        rank=rank,
        count=count,
        handshake=engines.frontend.handshake_address,
        local=True,
        publish_delta=0.02,
    )

    async def load() -> Loaded:
        return Loaded(model=model, limits=LIMITS, dtype="float32")

    with scope:
        await serve_engine(place, load, trio.Event())


def held(client: Client) -> int:
    """Requests of the first engine, as far as a client knows."""
    return sum(client.loads[0][:2]) if client.loads else 0


# -- A: stale, missing, mis-ordered stats ----------------------------------------------------------


async def test_A01_engines_that_do_not_step_together_tell_their_counts_too(context) -> None:
    async with (
        open_served(context, 4) as coordinator,
        open_engines(context, coordinator.addresses, 4) as engines,
        open_client(context, coordinator.addresses.front) as client,
    ):
        for rank in range(4):
            engines.ask(rank, f"long-{rank}", max_tokens=200, ignore_eos=True)
        seen = set[int]()

        def all_were_busy() -> bool:
            seen.update(rank for rank, load in enumerate(client.loads) if load[1])
            return len(seen) == 4

        await client.wait(all_were_busy)
        await client.wait_loads(*[(0, 0, 0.0)] * 4)
        assert coordinator.statistics().rules.unknown_engines == 0


async def test_A02_what_waits_for_a_long_step_is_known_before_and_during_it(context) -> None:
    model = Held()
    async with (
        open_served(context, 1) as coordinator,
        open_engines(context, coordinator.addresses, 1, model) as engines,
        open_client(context, coordinator.addresses.front) as client,
    ):
        engines.ask(0, "first", max_tokens=1)
        await client.wait(lambda: held(client) == 1)
        for number in range(20):
            engines.ask(0, f"r{number}", max_tokens=1)
        await engines.wait_taken(0)
        model.steps.release()
        await client.wait(lambda: held(client) == 20)  # and the step that takes them is not over
        model.steps.release(100)
        await client.wait_loads((0, 0, 0.0))


async def test_A10_clients_cannot_tell_the_counts_of_engines(context) -> None:
    async with (
        open_served(context, 2) as coordinator,
        open_engine(context, coordinator.addresses, 0) as engine,
        open_client(context, coordinator.addresses.front) as client,
        open_zsocket(context, zmq.XSUB, connect=coordinator.addresses.front) as other,
    ):
        engine.tell(0, 5, 0.99)
        await client.wait_loads((0, 5, 0.99), (0, 0, 0.0))
        view = CoordinatorPublish(((0, 0, 0.01), (0, 0, 0.0)), 0, False)
        other.send_nowait([encode_publish(view)])
        await settle(lambda: coordinator.statistics().ignored == 1)
        engine.tell(1, 5, 0.99)
        await client.wait_loads((1, 5, 0.99), (0, 0, 0.0))


# -- E: the coordinator's host dies ----------------------------------------------------------------


async def test_E15_engines_and_clients_find_a_coordinator_that_is_back(context) -> None:
    """They notice, go on meanwhile, and rejoin with nobody's help; loads are known again."""
    async with open_coordinator_sockets(context) as sockets:
        addresses = sockets.addresses
    model = Held()
    async with open_client(context, addresses.front) as client, trio.open_nursery() as nursery:
        first = await nursery.start(serve_at, context, addresses)
        async with open_engines(context, addresses, 1, model) as engines:
            engines.ask(0, "long", max_tokens=5)
            await client.wait(lambda: held(client) == 1)
            first.cancel()
            await settle(lambda: not client.subscription.statistics().connected)
            assert held(client) == 1, "what was heard last stands"
            client.heard.clear()
            await nursery.start(serve_at, context, addresses)
            await client.wait(lambda: held(client) == 1)
            model.steps.release(100)
            await client.wait_loads((0, 0, 0.0))
        nursery.cancel_scope.cancel()


async def serve_at(
    context: Context,
    addresses: CoordinatorAddresses,
    *,
    task_status: trio.TaskStatus[trio.CancelScope],
) -> None:
    """Be a coordinator of one engine, until the scope that is handed out is cancelled."""
    with trio.CancelScope() as scope:
        async with open_again(context, addresses, 1):
            task_status.started(scope)
            await trio.sleep_forever()


async def test_E10_an_engine_that_is_back_has_not_the_load_of_its_life_before(context) -> None:
    model = Held()
    async with (
        open_served(context, 1) as coordinator,
        open_client(context, coordinator.addresses.front) as client,
    ):
        async with open_engines(context, coordinator.addresses, 1, model) as engines:
            engines.ask(0, "long", max_tokens=5)
            await client.wait(lambda: held(client) == 1)
            model.steps.release(100)
        async with open_engines(context, coordinator.addresses, 1):
            await client.wait_loads((0, 0, 0.0))


# -- G: start-up -----------------------------------------------------------------------------------


async def test_G01_twenty_coordinators_at_once_do_not_clash() -> None:
    async with trio.open_nursery() as nursery:
        opened = [await nursery.start(serve_coordinator, 1) for _ in range(20)]
        ends = [end for each in opened for end in vars_of(each.addresses)]
        assert len(set(ends)) == 60
        nursery.cancel_scope.cancel()


def vars_of(addresses: CoordinatorAddresses) -> list[str]:
    return [addresses.back_publish, addresses.back_output, addresses.front]


async def test_G02_a_port_that_is_taken_is_named_at_once(context) -> None:
    async with open_coordinator_sockets(context) as taken:
        address = taken.addresses.front
        with pytest.raises(AddressFailed, match=f"cannot listen at {address}: Address already"):
            await serve_coordinator(1, bind=address)


async def test_G03_two_roles_at_one_address_do_not_start(context) -> None:
    async with open_coordinator_sockets(context) as sockets:
        one = sockets.addresses.front
    both = CoordinatorAddresses(back_publish=one, back_output=LOOPBACK, front=one)
    with pytest.raises(AddressFailed, match=f"cannot listen at {one}"):
        await serve_coordinator(1, bind=both)


def test_G10_it_serves_in_a_thread_that_is_not_the_main_one() -> None:
    heard: list[Any] = []

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            coordinator = await nursery.start(serve_coordinator, 2)
            async with (
                open_context() as context,
                open_client(context, coordinator.addresses.front) as client,
            ):
                await client.wait_waiting(0, 0)
                heard.extend(client.loads)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    thread.join()
    assert heard == [(0, 0, 0.0)] * 2


# -- I: waves --------------------------------------------------------------------------------------


async def test_I02_the_very_first_wave_is_told_to_every_rank(context) -> None:
    """It has the number that the group has anyway, 0; what counts is that nobody runs."""
    async with (
        open_served(context, 2, waves=True) as coordinator,
        open_engine(context, coordinator.addresses, 0) as asleep,
        open_engine(context, coordinator.addresses, 1) as asked,
    ):
        assert await asleep.hear() == CoordinatorReady()
        asked.start_wave(0)
        assert await asleep.hear() == StartWave(0, 1)


async def test_I03_a_late_start_of_an_old_wave_wakes_nobody(context) -> None:
    async with (
        open_served(context, 2, waves=True) as coordinator,
        open_engine(context, coordinator.addresses, 0) as first,
        open_engine(context, coordinator.addresses, 1) as second,
    ):
        assert await second.hear() == CoordinatorReady()
        first.start_wave(0)
        first.complete_wave(0)
        first.start_wave(0)
        first.start_wave(1)
        assert [await second.hear() for _ in range(2)] == [StartWave(0, 0), StartWave(1, 0)]
        assert coordinator.statistics().rules.current_wave == 1


# -- N: who comes and goes -------------------------------------------------------------------------


async def test_N02_a_cluster_of_no_engines_is_refused_before_anything_changes(context) -> None:
    async with (
        open_served(context, 2) as coordinator,
        open_client(context, coordinator.addresses.front) as client,
    ):
        await client.wait_waiting(0, 0)
        client.subscription.scale(0)
        await settle(lambda: coordinator.statistics().ignored == 1)
        assert coordinator.rules.engine_count == 2


async def test_N04_one_engine_goes_and_the_counts_of_the_others_are_told(context) -> None:
    async with (
        open_served(context, 3) as coordinator,
        open_engines(context, coordinator.addresses, 3) as engines,
        open_client(context, coordinator.addresses.front) as client,
    ):
        engines.scopes[1].cancel()
        await settle(lambda: coordinator.statistics().engines == 2)
        seen = set[int]()
        for rank in (0, 2):
            engines.ask(rank, f"long-{rank}", max_tokens=200, ignore_eos=True)

        def both_were_busy() -> bool:
            seen.update(rank for rank, load in enumerate(client.loads) if load[1])
            return seen == {0, 2}

        await client.wait(both_were_busy)


async def test_N07_while_the_number_changes_counts_go_on(context) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        for engines in range(2, 12):
            client.subscription.scale(engines)
            engine.tell(engines)
            await client.wait_waiting(engines, *[0] * (engines - 1))


async def test_N08_clients_and_engines_that_come_and_go_leave_nothing(context) -> None:
    async with open_served(context, 1) as coordinator:
        await settle(lambda: coordinator.statistics().rules.published > 0)
        before = Belongings.now()
        for _ in range(100):
            async with (
                open_engine(context, coordinator.addresses) as engine,
                open_client(context, coordinator.addresses.front) as client,
            ):
                engine.tell(1)
                await client.wait_heard()
        await settle(lambda: coordinator.statistics().clients == 0)
        await settle(lambda: coordinator.statistics().engines == 0)
        await settle(lambda: not Belongings.now().beyond(before))  # libzmq's thread closes


@pytest.mark.parametrize("what", ["client", "coordinator"])
async def test_N09_after_a_restart_all_twenty_engines_are_known_at_once(context, what) -> None:
    """What is known does not change any more: it is told because somebody is new."""
    async with open_coordinator_sockets(context) as sockets:
        addresses = sockets.addresses
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for rank in range(20):
            entered = open_engine(context, addresses, rank)
            engines.append(await stack.enter_async_context(entered))
        async with open_again(context, addresses, 20):
            await knows(context, addresses, engines)
            if what == "client":
                await knows(context, addresses, ())
        if what == "coordinator":
            async with open_again(context, addresses, 20):
                await knows(context, addresses, engines)


async def knows(context: Context, addresses: CoordinatorAddresses, tell: Sequence[Engine]) -> None:
    """Have a client know all: from these engines, or else by the first word that it hears."""
    loads = tuple((rank, 20 - rank, 0.5) for rank in range(20))
    async with open_client(context, addresses.front) as client:
        await client.wait_heard()
        while client.loads != loads:
            assert tell
            for engine in tell:
                engine.tell(*loads[engine.rank])
            await trio.sleep(
                0.01
            )  # to a coordinator whose sockets are just closing, words are lost
