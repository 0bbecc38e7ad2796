"""An engine and the owner of its handshake find each other, or say why not."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq
from trio.testing import wait_all_tasks_blocked

from dpkit.errors import LaunchFailed, WireError
from dpkit.wire.codec import COORDINATOR_READY, SUBSCRIBE, encode_hello, encode_init, rank_identity
from dpkit.wire.frontend import open_frontend
from dpkit.wire.handshake import open_engine_connection
from dpkit.wire.structs import VLLM_VERSION, Addresses, Init, ReadyResponse
from dpkit.wire.zsocket import open_context, open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from dpkit.wire.frontend import FrontendSockets
    from dpkit.wire.handshake import EngineConnection
    from dpkit.wire.zsocket import Context, ZSocket

LOOPBACK = "tcp://127.0.0.1:*"


def ready(rank: int = 0) -> ReadyResponse:
    return ReadyResponse(
        max_model_len=100 + rank,
        num_gpu_blocks=64,
        block_size=16,
        dtype="float32",
        vllm_version=VLLM_VERSION,
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=rank,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        instance_id="test",
        supports_lora=False,
        max_loras=0,
    )


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


@pytest.fixture
async def frontend(context: Context, tmp_path: Path) -> AsyncGenerator[FrontendSockets]:
    async with frontend_at(context, tmp_path, ranks=(0, 1, 258)) as opened:
        yield opened


def frontend_at(
    context: Context, directory: Path, **options: Any
) -> AbstractAsyncContextManager[FrontendSockets]:
    return open_frontend(
        context,
        bind_handshake=f"ipc://{directory}/handshake",
        bind_input=LOOPBACK,
        bind_output=f"ipc://{directory}/output",
        **options,
    )


@asynccontextmanager
async def engine_at(
    context: Context, frontend: FrontendSockets, rank: int = 0, **options: Any
) -> AsyncGenerator[EngineConnection]:
    async with open_engine_connection(
        context, frontend.handshake_address, rank=rank, local=True, headless=False, **options
    ) as engine:
        yield engine


def voice(context: Context, address: str, rank: int = 0) -> AbstractAsyncContextManager[ZSocket]:
    """A DEALER that says whatever a test wants it to."""
    return open_zsocket(context, zmq.DEALER, connect=address, routing_id=rank_identity(rank))


def soon() -> float:
    """A deadline that is not meant to pass."""
    return trio.current_time() + 10


async def until_it_is_told(frontend: FrontendSockets, said: str) -> None:
    """Welcome rank 0 in vain until what it did has arrived, however busy the machine is."""
    told = ""
    with trio.fail_after(10):
        while said not in told:
            with pytest.raises(LaunchFailed, match="engine rank 0") as caught:
                await frontend.welcome(0, trio.current_time() + 0.05)
            told = str(caught.value)


HELLO = encode_hello("HELLO", local=True, headless=False)
READY = encode_hello("READY", local=True, headless=False)


# -- They find each other --------------------------------------------------------------------------


async def test_an_engine_is_welcome_and_both_directions_work(
    context: Context, frontend: FrontendSockets
) -> None:
    async def engine() -> None:
        async with engine_at(context, frontend, rank=258) as connection:
            await connection.announce(ready(258))
            (requests,), (outputs,) = connection.inputs, connection.outputs
            outputs.send_nowait(await requests.receive())
            assert connection.coordinator_in is None
            assert connection.coordinator_out is None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine)
        told = await frontend.welcome(258, soon())
        assert (told.max_model_len, told.data_parallel_rank) == (358, 258)
        frontend.input.send_nowait([rank_identity(258), b"a request"])
        assert await frontend.output.receive() == [b"a request"]


@pytest.mark.parametrize("order", [(0, 1, 258), (258, 1, 0)])
async def test_engines_are_welcomed_in_any_order(
    context: Context, frontend: FrontendSockets, order: tuple[int, ...]
) -> None:
    stay = trio.Event()

    async def engine(rank: int) -> None:
        async with engine_at(context, frontend, rank) as connection:
            await connection.announce(ready(rank))
            await stay.wait()

    async with trio.open_nursery() as nursery:
        for rank in (0, 1, 258):
            nursery.start_soon(engine, rank)
        for rank in order:
            assert (await frontend.welcome(rank, soon())).data_parallel_rank == rank
        stay.set()


async def test_an_engine_that_leaves_at_once_has_been_heard(
    context: Context, frontend: FrontendSockets
) -> None:
    async def engine() -> None:
        async with open_context() as own, engine_at(own, frontend) as connection:
            await connection.announce(ready())
            connection.outputs[0].send_nowait([b"my last words"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine)
        await frontend.welcome(0, soon())
        assert await frontend.output.receive() == [b"my last words"]


@asynccontextmanager
async def owner_of(context: Context, init: bytes) -> AsyncGenerator[tuple[ZSocket, trio.Nursery]]:
    """An owner of somebody else's make: it sends this INIT and says nothing more."""

    async def answer() -> None:
        identity, hello = await owner.receive()
        assert hello == HELLO
        owner.send_nowait([identity, init])

    async with (
        open_zsocket(context, zmq.ROUTER, bind=LOOPBACK) as owner,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(answer)
        yield owner, nursery


async def test_each_frontend_is_told_and_knows_its_place(context: Context) -> None:
    async with (
        open_zsocket(context, zmq.ROUTER, bind=LOOPBACK) as input_0,
        open_zsocket(context, zmq.ROUTER, bind=LOOPBACK) as input_1,
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as output_0,
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as output_1,
    ):
        there = Addresses(
            inputs=(input_0.endpoint, input_1.endpoint),
            outputs=(output_0.endpoint, output_1.endpoint),
            frontend_stats_publish_address="tcp://127.0.0.1:4567",
        )
        async with (
            owner_of(context, encode_init(Init(addresses=there))) as (owner, _),
            open_engine_connection(
                context, owner.endpoint, rank=3, local=True, headless=False
            ) as engine,
        ):
            await engine.announce(ready(3))
            for place, frontend in enumerate((input_0, input_1)):
                identity, response = await frontend.receive()
                assert identity == rank_identity(3)
                assert b"tcp://127.0.0.1:4567" in response
                frontend.send_nowait([identity, b"%d" % place])
            assert [await each.receive() for each in engine.inputs] == [[b"0"], [b"1"]]
            for place, push in enumerate(engine.outputs):
                push.send_nowait([b"%d" % place])
            assert [await output_0.receive(), await output_1.receive()] == [[b"0"], [b"1"]]
            assert (await owner.receive())[1] == READY


async def test_a_vanished_frontend_is_noticed(context: Context, tmp_path: Path) -> None:
    dropped = trio.Event()
    async with trio.open_nursery() as nursery:
        async with frontend_at(context, tmp_path, ranks={0}) as frontend:

            async def engine() -> None:
                async with engine_at(context, frontend) as connection, trio.open_nursery() as inner:
                    await connection.announce(ready())
                    (requests,) = connection.inputs
                    inner.start_soon(partial(requests.watch_peers, on_drop=lambda _: dropped.set()))
                    await dropped.wait()
                    inner.cancel_scope.cancel()

            nursery.start_soon(engine)
            await frontend.welcome(0, soon())
            assert not dropped.is_set()
        with trio.fail_after(5):
            await dropped.wait()


# -- The coordinator -------------------------------------------------------------------------------


async def test_an_engine_is_not_ready_before_the_coordinator_says_so(
    context: Context, tmp_path: Path
) -> None:
    async with (
        open_zsocket(context, zmq.XPUB, bind=LOOPBACK) as publishes,
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as collects,
        frontend_at(
            context,
            tmp_path,
            ranks={0},
            coordinator_input=publishes.endpoint,
            coordinator_output=collects.endpoint,
        ) as frontend,
        trio.open_nursery() as nursery,
    ):
        announced = trio.Event()

        async def engine() -> None:
            async with engine_at(context, frontend) as connection:
                await connection.announce(ready())
                announced.set()
                assert connection.coordinator_in is not None
                assert connection.coordinator_out is not None
                connection.coordinator_out.send_nowait([b"counts"])
                assert await connection.coordinator_in.receive() == [COORDINATOR_READY]

        nursery.start_soon(engine)
        await until_it_is_told(frontend, "has not said READY")
        assert await publishes.receive() == [SUBSCRIBE]
        assert not announced.is_set()
        publishes.send_nowait([b"\x02", b"\x92\x00\xc0"])  # the wave of others, as yet unheard
        publishes.send_nowait([COORDINATOR_READY])
        await frontend.welcome(0, soon())
        assert await collects.receive() == [b"counts"]
        publishes.send_nowait([COORDINATOR_READY])  # one more engine has subscribed


async def test_a_coordinator_that_never_says_ready_is_named(
    context: Context, tmp_path: Path
) -> None:
    async with (
        open_zsocket(context, zmq.XPUB, bind=LOOPBACK) as publishes,
        frontend_at(context, tmp_path, ranks={0}, coordinator_input=publishes.endpoint) as frontend,
        trio.open_nursery() as nursery,
    ):

        async def engine() -> None:
            async with engine_at(context, frontend) as connection:
                with pytest.raises(LaunchFailed, match=rf"coordinator at {publishes.endpoint}"):
                    await connection.announce(ready(), patience=0.05)

        nursery.start_soon(engine)
        with pytest.raises(LaunchFailed):
            await frontend.welcome(0, trio.current_time() + 0.1)


# -- The engine says why not -----------------------------------------------------------------------


async def test_an_owner_that_does_not_answer_is_named(context: Context) -> None:
    nobody = "tcp://127.0.0.1:1"
    with pytest.raises(LaunchFailed, match=rf"no INIT from {nobody} within 0.05 s"):
        async with open_engine_connection(
            context, nobody, rank=0, local=True, headless=False, patience=0.05
        ):
            pass


@pytest.mark.parametrize(
    ("init", "fault"),
    [
        (b"\xc1", "INIT"),
        (encode_init(Init(addresses=Addresses(inputs=(), outputs=()))), "0 input and 0 output"),
        (
            encode_init(Init(addresses=Addresses(inputs=("tcp://a:1", "tcp://b:1"), outputs=()))),
            "2 input and 0 output",
        ),
    ],
    ids=["unreadable", "empty", "unequal"],
)
async def test_an_init_that_makes_no_sense_is_refused(
    context: Context, init: bytes, fault: str
) -> None:
    async with owner_of(context, init) as (owner, _):
        with pytest.raises(WireError, match=fault):
            async with open_engine_connection(
                context, owner.endpoint, rank=0, local=True, headless=False
            ):
                pass


async def test_an_init_is_one_frame(context: Context) -> None:
    async with open_zsocket(context, zmq.ROUTER, bind=LOOPBACK) as owner:

        async def answer() -> None:
            identity, _ = await owner.receive()
            owner.send_nowait([identity, b"one", b"two"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            with pytest.raises(WireError, match="one frame, not 2"):
                async with open_engine_connection(
                    context, owner.endpoint, rank=0, local=True, headless=False
                ):
                    pass


# -- The owner says why not ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "has not said HELLO"),
        ([HELLO], "was told the addresses, but has not said READY"),
        ([HELLO, READY], "said READY, but has told nothing of itself"),
    ],
    ids=["silent", "greeted", "ready"],
)
async def test_G05_an_engine_that_is_late_is_told_how_far_it_came(  # noqa: N802
    context: Context, frontend: FrontendSockets, words: list[bytes], said: str
) -> None:
    async with voice(context, frontend.handshake_address) as engine:
        for word in words:
            engine.send_nowait([word])
        await until_it_is_told(frontend, said)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([[HELLO], [HELLO]], "HELLO and was told the addresses.* and now says HELLO"),
        ([[HELLO], [READY], [HELLO]], "said READY.* and now says HELLO"),
        ([[READY]], "has not said HELLO, and now says READY"),
        ([[b"\xc1"]], "a HELLO or READY"),
        ([[HELLO, b"more"]], "2 frames at once"),
        ([[b""]], "a HELLO or READY"),
    ],
    ids=["twice", "again", "too soon", "unreadable", "two frames", "empty"],
)
async def test_who_breaks_the_protocol_is_refused_and_the_others_are_welcome(
    context: Context, frontend: FrontendSockets, messages: list[list[bytes]], fault: str
) -> None:
    async def good() -> None:
        async with engine_at(context, frontend, rank=1) as connection:
            await connection.announce(ready(1))
            await connection.inputs[0].receive()

    async with (
        voice(context, frontend.handshake_address) as bad,
        trio.open_nursery() as nursery,
    ):
        for message in messages:
            bad.send_nowait(message)
        await trio.sleep(0.05)  # let all of it arrive first
        nursery.start_soon(good)
        await frontend.welcome(1, soon())
        with pytest.raises(WireError, match=f"engine rank 0 cannot be welcomed: .*{fault}"):
            await frontend.welcome(0, soon())
        frontend.input.send_nowait([rank_identity(1), b"go"])


