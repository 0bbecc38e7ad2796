"""The head's end of a life that joined: calls, and what is counted here since nobody tells it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.engine.limits import EngineLimits
from dpkit.errors import EngineLost
from dpkit.link.foreign import ForeignConnection
from dpkit.link.wirelink import ZmqLink
from dpkit.messages import EngineId, GenerateRequest, ModelSpec, SamplingParams
from dpkit.wire.codec import Add, Utility, encode_envelope
from dpkit.wire.structs import Envelope, FinishCode, UtilityAnswer, WireOutput
from tests.link.test_zmq import RANK, Wire, open_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ENGINE = EngineId("v-0", 3)
LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=16, max_model_len=64
)


@asynccontextmanager
async def open_foreign() -> AsyncIterator[tuple[Wire, ForeignConnection]]:
    """An engine that has joined."""
    async with open_wire() as wire:
        connection = ForeignConnection(
            ENGINE,
            RANK,
            wire.router,
            limits=LIMITS,
            spec=ModelSpec(),
            limit=10_000,
            on_stats=lambda _: None,
            on_gone=wire.gone.append,
            on_leaving=lambda: None,
        )
        wire.link = ZmqLink(connection, lambda _, output: wire.got.append(output))
        wire.connection = connection
        yield wire, connection


async def hear_call(wire: Wire) -> int:
    """The id of the call that the engine hears next."""
    message = await wire.hear()
    assert isinstance(message, Utility)
    return message.call.call_id


@pytest.mark.parametrize(
    ("result", "value"), [((None, ["generate"]), ["generate"]), ((None, None), None), (None, None)]
)
async def test_a_call_is_answered(result: tuple[object, object] | None, value: object) -> None:
    async with open_foreign() as (wire, connection), trio.open_nursery() as nursery:

        async def answer() -> None:
            call_id = await hear_call(wire)
            await wire.say(utility_output=UtilityAnswer(call_id + 1, "somebody else's"))
            await wire.say(utility_output=UtilityAnswer(call_id, None, result))

        nursery.start_soon(answer)
        assert await connection.call("method", 1, "two") == value


async def test_a_call_ends_with_the_life_that_was_to_answer() -> None:
    async with open_foreign() as (wire, connection), trio.open_nursery() as nursery:

        async def lose() -> None:
            await hear_call(wire)
            connection.fail_all(EngineLost("gone"), "gone")

        nursery.start_soon(lose)
        with pytest.raises(EngineLost, match="v-0#3 did not answer to method: it is lost"):
            await connection.call("method")


async def test_what_such_an_engine_does_not_tell_is_counted() -> None:
    async with open_foreign() as (wire, connection):
        wire.ask("finished")
        wire.ask("aborted")
        wire.ask("refused", prompt=100)
        finished, _ = [await wire.heard_id(), await wire.hear()]
        await wire.say(WireOutput(finished, (1, 2)))
        await wire.say(WireOutput(finished, (3,), finish_reason=FinishCode.LENGTH))
        wire.link.abort("aborted")
        report = connection.report
        assert report is not None
        assert (report.requests_finished, report.requests_aborted) == (1, 1)
        assert (report.requests_refused, report.prompt_tokens, report.output_tokens) == (1, 3, 3)
        assert [output.request_id for output in wire.got] == ["refused", "finished", "finished"]


async def test_a_request_counts_once_however_often_a_message_tells_of_its_begin_and_end() -> None:
    async with open_foreign() as (wire, connection):
        wire.ask()
        wire_id = await wire.heard_id()
        end = WireOutput(wire_id, (2,), finish_reason=FinishCode.STOP)
        await wire.say(WireOutput(wire_id, (1,)), WireOutput(wire_id, (1,)), end, end)
        assert [output.token_ids for output in wire.got] == [(1,), (1,), (2,)]
        report = connection.report
        assert report is not None
        assert (report.requests_finished, report.prompt_tokens, report.output_tokens) == (1, 3, 3)
        assert connection.late_outputs == 1


async def test_aborts_are_forgotten_in_their_order(autojump_clock: object) -> None:
    async with open_foreign() as (wire, connection):
        for number in range(3):
            wire.ask(f"{number}")
            wire.link.abort(f"{number}")
            await trio.sleep(1)
        now = trio.current_time()
        connection.forget_aborted(now - 2)
        assert connection.unacknowledged == 2
        assert not connection.is_idle
        connection.forget_aborted(now)
        assert connection.unacknowledged == 3
        assert connection.is_idle


async def test_a_question_is_asked_once_until_it_is_answered() -> None:
    async with open_foreign() as (wire, connection):
        connection.ask()
        asked_at = connection.asked_at
        connection.ask()
        call_id = await hear_call(wire)
        assert connection.asked_at == asked_at is not None
        frames = encode_envelope(Envelope(RANK, utility_output=UtilityAnswer(call_id)))
        await wire.say_frames(frames)
        assert connection.asked_at is None
        connection.ask()
        assert await hear_call(wire) != call_id


async def test_requests_are_stamped_with_the_moment_and_the_wave() -> None:
    async with open_foreign() as (wire, connection):
        connection.current_wave = 5
        request = GenerateRequest(
            request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1)
        )
        wire.link.submit(request)
        message = await wire.hear()
        assert isinstance(message, Add)
        assert message.request.current_wave == 5
        assert message.request.arrival_time > 1.7e9
