"""A ZeroMQ socket in Trio's hands: nothing is lost, nobody stalls, and errors say whose fault."""

from __future__ import annotations

import random
import re
import select
import socket as stdlib_socket
import threading
import time
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from dpkit.wire.address import AddressFailed
from dpkit.wire.zsocket import BURST, PeerGone, ZSocket, open_context, open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from trio.testing import MockClock

    from dpkit.wire.zsocket import Context

LOOPBACK = "tcp://127.0.0.1:*"


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


@asynccontextmanager
async def pair(
    context: Context,
    bound: zmq.SocketType,
    connected: zmq.SocketType,
    *,
    address: str = LOOPBACK,
    **options: Any,
) -> AsyncGenerator[tuple[ZSocket, ZSocket]]:
    """Two sockets that know each other; the connected one calls itself ``peer``."""
    async with (
        open_zsocket(context, bound, bind=address, **options) as here,
        open_zsocket(
            context, connected, connect=here.endpoint, routing_id=b"peer", **options
        ) as there,
    ):
        await introduce(here, there, bound)
        yield here, there


async def introduce(here: ZSocket, there: ZSocket, bound: zmq.SocketType) -> None:
    if bound == zmq.PULL:
        there.send_nowait([b"hello"])
        await here.receive()
    elif bound in {zmq.ROUTER, zmq.XPUB}:
        there.send_nowait([b"\x01"])  # to an XPUB, the subscription to everything
        await here.receive()


def to_peer(kind: zmq.SocketType, *frames: bytes) -> list[bytes]:
    return [b"peer", *frames] if kind == zmq.ROUTER else list(frames)


# -- Nothing is lost -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "round_trips", [4_000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_O05_cancelled_receives_lose_double_and_reorder_nothing(  # noqa: N802
    context: Context, tmp_path: Path, round_trips: int
) -> None:
    draw = random.Random(5)
    cancelled = 0

    async def cancelled_receive() -> list[bytes] | None:
        """Cancelled before, in the same tick, a few ticks or some microseconds later; or not."""
        with trio.CancelScope() as scope:
            kind = draw.randrange(5)
            if kind < 2:
                scope.cancel()
            elif kind < 4:
                scope.deadline = trio.current_time() + draw.random() * 400e-6
            else:
                ticks.append((draw.randrange(1, 6), scope))
            return await client.receive()
        return None

    ticks: list[tuple[int, trio.CancelScope]] = []

    async def cancel_after_ticks() -> None:
        while True:
            due = [scope for left, scope in ticks if left == 0]
            ticks[:] = [(left - 1, scope) for left, scope in ticks if left]
            for scope in due:
                scope.cancel()
            if ticks:
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(20e-6)

    async with (
        pair(context, zmq.ROUTER, zmq.DEALER, address=f"ipc://{tmp_path}/s") as (server, client),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(server.pump, server.send_nowait)
        nursery.start_soon(cancel_after_ticks)
        for number in range(round_trips):
            client.send_nowait([b"%d" % number, b""])
            answer = None
            while answer is None:
                answer = await cancelled_receive()
                cancelled += answer is None
            assert answer == [b"%d" % number, b""]
        nursery.cancel_scope.cancel()
    assert cancelled >= round_trips // 2


async def test_a_cancelled_pump_leaves_the_rest_to_the_next(context: Context) -> None:
    seen: list[bytes] = []
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        for number in range(10 * BURST):
            push.send_nowait([b"%d" % number])

        while len(seen) < 10 * BURST:
            with trio.CancelScope() as scope:

                def deliver(frames: list[bytes], scope: trio.CancelScope = scope) -> None:
                    seen.extend(frames)
                    if len(seen) % 50 == 0 or len(seen) == 10 * BURST:
                        scope.cancel()

                await pull.pump(deliver)
    assert seen == [b"%d" % number for number in range(10 * BURST)]


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.XPUB, zmq.PUSH], ids=["ROUTER", "XPUB", "PUSH"])
async def test_a_full_socket_says_so_and_loses_nothing(
    context: Context, kind: zmq.SocketType
) -> None:
    opposite = {zmq.ROUTER: zmq.DEALER, zmq.XPUB: zmq.XSUB, zmq.PUSH: zmq.PULL}[kind]
    accepted = 0
    async with pair(context, kind, opposite, max_queued=10) as (here, there):
        payload = b"x" * 100_000  # the kernel's buffers shall not take all of it
        refused = False
        with trio.fail_after(10):
            while not refused:
                try:
                    here.send_nowait(to_peer(kind, b"%d" % accepted, payload))
                except trio.WouldBlock:
                    refused = accepted > 10 or kind != zmq.PUSH
                    await trio.sleep(0.01)  # a PUSH may have no peer yet
                else:
                    accepted += 1
            for number in range(accepted):
                assert await there.receive() == [b"%d" % number, payload]


