"""One engine behind real sockets: how it comes up, whom it hears, and what its end looks like."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq
from attrs import define, evolve, field

from dpkit.engine.models.echo import EchoModel
from dpkit.errors import OutOfMemory, WireError
from dpkit.link.engine import Deserted, Loaded, Place, serve_engine
from dpkit.messages import EngineId
from dpkit.wire.address import AddressFailed
from dpkit.wire.codec import (
    COORDINATOR_READY,
    Utility,
    decode_output,
    encode_start_wave,
)
from dpkit.wire.structs import VLLM_VERSION, FinishCode, StartWave, UtilityCall
from dpkit.wire.zsocket import open_context, open_zsocket
from tests.link.lab import LIMITS, Timed, ask
from tests.link.owner import Frontend, Owner, open_owner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dpkit.abc import Model
    from dpkit.wire.zsocket import Context, ZSocket

RANK = 258


class Held(EchoModel):
    """Its steps wait in their thread until they are let go."""

    inline = False

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def execute(self, batch: Any, cache: Any) -> Any:
        self.begun.set()
        self.go.wait(10)
        return super().execute(batch, cache)


class Slow(EchoModel):
    """A step takes a hundredth of a second."""

    def execute(self, batch: Any, cache: Any) -> Any:
        return evolve(super().execute(batch, cache), duration_s=0.01)


class Hungry(EchoModel):
    """There is no room for its cache."""

    def allocate(self, **_: int) -> Any:
        raise OutOfMemory("no room")


@define(eq=False)
class Engine:
    """An engine that is being served in this process."""

    stop: trio.Event = field(factory=trio.Event)
    ended: trio.Event = field(factory=trio.Event)
    error: Exception | None = None
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


@asynccontextmanager
async def open_engine(
    owner: Owner,
    model: Model | None = None,
    *,
    publish: bool = True,
    lease: float | None = None,
) -> AsyncIterator[Engine]:
    engine = Engine()
    place = Place(
        engine=EngineId("e0", 4),
        rank=owner.rank,
        count=300,
        handshake=owner.handshake.endpoint,
        local=True,
        publish_delta=0.02 if publish else None,
        lease=lease,
    )
    loaded = Loaded(model=model or EchoModel(), limits=LIMITS, dtype="float32")

    async def load() -> Loaded:
        return loaded

    async def serve() -> None:
        with engine.scope:
            try:
                await serve_engine(place, load, engine.stop)
            except Exception as error:  # noqa: BLE001 - tests look at it
                engine.error = error
        engine.ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield engine
        engine.stop.set()
        with trio.move_on_after(5):
            await engine.ended.wait()
        engine.scope.cancel()


async def test_an_engine_says_its_own_sizes(context) -> None:
    async with open_owner(context, frontends=2, rank=RANK) as owner, open_engine(owner):
        for told in await owner.welcome():
            assert told.data_parallel_rank == RANK
            assert told.data_parallel_size == 300
            assert told.max_num_seqs == LIMITS.max_num_seqs
            assert told.max_num_batched_tokens == LIMITS.max_num_batched_tokens
            assert told.num_gpu_blocks == LIMITS.num_blocks
            assert told.block_size == LIMITS.block_size
            assert told.max_model_len == LIMITS.kv_tokens
            assert told.instance_id == "e0#4"
            assert told.vllm_version == VLLM_VERSION
            assert told.dp_stats_address is None


async def test_each_frontend_gets_its_own_answers_and_the_coordinator_the_counts(context) -> None:
    async with (
        open_owner(context, frontends=2, coordinator=True, rank=RANK) as owner,
        open_engine(owner) as engine,
    ):
        for told in await owner.welcome():
            assert told.dp_stats_address == "tcp://127.0.0.1:1"
        first, second = owner.frontends
        first.say(ask("same", (1, 2)))
        second.say(ask("other", (3, 4)))
        assert [e.new_token_ids for e in await first.entries("same")] == [(1,), (2,), (256,)]
        assert [e.new_token_ids for e in await second.entries("other")] == [(3,), (4,), (256,)]
        assert owner.coordinator_in is not None
        heard = decode_output(await owner.coordinator_in.receive())
        assert heard.engine_index == RANK  # type: ignore[union-attr]
        assert heard.scheduler_stats is not None  # type: ignore[union-attr]
        engine.stop.set()
        await engine.ended.wait()
        assert engine.error is None


async def test_what_the_coordinator_says_later_disturbs_nobody(context) -> None:
    async with open_owner(context, coordinator=True) as owner, open_engine(owner):
        await owner.welcome()
        coordinator = owner.coordinator_out
        assert coordinator is not None
        for frames in ([COORDINATOR_READY], encode_start_wave(StartWave(0, 1)), [b"what?"]):
            coordinator.send_nowait(frames)
        (frontend,) = owner.frontends
        frontend.say(ask("a"))
        assert len(await frontend.entries("a")) == 4


async def test_a_coordinator_that_comes_back_is_told_the_counts_and_no_old_ones(context) -> None:
    async with open_owner(context, coordinator=True) as owner, open_engine(owner, Slow()):
        await owner.welcome()
        (frontend,) = owner.frontends
        publish, collect = owner.coordinator_out, owner.coordinator_in
        assert publish is not None
        assert collect is not None
        there, back = publish.endpoint, collect.endpoint
        publish.close()
        collect.close()
        frontend.say(ask("short", max_tokens=3))
        await frontend.entries("short")
        frontend.say(ask("long", max_tokens=200, ignore_eos=True))
        await frontend.counts(running=1, waiting=0)
        async with (
            bound_again(context, zmq.PULL, back) as collect,
            bound_again(context, zmq.XPUB, there),
        ):
            heard = decode_output(await collect.receive())
            assert heard.scheduler_stats.num_running_reqs == 1  # type: ignore[union-attr]


async def test_counts_that_nobody_wants_come_with_outputs_only(context) -> None:
    async with open_owner(context) as owner, open_engine(owner, publish=False):
        await owner.welcome()
        (frontend,) = owner.frontends
        frontend.say(ask("a", max_tokens=1))
        heard = decode_output(await frontend.output.receive())
        assert [e.request_id for e in heard.outputs] == ["a"]  # type: ignore[union-attr]


async def test_an_engine_answers_in_the_middle_of_a_step(context) -> None:
    model = Held()
    async with open_owner(context) as owner, open_engine(owner, model):
        await owner.welcome()
        (frontend,) = owner.frontends
        frontend.say(ask("a", max_tokens=1))
        await trio.to_thread.run_sync(model.begun.wait)
        frontend.say(Utility(UtilityCall(0, 2**64 - 1, "dpkit_progress")))
        answer = await frontend.answer()
        assert answer.call_id == 2**64 - 1
        assert answer.result is not None
        steps, elapsed = answer.result[1]
        assert steps == 0
        assert elapsed > 0
        model.go.set()
        assert len(await frontend.entries("a")) == 1


async def test_a_stop_ends_requests_at_once_and_the_engine_after_its_step(context) -> None:
    model = Held()
    async with open_owner(context) as owner, open_engine(owner, model) as engine:
        await owner.welcome()
        (frontend,) = owner.frontends
        frontend.say(ask("a"))
        await trio.to_thread.run_sync(model.begun.wait)
        engine.stop.set()
        (entry,) = await frontend.entries("a")
        assert entry.finish_reason is FinishCode.ABORT
        assert not engine.ended.is_set()
        frontend.say(ask("b"))
        (entry,) = await frontend.entries("b")
        assert entry.finish_reason is FinishCode.ABORT
        model.go.set()
        await engine.ended.wait()
        assert engine.error is None


async def test_what_a_model_raises_is_told_and_comes_out(context) -> None:
    async with (
        open_owner(context, frontends=2) as owner,
        open_engine(owner, Timed(fail_at=1)) as engine,
    ):
        await owner.welcome()
        first, second = owner.frontends
        first.say(ask("a"))
        *_, last = await first.last_word()
        (entry,) = last.outputs
        assert entry.error is not None
        assert entry.error.code == "engine_lost"
        assert last.finished_requests == ["a"]
        await second.last_word()
        await engine.ended.wait()
        assert isinstance(engine.error, RuntimeError)


async def test_an_engine_that_is_cancelled_says_so(context) -> None:
    async with open_owner(context) as owner, open_engine(owner) as engine:
        await owner.welcome()
        engine.scope.cancel()
        (frontend,) = owner.frontends
        assert await frontend.last_word() == []


async def test_no_frontend_hears_of_an_engine_that_cannot_allocate(context) -> None:
    async with open_owner(context) as owner, open_engine(owner, Hungry()) as engine:
        await owner.greet()
        await engine.ended.wait()
        assert isinstance(engine.error, OutOfMemory)
        with trio.move_on_after(0.05) as nothing_came:
            await owner.frontends[0].input.receive()
        assert nothing_came.cancelled_caught


async def test_a_stop_before_the_owner_answers_is_obeyed(context) -> None:
    async with open_owner(context) as owner, open_engine(owner) as engine:
        await owner.handshake.receive()
        engine.stop.set()
        await engine.ended.wait()
        assert engine.error is None


async def test_garbage_ends_its_frontend_and_no_other(context, caplog) -> None:
    async with open_owner(context, frontends=2) as owner, open_engine(owner) as engine:
        await owner.welcome()
        first, second = owner.frontends
        first.say_frames([b"\x00", b"\xc1 garbage"])
        await first.last_word()
        assert "frontend 0 cannot be understood" in caplog.text
        second.say(ask("b"))
        assert len(await second.entries("b")) == 4
        second.say_frames([b"\x42", b""])
        await second.last_word()
        await engine.ended.wait()
        assert isinstance(engine.error, WireError)  # there is nobody left


async def test_E15_requests_of_a_frontend_that_vanished_are_dropped_and_it_may_come_back(
    context,
) -> None:
    endless = ask("endless", max_tokens=200, ignore_eos=True)
    async with open_owner(context, frontends=2) as owner, open_engine(owner, Slow()):
        await owner.welcome()
        first, second = owner.frontends
        address = first.input.endpoint
        first.say(endless)
        await second.counts(running=1, waiting=0)
        first.input.close()
        await second.counts(running=0, waiting=0)
        async with bound_again(context, zmq.ROUTER, address) as socket:
            again = Frontend(socket, first.output, first.rank)
            assert (await again.welcome()).instance_id == "e0#4"
            again.say(ask("a"))
            assert len(await again.entries("a")) == 4


async def test_an_engine_whose_last_frontend_is_gone_for_longer_than_its_lease_ends(
    context,
) -> None:
    async with (
        open_owner(context, frontends=2) as owner,
        open_engine(owner, lease=0.1) as engine,
    ):
        await owner.welcome()
        first, second = owner.frontends
        first.input.close()
        await trio.sleep(0.15)
        assert not engine.ended.is_set(), "one is left"
        second.input.close()
        await engine.ended.wait()
        assert isinstance(engine.error, Deserted)
        assert str(engine.error) == "engine e0#4: no frontend has been there for 0.1 s"


async def test_a_frontend_that_comes_back_within_the_lease_finds_its_engine(context) -> None:
    async with open_owner(context) as owner, open_engine(owner, lease=0.3) as engine:
        await owner.welcome()
        (frontend,) = owner.frontends
        address = frontend.input.endpoint
        frontend.input.close()
        async with bound_again(context, zmq.ROUTER, address) as socket:
            again = Frontend(socket, frontend.output, frontend.rank)
            await again.welcome()
            await trio.sleep(0.35)
            again.say(ask("a"))
            assert len(await again.entries("a")) == 4
            assert not engine.ended.is_set()


@asynccontextmanager
async def bound_again(
    context: Context, kind: zmq.SocketType, address: str
) -> AsyncIterator[ZSocket]:
    """A socket where one was closed: libzmq lets go of the port in its own time."""
    while True:
        try:
            async with open_zsocket(context, kind, bind=address) as socket:
                yield socket
                return
        except AddressFailed:
            await trio.sleep(0.001)
