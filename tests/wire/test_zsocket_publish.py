"""Publishing sockets: who subscribes and goes is seen, and who takes nothing holds up nobody."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import zmq

from dpkit.wire.codec import SUBSCRIBE, UNSUBSCRIBE
from dpkit.wire.zsocket import open_context, open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dpkit.wire.zsocket import Context

LOOPBACK = "tcp://127.0.0.1:*"


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


async def test_each_subscriber_is_seen_to_come_and_to_go(context) -> None:
    async with open_zsocket(context, zmq.XPUB, bind=LOOPBACK) as publish:
        for _ in range(2):
            async with (
                open_zsocket(context, zmq.XSUB, connect=publish.endpoint) as first,
                open_zsocket(context, zmq.XSUB, connect=publish.endpoint) as second,
            ):
                for each in (first, second):
                    each.send_nowait([SUBSCRIBE])
                    assert await publish.receive() == [SUBSCRIBE]
            for _ in range(2):
                assert await publish.receive() == [UNSUBSCRIBE]


async def test_a_subscriber_that_takes_nothing_holds_up_nobody(context) -> None:
    """Whoever publishes never waits, others get it all, and no more than a few are kept for it."""
    message = [bytes(100_000)]
    async with (
        open_zsocket(context, zmq.XPUB, bind=LOOPBACK, max_queued=4, lossy=True) as publish,
        open_zsocket(context, zmq.XSUB, connect=publish.endpoint, max_queued=1) as stuck,
        open_zsocket(context, zmq.XSUB, connect=publish.endpoint) as quick,
    ):
        for each in (stuck, quick):
            each.send_nowait([SUBSCRIBE])
            assert await publish.receive() == [SUBSCRIBE]
        for _ in range(200):
            publish.drain_nowait(print)  # libzmq hears then, too, of what has been taken
            publish.send_nowait(message)
            assert await quick.receive() == message
        assert stuck.drain_nowait(len, most=200) < 200


async def test_without_leave_to_lose_publishing_says_that_it_would_have_to_wait(context) -> None:
    async with (
        open_zsocket(context, zmq.XPUB, bind=LOOPBACK, max_queued=4) as publish,
        open_zsocket(context, zmq.XSUB, connect=publish.endpoint, max_queued=1) as stuck,
    ):
        stuck.send_nowait([SUBSCRIBE])
        assert await publish.receive() == [SUBSCRIBE]
        with pytest.raises(trio.WouldBlock):
            deque(publish.send_nowait([bytes(100_000)]) for _ in range(1000))


# -- Taking what is there, without waiting ---------------------------------------------------------


async def test_what_is_there_is_taken_in_order_and_no_more_of_it_than_asked(context) -> None:
    async with (
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull,
        open_zsocket(context, zmq.PUSH, connect=pull.endpoint) as push,
    ):
        taken: list[list[bytes]] = []
        assert pull.drain_nowait(taken.append) == 0
        for number in range(10):
            push.send_nowait([b"%d" % number])
        assert await pull.receive() == [b"0"]
        while len(taken) < 4:
            before = len(taken)
            assert pull.drain_nowait(taken.append, most=4 - before) == len(taken) - before
        assert taken == [[b"1"], [b"2"], [b"3"], [b"4"]]
        assert await pull.receive() == [b"5"]


async def test_whoever_is_parked_is_not_forgotten(context) -> None:
    """Taking reads the news that a parked receiver waits for, in each of these rounds."""
    async with (
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull,
        open_zsocket(context, zmq.PUSH, connect=pull.endpoint) as push,
        trio.open_nursery() as nursery,
    ):
        arrived: list[bytes] = []

        async def receive() -> None:
            await pull.pump(arrived.extend)

        nursery.start_soon(receive)
        for number in range(200):
            await trio.testing.wait_all_tasks_blocked()
            push.send_nowait([b"%d" % number])
            push.send_nowait([b"and"])
            while len(arrived) < 2 * number + 1:
                pull.drain_nowait(arrived.extend, most=1)
            with trio.fail_after(5):
                while len(arrived) < 2 * number + 2:
                    await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_what_deliver_raises_comes_out_and_the_rest_is_there(context) -> None:
    async with (
        open_zsocket(context, zmq.PULL, bind=LOOPBACK) as pull,
        open_zsocket(context, zmq.PUSH, connect=pull.endpoint) as push,
    ):
        push.send_nowait([b"bad"])
        push.send_nowait([b"good"])

        def refuse(frames: list[bytes]) -> None:
            raise ValueError(frames[0])

        while not pull._is_readable():
            pass
        with pytest.raises(ValueError, match="bad"):
            pull.drain_nowait(refuse)
        assert await pull.receive() == [b"good"]
        pull.close()
        with pytest.raises(trio.ClosedResourceError):
            pull.drain_nowait(print)
