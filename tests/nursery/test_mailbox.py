"""A slow reader coalesces; nothing is lost or reordered, whatever is cancelled."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.errors import EngineLost
from dpkit.messages import EngineOutput
from dpkit.names import FinishReason
from dpkit.nursery import mailbox as mailboxes
from dpkit.nursery.bell import PlainBell, QuickBell
from dpkit.nursery.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable


def _output(*token_ids: int, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput(request_id="r", token_ids=token_ids, finish_reason=reason)


def take(mailbox: Mailbox) -> Awaitable[EngineOutput]:
    return mailbox.take(lambda output: output)


async def test_what_arrived_meanwhile_comes_as_one_output() -> None:
    mailbox = Mailbox("r")
    for output in (_output(1), _output(2, 3), _output(4, reason=FinishReason.STOP)):
        mailbox.put_nowait(output)
    with trio.testing.assert_checkpoints():
        assert await take(mailbox) == _output(1, 2, 3, 4, reason=FinishReason.STOP)


async def test_a_parked_reader_gets_the_next_output(autojump_clock: object) -> None:
    mailbox = Mailbox("r")
    got = []

    async def read() -> None:
        got.append((await take(mailbox), trio.current_time()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.sleep(2)
        mailbox.put_nowait(_output(1))
    assert got == [(_output(1), 2)]


async def test_an_error_comes_with_the_tokens_before_it() -> None:
    mailbox = Mailbox("r")
    lost = EngineLost("gone")
    mailbox.put_nowait(_output(1))
    mailbox.put_nowait(EngineOutput(request_id="r", finish_reason=FinishReason.ERROR, error=lost))
    received = await take(mailbox)
    assert received.token_ids == (1,)
    assert received.error is lost


async def test_a_closed_mailbox_lets_its_reader_go() -> None:
    mailbox = Mailbox("r")
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError, match="request r was closed"):
                await take(mailbox)

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.close()
    mailbox.put_nowait(_output(1))
    with trio.testing.assert_checkpoints(), pytest.raises(trio.ClosedResourceError):
        await take(mailbox)


async def test_two_readers_at_once_are_a_mistake_that_is_told() -> None:
    mailbox = Mailbox("r")
    got = []

    async def read() -> None:
        got.append(await take(mailbox))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError, match="request r is being read"):
            await take(mailbox)
        # The first reader is awake now, though it has not run: it still reads.
        mailbox.put_nowait(_output(1))
        with pytest.raises(trio.BusyResourceError):
            await take(mailbox)
    assert got == [_output(1)]


async def test_a_mailbox_may_pass_from_one_reader_to_the_next() -> None:
    mailbox = Mailbox("r")
    with trio.CancelScope() as scope:
        scope.cancel()
        await take(mailbox)
    mailbox.put_nowait(_output(1))
    assert await take(mailbox) == _output(1)


@pytest.mark.parametrize("bell", [QuickBell, PlainBell])
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_or_reordered_across_a_thousand_cancellations(
    autojump_clock: object, seed: int, bell: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailboxes, "Bell", bell)
    rng = random.Random(seed)
    mailbox = Mailbox("r")
    received: list[int] = []
    cancelled = 0

    async def write() -> None:
        for token_id in range(2000):
            mailbox.put_nowait(_output(token_id))
            await trio.sleep(rng.choice((0, 0, 1)))
        mailbox.put_nowait(_output(reason=FinishReason.STOP))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while True:
            with trio.move_on_after(rng.choice((0, 0, 0.5, 1, 2))) as scope:
                output = await take(mailbox)
                received += output.token_ids
                if output.finish_reason is not None:
                    break
            cancelled += scope.cancelled_caught
    assert received == list(range(2000))
    assert cancelled > 300
