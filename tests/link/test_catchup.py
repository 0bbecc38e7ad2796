"""A client that is late catches up: what several messages bring to a request is told at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpkit.errors import EngineLost
from dpkit.link.catchup import TOGETHER, CatchUp
from dpkit.link.wirelink import ZmqLink
from dpkit.messages import EngineId, EngineOutput, TokenLogprob
from dpkit.names import FinishReason
from dpkit.wire.codec import encode_envelope
from dpkit.wire.logprobs import arrays_of_output
from dpkit.wire.structs import (
    EngineReport,
    Envelope,
    FinishCode,
    SchedulerStats,
    UtilityAnswer,
    WireOutput,
)
from tests.link.test_zmq import RANK, Wire, open_wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.messages import StepReport


async def late(wire: Wire, *messages: Sequence[WireOutput], steps: int = 0) -> Iterator[None]:
    """Have the engine say several things, and take in what is there when all have come.

    With `steps` it tells of its work in each, after so many of them and more.
    """
    for number, outputs in enumerate(messages, start=steps):
        told = SchedulerStats(dpkit=EngineReport(steps=number)) if steps else None
        wire.push.send_nowait(encode_envelope(Envelope(RANK, list(outputs), told)))
    return CatchUp(wire.pull, wire.connection).take(await wire.pull.receive()) or iter(())


async def test_who_is_late_tells_each_request_once_of_what_has_come_meanwhile() -> None:
    async with open_wire() as wire:
        wire.ask("a")
        wire.ask("b")
        a, b = await wire.heard_id(), await wire.heard_id()
        steps = [[WireOutput(a, (n,)), WireOutput(b, (n,))] for n in range(3)]
        end = [WireOutput(a, (3,), finish_reason=FinishCode.LENGTH)]
        for _ in await late(wire, *steps, end):
            pass
    # First tokens at once, the rest together, and the last word by itself.
    assert [(each.request_id, each.token_ids) for each in wire.got] == [
        *(("a", (0,)), ("b", (0,))),
        *(("a", (1, 2)), ("a", (3,)), ("b", (1, 2))),
    ]
    assert [each.finish_reason for each in wire.got if each.finish_reason] == [FinishReason.LENGTH]


async def test_who_is_late_takes_in_only_so_much_at_a_time() -> None:
    async with open_wire() as wire:
        wire.ask()
        wire_id = await wire.heard_id()
        for _ in await late(wire, *[[WireOutput(wire_id, (n,))] for n in range(TOGETHER + 2)]):
            pass
        assert [len(each.token_ids) for each in wire.got] == [1, TOGETHER - 1]
        for _ in await late(wire):
            pass
    assert [len(each.token_ids) for each in wire.got] == [1, TOGETHER - 1, 2]


async def test_who_is_late_hears_of_the_last_step_and_who_keeps_a_table_of_each() -> None:
    async with open_wire() as wire:
        heard: dict[str, list[int]] = {"asks": [], "listens": []}

        def listen(name: str) -> None:
            def hear(_: EngineId, report: StepReport) -> None:
                heard[name].append(report.steps)

            deliver = wire.link.deliver
            ZmqLink(wire.connection, deliver, hear, hears_all=name == "listens")

        for name in heard:
            listen(name)
        wire.ask()
        wire_id = await wire.heard_id()
        for _ in await late(wire, *[[WireOutput(wire_id, (n,))] for n in range(3)], steps=7):
            pass
    assert heard == {"asks": [9], "listens": [7, 8, 9]}


async def test_the_newest_report_is_heard_though_the_newest_message_tells_none() -> None:
    async with open_wire() as wire:
        steps: list[int] = []
        deliver = wire.link.deliver
        ZmqLink(wire.connection, deliver, lambda _, report: steps.append(report.steps))
        for number in (7, 8):
            told = SchedulerStats(dpkit=EngineReport(steps=number))
            wire.push.send_nowait(encode_envelope(Envelope(RANK, scheduler_stats=told)))
        answer = UtilityAnswer(call_id=1, result=(None, None))
        wire.push.send_nowait(encode_envelope(Envelope(RANK, utility_output=answer)))
        for _ in await late(wire):
            pass
    assert steps == [8]


@pytest.mark.parametrize("asks", [{"stop": ("x",)}, {"logprobs": 0}], ids=str)
async def test_tokens_at_each_of_which_somebody_looks_are_told_one_by_one(asks: Any) -> None:
    async with open_wire() as wire:
        wire.ask(**asks)
        wire_id = await wire.heard_id()
        told = (
            arrays_of_output((TokenLogprob(token_id=1, logprob=-1.0, rank=1),))
            if "logprobs" in asks
            else None
        )
        outputs = [[WireOutput(wire_id, (n,), new_logprobs=told)] for n in range(3)]
        for _ in await late(wire, *outputs):
            pass
    assert [each.token_ids for each in wire.got] == [(0,), (1,), (2,)]


async def test_what_is_kept_for_later_goes_before_a_loss_and_to_nobody_after_an_abort() -> None:
    async with open_wire() as wire:
        wire.ask("stays")
        wire.ask("leaves")
        ids = [await wire.heard_id() for _ in range(2)]
        parts = await late(wire, *[[WireOutput(each, (n,)) for each in ids] for n in range(3)])
        next(parts)
        next(parts)  # the second tokens are kept now
        wire.link.abort("leaves")
        wire.connection.fail_all(EngineLost("it burnt"), "it burnt")
        assert [*parts] == []
    assert [(each.request_id, each.token_ids) for each in wire.got[2:]] == [
        ("stays", (1,)),
        ("stays", ()),
    ]


async def test_a_client_that_leaves_at_what_was_kept_does_not_hear_the_end() -> None:
    async with open_wire() as wire:
        wire.ask()
        wire_id = await wire.heard_id()
        deliver = wire.link.deliver

        def leave(engine: EngineId, output: EngineOutput) -> None:
            deliver(engine, output)
            if output.token_ids == (1,):
                wire.link.abort("r")

        wire.link.deliver = leave
        end = [WireOutput(wire_id, (2,), finish_reason=FinishCode.STOP)]
        for _ in await late(wire, [WireOutput(wire_id, (0,))], [WireOutput(wire_id, (1,))], end):
            pass
        assert wire.connection.late_outputs == 1
    assert [each.token_ids for each in wire.got] == [(0,), (1,)]