async def test_nobody_to_push_to_would_block(context: Context) -> None:
    async with open_zsocket(context, zmq.PUSH, bind=LOOPBACK) as push:
        with pytest.raises(trio.WouldBlock):
            push.send_nowait([b"to whom?"])


async def test_frames_come_as_they_were_sent(context: Context) -> None:
    message = [b"", b"x" * 300, b"", bytes(range(256))]
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        push.send_nowait(message)
        assert await pull.receive() == message


async def test_what_is_no_bytes_leaves_no_half_message_behind(context: Context) -> None:
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        with pytest.raises(TypeError, match=r"^a frame must be bytes, not 'second'$"):
            push.send_nowait([b"first", "second"])  # type: ignore[list-item]
        push.send_nowait([b"whole"])
        assert await pull.receive() == [b"whole"]


# -- Nobody stalls ---------------------------------------------------------------------------------


class Forgetful(ZSocket):
    """A planted bug: it sends and does not look afterwards."""

    def _wake_if_readable(self) -> None:
        pass


def send_over_news(here: ZSocket, there: ZSocket, kind: zmq.SocketType) -> None:
    """Let a message arrive at `here` while its reader is parked, and have a send swallow the edge.

    All in one go: Trio must not poll in between.
    """
    there.send_nowait([b"\x01"])
    assert select.select([here._fd], [], [], 5)[0]
    began = time.perf_counter()
    while time.perf_counter() - began < 0.0015:
        pass  # libzmq looks into its command queue only so often: 3 million cycles must pass
    here.send_nowait(to_peer(kind, b"swallows the edge"))


@pytest.mark.parametrize(
    ("kind", "opposite"),
    [(zmq.ROUTER, zmq.DEALER), (zmq.XPUB, zmq.XSUB), (zmq.PAIR, zmq.PAIR)],
    ids=["ROUTER", "XPUB", "PAIR"],
)
async def test_a_send_never_swallows_what_a_parked_receiver_waits_for(
    context: Context, kind: zmq.SocketType, opposite: zmq.SocketType
) -> None:
    got: list[list[bytes]] = []
    async with (
        pair(context, kind, opposite) as (here, there),
        trio.open_nursery() as nursery,
    ):
        if kind == zmq.PAIR:
            there.send_nowait([b"hello"])
            await here.receive()
        nursery.start_soon(here.pump, got.append)
        for number in range(1, 134):  # three kinds: 400 rounds
            await wait_all_tasks_blocked()
            send_over_news(here, there, kind)
            with trio.fail_after(5):
                while len(got) < number:
                    await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_one_that_does_not_look_stalls(context: Context) -> None:
    stalls = 0
    async with pair(context, zmq.PAIR, zmq.PAIR) as (here, there):
        there.send_nowait([b"hello"])
        await here.receive()
        forgetful = Forgetful(here._raw)
        for _ in range(5):
            with trio.move_on_after(0.02) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(forgetful.receive)
                    await wait_all_tasks_blocked()
                    send_over_news(forgetful, there, zmq.PAIR)
            if scope.cancelled_caught:
                stalls += 1
                await forgetful.receive()  # it was there all the time
    assert stalls


