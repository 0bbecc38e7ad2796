"""The head's end of one life on the wire: each request has one end, and what breaks is named."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq
from attrs import define, field

from dpkit.errors import EngineLost, RequestRejected, WireError
from dpkit.link.wirelink import ZmqLink
from dpkit.link.zmq import PIECE, WireConnection
from dpkit.messages import EngineId, EngineOutput, GenerateRequest, SamplingParams, StepReport
from dpkit.names import FinishReason
from dpkit.wire.codec import (
    ENGINE_DEAD,
    Abort,
    Add,
    decode_input,
    encode_envelope,
    rank_identity,
)
from dpkit.wire.structs import (
    EngineReport,
    Envelope,
    FinishCode,
    PrefillStats,
    RequestError,
    SchedulerStats,
    WireOutput,
)
from dpkit.wire.zsocket import PeerGone, ZSocket, open_context, open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.wire.codec import Utility

ENGINE = EngineId("e-0", 2)
RANK = 7
LIMIT = 2000


@define(eq=False)
class Wire:
    """A connection, and at its other end two sockets as an engine has them."""

    router: ZSocket
    pull: ZSocket
    dealer: ZSocket
    push: ZSocket
    connection: WireConnection = field(init=False)
    link: ZmqLink = field(init=False)
    got: list[EngineOutput] = field(factory=list)
    gone: list[EngineLost] = field(factory=list)
    loads: list[int] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.connection = WireConnection(
            ENGINE,
            RANK,
            self.router,
            limit=LIMIT,
            on_stats=lambda stats: self.loads.append(stats.num_running_reqs),
            on_gone=self.gone.append,
        )
        self.link = ZmqLink(self.connection, self._deliver)

    def _deliver(self, engine: EngineId, output: EngineOutput) -> None:
        assert engine == ENGINE
        self.got.append(output)

    def ask(self, request_id: str = "r", prompt: int = 3, **sampling_: Any) -> None:
        """Submit a request."""
        sampling = SamplingParams(max_tokens=5, **sampling_)
        self.link.submit(
            GenerateRequest(
                request_id=request_id, prompt_token_ids=(1,) * prompt, sampling=sampling
            )
        )

    async def hear(self) -> Add | Abort | Utility:
        """What the engine hears next."""
        return decode_input(await self.dealer.receive())

    async def heard_id(self) -> str:
        """What the request that the engine hears next is called on the wire."""
        message = await self.hear()
        assert isinstance(message, Add)
        return message.request.request_id

    async def say(self, *outputs: WireOutput, **more: Any) -> None:
        """Have the engine say something, and take it in."""
        await self.say_frames(encode_envelope(Envelope(RANK, list(outputs), **more)))

    async def say_frames(self, frames: list[bytes]) -> None:
        """Have the engine say anything at all, and take it in."""
        self.push.send_nowait(frames)
        self.connection.take(await self.pull.receive())


@asynccontextmanager
async def open_wire() -> AsyncIterator[Wire]:
    """An engine that is ready."""
    async with (
        open_context() as context,
        open_zsocket(context, zmq.ROUTER, bind="inproc://requests") as router,
        open_zsocket(context, zmq.PULL, bind="inproc://outputs") as pull,
        open_zsocket(
            context, zmq.DEALER, connect="inproc://requests", routing_id=rank_identity(RANK)
        ) as dealer,
        open_zsocket(context, zmq.PUSH, connect="inproc://outputs") as push,
    ):
        dealer.send_nowait([b""])
        assert await router.receive() == [rank_identity(RANK), b""]
        with trio.fail_after(10):
            yield Wire(router, pull, dealer, push)


async def test_a_request_goes_out_and_its_outputs_come_back() -> None:
    async with open_wire() as wire:
        idle: list[bool] = []
        wire.connection.on_idle = lambda: idle.append(wire.connection.is_idle)
        wire.ask()
        wire_id = await wire.heard_id()
        assert wire.connection.held == ["r"]
        await wire.say(
            WireOutput(wire_id, (4,)), scheduler_stats=SchedulerStats(num_running_reqs=1)
        )
        assert not idle
        end = WireOutput(wire_id, (5,), finish_reason=FinishCode.LENGTH)
        await wire.say(end, finished_requests=[wire_id])
        assert idle
        assert all(idle)
    assert [(output.request_id, output.token_ids) for output in wire.got] == [
        ("r", (4,)),
        ("r", (5,)),
    ]
    assert wire.got[-1].finish_reason is FinishReason.LENGTH
    assert wire.loads == [1]
    assert not wire.connection.held


async def test_the_first_output_tells_what_was_cached_and_later_ones_nothing() -> None:
    async with open_wire() as wire:
        wire.ask()
        wire_id = await wire.heard_id()
        cached = PrefillStats(num_cached_tokens=2)
        for token_id in (4, 5):  # a second word of it is passed over: tokens are all that is read
            await wire.say(WireOutput(wire_id, (token_id,), prefill_stats=cached))
    assert [output.cached_tokens for output in wire.got] == [2, None]


async def test_the_same_id_of_two_clients_is_two_on_the_wire() -> None:
    async with open_wire() as wire:
        theirs: list[EngineOutput] = []
        other = ZmqLink(wire.connection, lambda _, output: theirs.append(output))
        wire.ask()
        ours = await wire.heard_id()
        other.submit(GenerateRequest(request_id="r", prompt_token_ids=(1,)))
        assert await wire.heard_id() != ours
        await wire.say(WireOutput(ours, (4,)))
    assert [output.token_ids for output in wire.got] == [(4,)]
    assert not theirs


async def test_what_comes_too_late_is_told_so() -> None:
    async with open_wire() as wire:
        wire.connection.closed = True
        message = r"^request r came too late: its engine takes no more requests$"
        with pytest.raises(EngineLost, match=message) as caught:
            wire.ask()
    assert (caught.value.engine, caught.value.request_id) == (ENGINE, "r")


async def test_what_no_engine_would_read_is_refused_and_the_next_is_served() -> None:
    message = (
        r"^request long takes [\d,]+ bytes, and 2,000 are the most that an engine in a process "
        r"reads \(engines\.process\.max_message\)$"
    )
    async with open_wire() as wire:
        with pytest.raises(RequestRejected, match=message) as caught:
            wire.ask("long", prompt=LIMIT)
        assert caught.value.request_id == "long"
        assert wire.connection.is_idle
        wire.ask("short")
        assert (await wire.heard_id()).startswith("short-")


@pytest.mark.parametrize("ours", [True, False], ids=["our end", "its end"])
async def test_a_request_for_an_engine_that_is_gone_says_so_after_it_is_picked_no_more(
    *, ours: bool
) -> None:
    async with open_wire() as wire:
        wire.ask("before")
        await wire.hear()
        (wire.router if ours else wire.dealer).close()
        if not ours:
            await has_news(wire)
        message = rf"^engine {ENGINE} is gone: request r could not be sent to it$"
        with pytest.raises(EngineLost, match=message) as caught:
            wire.ask()
        assert wire.gone == [caught.value]
        assert isinstance(caught.value.__cause__, trio.ClosedResourceError if ours else PeerGone)
        assert wire.connection.held == ["before"]
        wire.link.abort("before")  # nobody is there to drop it
        assert wire.connection.is_idle


async def has_news(wire: Wire) -> None:
    """Wait until the ROUTER knows that its peer is gone."""
    while True:
        try:
            wire.router.send_nowait([rank_identity(RANK), b""])
        except PeerGone:
            return
        await trio.lowlevel.checkpoint()


async def test_an_engine_that_says_it_is_dead_is_believed() -> None:
    async with open_wire() as wire:
        with pytest.raises(EngineLost, match=rf"^engine {ENGINE} met an error$") as caught:
            await wire.say_frames([ENGINE_DEAD])
    assert caught.value.engine == ENGINE


async def test_an_engine_that_fails_a_request_as_lost_is_lost_with_all_of_them() -> None:
    async with open_wire() as wire:
        wire.ask()
        wire.ask("other")
        error = RequestError(code="engine_lost", message="boom", retryable=True)
        end = WireOutput(await wire.heard_id(), (), finish_reason=FinishCode.ERROR, error=error)
        with pytest.raises(EngineLost, match="boom"):
            await wire.say(end)
        assert wire.connection.held == ["r", "other"], "they may try elsewhere"
    assert not wire.got


async def test_an_end_that_nobody_ordered_is_an_engines_that_shuts_down() -> None:
    async with open_wire() as wire:
        wire.ask()
        end = WireOutput(await wire.heard_id(), (), finish_reason=FinishCode.ABORT)
        message = rf"^engine {ENGINE} is shutting down, by no order from here$"
        with pytest.raises(EngineLost, match=message):
            await wire.say(end)


@pytest.mark.parametrize("word", ["wave_complete", "start_wave"])
async def test_waves_are_for_coordinators(word: str) -> None:
    async with open_wire() as wire:
        message = rf"^engine {ENGINE} spoke of waves to a client, not a coordinator$"
        with pytest.raises(WireError, match=message) as caught:
            await wire.say(**{word: 1})
    assert caught.value.engine == ENGINE


async def test_an_output_of_what_was_never_asked_is_refused_with_its_name() -> None:
    async with open_wire() as wire:
        message = rf"^engine {ENGINE} told of request '{'x' * 80}', which it does not have$"
        with pytest.raises(WireError, match=message):
            await wire.say(WireOutput("x" * 100, (4,)))


async def test_what_comes_of_an_aborted_request_reaches_nobody() -> None:
    async with open_wire() as wire:
        wire.ask()
        wire_id = await wire.heard_id()
        wire.link.abort("r")
        wire.link.abort("r")
        assert await wire.hear() == Abort((wire_id,))
        await wire.say(WireOutput(wire_id, (4,)))
        assert (wire.connection.late_outputs, wire.connection.is_idle) == (1, False)
        await wire.say(finished_requests=[wire_id])
        assert wire.connection.is_idle
        with pytest.raises(WireError, match="which it does not have"):
            await wire.say(WireOutput(wire_id, (5,)))
    assert not wire.got


async def test_a_request_that_is_dropped_without_a_word_ends_the_connection() -> None:
    async with open_wire() as wire:
        wire.ask()
        wire_id = await wire.heard_id()
        message = rf"^engine {ENGINE} dropped request r without a word$"
        with pytest.raises(WireError, match=message):
            await wire.say(finished_requests=[wire_id])
        assert wire.connection.held == ["r"], "whoever ends this life tells them"


async def test_every_request_of_a_lost_engine_is_told_why() -> None:
    cause = EngineLost("it burnt")
    async with open_wire() as wire:
        wire.ask("a")
        wire.ask("b")
        wire.ask("left")
        wire.link.abort("left")
        wire.connection.fail_all(cause, "it burnt")
        assert wire.connection.is_idle
    assert [output.request_id for output in wire.got] == ["a", "b"]
    for output in wire.got:
        assert output.finish_reason is FinishReason.ERROR
        message = f"engine {ENGINE} was lost while it held request {output.request_id}: it burnt"
        assert str(output.error) == message
        assert isinstance(output.error, EngineLost)
        assert (output.error.engine, output.error.request_id) == (ENGINE, output.request_id)
        assert output.error.__cause__ is cause


async def test_many_outputs_are_taken_in_parts_and_none_after_the_engine_is_lost() -> None:
    async with open_wire() as wire:
        for number in range(2 * PIECE):
            wire.ask(f"r{number}")
        ids = [await wire.heard_id() for _ in range(2 * PIECE)]
        outputs = [WireOutput(request_id=each, new_token_ids=(1,)) for each in ids]
        message = encode_envelope(Envelope(outputs=outputs))
        parts = wire.connection.take(message)
        assert parts is not None
        next(parts)
        assert len(wire.got) == PIECE
        wire.link.abort(f"r{PIECE}")
        assert len([*parts]) == 1
        assert len(wire.got) == 2 * PIECE - 1
        parts = wire.connection.take(message)
        assert parts is not None
        next(parts)
        wire.connection.fail_all(EngineLost("it burnt"), "it burnt")
        told = len(wire.got)
        assert [*parts] == []
        assert len(wire.got) == told


async def test_links_hear_how_many_of_their_own_requests_the_engine_reckons_with() -> None:
    async with open_wire() as wire:
        mine: list[tuple[int, int]] = []
        theirs: list[tuple[int, int]] = []

        def link(to: list[tuple[int, int]]) -> ZmqLink:
            def hear(_: EngineId, report: StepReport) -> None:
                to.append((report.sent, report.acknowledged))

            return ZmqLink(wire.connection, wire._deliver, hear)

        links = link(mine), link(theirs)
        for number in (0, 1, 1, 0):
            wire.link = links[number]
            wire.ask(f"r{len(wire.connection.held)}")
        with pytest.raises(RequestRejected, match="2,000 are the most"):
            wire.ask("large", prompt=LIMIT)

        async def say(acknowledged: int) -> None:
            told = EngineReport(acknowledged=acknowledged)
            await wire.say(scheduler_stats=SchedulerStats(dpkit=told))

        await say(0)
        await say(2)
        await say(2)
        await say(4)
        assert mine == [(3, 0), (3, 1), (3, 1), (3, 3)], "the one refused here is not waited for"
        assert theirs == [(2, 0), (2, 1), (2, 1), (2, 2)]


async def test_of_an_engine_that_never_tells_no_memory_of_what_was_sent_is_kept() -> None:
    async with open_wire() as wire:
        for number in range(3):
            wire.ask(f"r{number}")
            output = WireOutput(await wire.heard_id(), (1,), finish_reason=FinishCode.STOP)
            await wire.say(output)
        assert not wire.connection._unreckoned


async def test_an_engine_that_does_not_tell_of_its_work_is_not_heard() -> None:
    async with open_wire() as wire:
        heard: list[StepReport] = []
        wire.link = ZmqLink(wire.connection, wire._deliver, lambda _, report: heard.append(report))
        wire.ask()
        await wire.say(scheduler_stats=SchedulerStats(num_running_reqs=1))
        assert wire.loads == [1]
        assert not heard