@pytest.mark.parametrize(
    ("response", "fault"), [(b"", "is empty"), (b"\xc1", "a ready response")], ids=str
)
async def test_an_engine_must_tell_of_itself(
    context: Context, frontend: FrontendSockets, response: bytes, fault: str
) -> None:
    async with (
        voice(context, frontend.handshake_address) as greets,
        voice(context, frontend.input.endpoint) as tells,
    ):
        greets.send_nowait([HELLO])
        greets.send_nowait([READY])
        tells.send_nowait([response])
        with pytest.raises(WireError, match=fault):
            await frontend.welcome(0, soon())


async def test_an_engine_of_another_owner_is_refused(context: Context, tmp_path: Path) -> None:
    async with (
        frontend_at(context, tmp_path, ranks={0}, local=False) as frontend,
        voice(context, frontend.handshake_address) as engine,
    ):
        engine.send_nowait([HELLO])
        with pytest.raises(WireError, match="says local=True"):
            await frontend.welcome(0, soon())


async def test_strangers_get_no_answer_and_disturb_nobody(
    context: Context, frontend: FrontendSockets, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        voice(context, frontend.handshake_address, rank=7) as unexpected,
        open_zsocket(context, zmq.DEALER, connect=frontend.handshake_address) as nameless,
        voice(context, frontend.handshake_address) as engine,
    ):
        for each in (unexpected, nameless, engine):
            each.send_nowait([HELLO])
        with caplog.at_level(logging.WARNING, "dpkit.wire"):
            await until_it_is_told(frontend, "has not said READY")
            assert await engine.receive() == [encode_init(frontend.init)]
            while caplog.text.count("no engine that is expected") < 2:
                await until_it_is_told(frontend, "has not said READY")
        with trio.move_on_after(0.02) as waiting:
            await unexpected.receive()
        assert waiting.cancelled_caught


async def test_who_greets_and_leaves_may_be_followed_by_another(
    context: Context, frontend: FrontendSockets, caplog: pytest.LogCaptureFixture
) -> None:
    address, identity = frontend.handshake_address, rank_identity(0)
    async with (
        open_context() as other,  # leaving it waits until the word has left
        open_zsocket(
            other, zmq.DEALER, connect=address, routing_id=identity, linger_ms=1000
        ) as short_lived,
    ):
        short_lived.send_nowait([HELLO])
    await trio.sleep(0.05)  # until its connection is gone, too
    while "said HELLO and left" not in caplog.text:
        await until_it_is_told(frontend, "has not said HELLO")
    async with trio.open_nursery() as nursery:

        async def engine() -> None:
            async with engine_at(context, frontend) as connection:
                await connection.announce(ready())
                await connection.inputs[0].receive()

        nursery.start_soon(engine)
        await frontend.welcome(0, soon())
        await wait_all_tasks_blocked()
        frontend.input.send_nowait([rank_identity(0), b"go"])