async def test_others_get_a_turn_after_each_burst(context: Context) -> None:
    seen = 0
    seen_at_turns: list[int] = []

    async def other() -> None:
        while seen < 10 * BURST:
            seen_at_turns.append(seen)
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    def deliver(_: list[bytes]) -> None:
        nonlocal seen
        seen += 1

    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        for _ in range(10 * BURST):
            push.send_nowait([b"x"])
        await trio.sleep(0.05)  # let them all arrive
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull.pump, deliver)
            nursery.start_soon(other)
    turns = [*seen_at_turns, seen]
    # Trio may run the other first in one tick and last in the next, so two bursts lie between.
    assert all(after - before <= 2 * BURST for before, after in pairwise(turns))


async def test_receiving_is_a_checkpoint_with_and_without_a_message(context: Context) -> None:
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        with assert_checkpoints():
            push.send_nowait([b"one"])
            await pull.receive()
        push.send_nowait([b"two"])
        await trio.sleep(0.02)
        with assert_checkpoints():
            await pull.receive()


async def test_deliveries_are_not_torn_by_ctrl_c(context: Context) -> None:
    protected: list[bool] = []
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        push.send_nowait([b"x"])
        with trio.CancelScope() as scope:

            def deliver(_: list[bytes]) -> None:
                protected.append(trio.lowlevel.currently_ki_protected())
                scope.cancel()

            await pull.pump(deliver)
    assert protected == [True]


async def test_what_deliver_raises_comes_out_and_the_rest_stays(context: Context) -> None:
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        push.send_nowait([b"bad"])
        push.send_nowait([b"good"])

        def refuse(frames: list[bytes]) -> None:
            raise LookupError(frames[0])

        with pytest.raises(LookupError, match="bad"):
            await pull.pump(refuse)
        assert await pull.receive() == [b"good"]


# -- Whose fault -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["receive", "pump"])
async def test_closing_wakes_whoever_is_receiving(context: Context, how: str) -> None:
    message = r"^this PULL socket is closed$"

    async def wait_in_vain() -> None:
        with pytest.raises(trio.ClosedResourceError, match=message):
            await (pull.receive() if how == "receive" else pull.pump(print))

    async with open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_in_vain)
            await wait_all_tasks_blocked()
            pull.close()
        pull.close()
        with pytest.raises(trio.ClosedResourceError, match=message):
            await pull.receive()
        with pytest.raises(trio.ClosedResourceError, match=message):
            pull.send_nowait([b"x"])
        with pytest.raises(trio.ClosedResourceError, match=message):
            _ = pull.endpoint
        assert repr(pull) == "<ZSocket PULL, closed>"


async def test_a_delivery_may_close_its_own_socket(context: Context) -> None:
    async with pair(context, zmq.PULL, zmq.PUSH) as (pull, push):
        push.send_nowait([b"the last"])
        with pytest.raises(trio.ClosedResourceError):
            await pull.pump(lambda _: pull.close())


async def test_two_receivers_are_told_so(context: Context) -> None:
    async with (
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(pull.receive)
        await wait_all_tasks_blocked()
        assert repr(pull) == f"<ZSocket PULL {pull.endpoint}, receiving>"
        for receiver in (pull.receive, partial(pull.pump, print)):
            with pytest.raises(
                trio.BusyResourceError,
                match=f"^another task is already receiving from {re.escape(repr(pull))}$",
            ):
                await receiver()
        nursery.cancel_scope.cancel()


async def test_an_unknown_peer_is_gone(context: Context) -> None:
    async with pair(context, zmq.ROUTER, zmq.DEALER) as (router, dealer):
        with pytest.raises(PeerGone, match="no peer b'nobody'"):
            router.send_nowait([b"nobody", b"x"])
        dealer.close()
        with pytest.raises(PeerGone), trio.fail_after(5):  # noqa: PT012 - until the news is there
            while True:
                router.send_nowait([b"peer", b"x"])
                await trio.sleep(0.001)


async def test_a_peer_that_comes_back_under_its_id_is_served_again(context: Context) -> None:
    async with pair(context, zmq.ROUTER, zmq.DEALER) as (router, _):
        comeback = open_zsocket(context, zmq.DEALER, connect=router.endpoint, routing_id=b"peer")
        async with comeback as dealer:
            dealer.send_nowait([b"I am new"])
            assert await router.receive() == [b"peer", b"I am new"]
            router.send_nowait([b"peer", b"welcome"])
            assert await dealer.receive() == [b"welcome"]


async def test_a_socket_is_bound_or_connected(context: Context) -> None:
    for bind, connect in ((None, None), (LOOPBACK, "tcp://127.0.0.1:1")):
        with pytest.raises(ValueError, match="either bound or connected"):
            async with open_zsocket(context, zmq.PULL, bind=bind, connect=connect):
                pass


async def test_a_wrong_option_leaves_no_socket_behind(context: Context) -> None:
    with pytest.raises(zmq.ZMQError):
        async with open_zsocket(context, zmq.DEALER, bind=LOOPBACK, routing_id=b"x" * 300):
            pass


# -- Addresses -------------------------------------------------------------------------------------


async def test_G01_ports_are_bound_first_and_told_afterwards(context: Context) -> None:  # noqa: N802
    endpoints = set()

    async def bind_some(left: int) -> None:
        async with open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull:
            endpoints.add(pull.endpoint)
            if left:
                await bind_some(left - 1)

    await bind_some(19)
    assert len(endpoints) == 20
    assert all(address.startswith("tcp://127.0.0.1:") for address in endpoints)


async def test_G02_a_taken_port_is_an_error_that_says_so(context: Context) -> None:  # noqa: N802
    with stdlib_socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(AddressFailed, match="another program listens there"):
            async with open_zsocket(context, zmq.PULL, bind=address):
                pass


async def test_a_living_servers_unix_socket_is_not_stolen(context: Context, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    async with pair(context, zmq.PULL, zmq.PUSH, address=address) as (pull, push):
        with pytest.raises(AddressFailed, match="another program listens there"):
            async with open_zsocket(context, zmq.PULL, bind=address):
                pass
        assert (tmp_path / "s").is_socket()
        push.send_nowait([b"still yours"])
        assert await pull.receive() == [b"still yours"]


async def test_the_file_of_a_unix_socket_goes_with_it(context: Context, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    async with open_zsocket(context, zmq.PULL, bind=address):
        assert (tmp_path / "s").is_socket()
        async with open_zsocket(context, zmq.PUSH, connect=address):
            pass
        assert (tmp_path / "s").is_socket(), "it is not for who connects to remove"
    assert not (tmp_path / "s").exists()
    async with open_zsocket(context, zmq.PULL, bind=address):
        (tmp_path / "s").unlink()  # by somebody else: no reason to fail


async def test_what_a_dead_server_left_is_no_obstacle(context: Context, tmp_path: Path) -> None:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/s")
        server.listen()
    async with pair(context, zmq.PULL, zmq.PUSH, address=f"ipc://{tmp_path}/s"):
        pass


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("ipc:///no/such/directory/s", "No such file or directory"),
        (f"ipc:///tmp/{'x' * 120}", "may have 107 bytes"),
        ("tcp://203.0.113.1:5555", "of this machine"),
        ("localhost:5555", "write tcp://HOST:PORT or ipc://PATH"),
    ],
)
async def test_an_address_that_cannot_be_bound_says_why(
    context: Context, address: str, hint: str
) -> None:
    message = f"^cannot listen at {re.escape(address)}: .*{hint}"
    with pytest.raises(AddressFailed, match=message):
        async with open_zsocket(context, zmq.PULL, bind=address):
            pass
    if "ipc" not in address and "tcp" not in address:
        with pytest.raises(AddressFailed, match=f"^cannot connect to {address}: "):
            async with open_zsocket(context, zmq.PUSH, connect=address):
                pass


# -- Peers -----------------------------------------------------------------------------------------


class Visitors:
    """What `watch_peers` told, and a way to wait for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._told = trio.Event()

    def come(self, _: str) -> None:
        self._note("come")

    def go(self, _: str) -> None:
        self._note("go")

    def _note(self, what: str) -> None:
        self.log.append(what)
        self._told.set()
        self._told = trio.Event()

    async def until(self, *log: str) -> None:
        with trio.fail_after(5):
            while self.log != list(log):
                await self._told.wait()


async def watch(zsocket: ZSocket, visitors: Visitors) -> None:
    await zsocket.watch_peers(on_connect=visitors.come, on_drop=visitors.go)


async def test_peers_are_told_from_the_opening_on(context: Context, tmp_path: Path) -> None:
    visitors = Visitors()
    async with (
        pair(context, zmq.ROUTER, zmq.DEALER, address=f"ipc://{tmp_path}/s", watch=True) as (a, b),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(watch, a, visitors)  # long after the peer has come
        await visitors.until("come")
        b.close()
        await visitors.until("come", "go")
        nursery.cancel_scope.cancel()


async def test_a_connecting_socket_is_told_of_the_other_end_too(context: Context) -> None:
    visitors = Visitors()
    async with (
        pair(context, zmq.ROUTER, zmq.DEALER, watch=True) as (router, dealer),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(watch, dealer, visitors)
        await visitors.until("come")
        router.close()
        await visitors.until("come", "go")
        nursery.cancel_scope.cancel()


async def test_closing_wakes_the_watch_too(context: Context) -> None:
    message = r"^this PAIR socket is closed$"

    async def wait_in_vain() -> None:
        with pytest.raises(trio.ClosedResourceError, match=message):
            await pull.watch_peers()

    async with (
        open_zsocket(context, zmq.PULL, bind=LOOPBACK, watch=True) as pull,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(wait_in_vain)
        await wait_all_tasks_blocked()
        pull.close()


async def test_an_unwatched_socket_has_no_peers_to_tell_of(context: Context) -> None:
    async with open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull:
        with pytest.raises(ValueError, match="watch=True"):
            await pull.watch_peers()


async def test_too_large_a_frame_ends_its_peers_connection_and_nobody_elses(
    context: Context,
) -> None:
    visitors = Visitors()
    async with (
        pair(context, zmq.ROUTER, zmq.DEALER, watch=True, max_message_bytes=1000) as (router, good),
        open_zsocket(context, zmq.DEALER, connect=router.endpoint, routing_id=b"bad") as bad,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(watch, router, visitors)
        bad.send_nowait([b"x" * 1000])
        assert await router.receive() == [b"bad", b"x" * 1000]
        bad.send_nowait([b"x" * 1001])
        await visitors.until("come", "come", "go")
        nursery.cancel_scope.cancel()
        good.send_nowait([b"unmoved"])
        assert await router.receive() == [b"peer", b"unmoved"]


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03" + bytes(60)],
    ids=["nothing", "HTTP", "half a greeting"],
)
async def test_strangers_are_no_peers_and_disturb_none(context: Context, noise: bytes) -> None:
    visitors = Visitors()
    async with (
        pair(context, zmq.ROUTER, zmq.DEALER, watch=True) as (router, dealer),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(watch, router, visitors)
        await visitors.until("come")
        port = int(router.endpoint.rpartition(":")[2])
        with stdlib_socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise)
            await trio.sleep(0.02)
        dealer.send_nowait([b"unmoved"])
        assert await router.receive() == [b"peer", b"unmoved"]
        dealer.close()
        await visitors.until("come", "go")
        nursery.cancel_scope.cancel()


# -- Contexts --------------------------------------------------------------------------------------


async def test_leaving_a_context_sends_what_lingers_and_never_blocks_the_loop() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        async with open_context() as theirs, open_zsocket(theirs, zmq.PULL, bind=LOOPBACK) as pull:
            async with (
                open_context() as ours,
                open_zsocket(ours, zmq.PUSH, connect=pull.endpoint, linger_ms=4000) as push,
            ):
                push.send_nowait([b"my last words"])
            assert await pull.receive() == [b"my last words"]
        nursery.start_soon(tick)
        async with (
            open_context() as context,
            open_zsocket(context, zmq.PUSH, connect="tcp://127.0.0.1:1", linger_ms=100) as push,
        ):
            push.send_nowait([b"to nobody"])
        nursery.cancel_scope.cancel()
    assert ticks > 5


async def test_leaving_a_context_is_given_up_in_time() -> None:
    with trio.fail_after(5):
        async with (
            open_context(patience=0.01) as context,
            open_zsocket(context, zmq.PUSH, connect="tcp://127.0.0.1:1", linger_ms=200) as push,
        ):
            push.send_nowait([b"to nobody"])
        # It is left to its thread, which ends when the linger does.
        while any(each.name.startswith("destroy") for each in threading.enumerate()):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_many_sockets_leave_no_descriptors(context: Context, tmp_path: Path) -> None:
    for number in range(20):
        for address in (LOOPBACK, f"ipc://{tmp_path}/{number}"):
            async with pair(context, zmq.ROUTER, zmq.DEALER, address=address, watch=True):
                pass  # the fixture of all tests compares descriptors before and afterwards


async def test_a_message_with_much_in_it_is_taken_in_parts_and_others_get_turns(
    context: Context, autojump_clock: MockClock
) -> None:
    """A part takes a millisecond of the virtual clock; the sockets are real."""
    async with (
        open_zsocket(context, zmq.PULL, bind="tcp://127.0.0.1:*") as pull,
        open_zsocket(context, zmq.PUSH, connect=pull.endpoint) as push,
        trio.open_nursery() as nursery,
    ):
        done, turns = list[bytes](), list[int]()

        def part_by_part(frames: list[bytes]) -> Iterator[None]:
            for _ in range(50):
                autojump_clock.jump(0.001)
                done.append(frames[0])
                yield

        async def look() -> None:
            while True:
                turns.append(len(done))
                await trio.lowlevel.checkpoint()

        for name in (b"one", b"two"):
            push.send_nowait([name])
        nursery.start_soon(pull.pump, part_by_part)
        nursery.start_soon(look)
        while len(done) < 100:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert done == [b"one"] * 50 + [b"two"] * 50
    assert max(b - a for a, b in pairwise(turns)) <= 6  # tasks of a batch are shuffled


async def test_messages_that_take_long_let_others_have_turns(
    context: Context, autojump_clock: MockClock
) -> None:
    async with (
        open_zsocket(context, zmq.PULL, bind="tcp://127.0.0.1:*") as pull,
        open_zsocket(context, zmq.PUSH, connect=pull.endpoint) as push,
        trio.open_nursery() as nursery,
    ):
        done, turns = list[bytes](), list[int]()

        def slow(frames: list[bytes]) -> None:
            autojump_clock.jump(0.001)
            done.extend(frames)

        async def look() -> None:
            while True:
                turns.append(len(done))
                await trio.lowlevel.checkpoint()

        for _ in range(60):
            push.send_nowait([b"one"])
        nursery.start_soon(pull.pump, slow)
        nursery.start_soon(look)
        while len(done) < 60:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert max(b - a for a, b in pairwise(turns)) <= 6  # tasks of a batch are shuffled
