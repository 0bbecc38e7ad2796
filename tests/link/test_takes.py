"""What an engine is asked to give back comes from it, and from nobody else, and once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpkit.errors import WireError
from dpkit.link.wirelink import ZmqLink
from dpkit.wire.codec import Utility
from dpkit.wire.structs import FinishCode, UtilityAnswer, WireOutput
from tests.link.test_zmq import ENGINE, Wire, open_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.messages import EngineId


class Asker:
    """Asks for requests back, and keeps what it was given."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.given: list[Sequence[str]] = []

    async def ask(self, *request_ids: str) -> int:
        """Ask; the id of the call, which the engine has heard by now."""
        self.wire.link.take_back(request_ids, self._on_taken)
        call = await self.wire.hear()
        assert isinstance(call, Utility)
        return call.call.call_id

    async def answer(self, call_id: int, result: Any, failure: str | None = None) -> None:
        """Have the engine answer."""
        answer = UtilityAnswer(call_id, failure, (None, result))
        await self.wire.say(utility_output=answer)

    def _on_taken(self, engine: EngineId, request_ids: Sequence[str]) -> None:
        assert engine == ENGINE
        self.given.append(request_ids)


async def test_what_was_asked_for_is_given_once_however_often_it_is_named() -> None:
    async with open_wire() as wire:
        wire.ask("a")
        wire.ask("b")
        a, b = await wire.heard_id(), await wire.heard_id()
        asker = Asker(wire)
        call_id = await asker.ask("a", "b")
        await asker.answer(call_id, [b, b])
        await asker.answer(call_id, [a])  # nobody asked again
        assert asker.given == [["b"]]
        assert wire.connection.held == ["a"]


async def test_an_engine_that_refuses_or_answers_in_other_words_gives_nothing() -> None:
    async with open_wire() as wire:
        wire.ask("a")
        a = await wire.heard_id()
        asker = Asker(wire)
        for result, failure in ((None, None), ("a", None), ({"a": 1}, None), ([a], "no")):
            await asker.answer(await asker.ask("a"), result, failure)
        assert asker.given == [[]] * 4
        assert wire.connection.held == ["a"]


@pytest.mark.parametrize("strange", [["r-0"], {}, None, 7, 1.5, "somebody else's"])
async def test_who_gives_back_what_it_was_not_asked_breaks_the_protocol(strange: Any) -> None:
    async with open_wire() as wire:
        wire.ask("a")
        a = await wire.heard_id()
        asker = Asker(wire)
        call_id = await asker.ask("a")
        with pytest.raises(WireError, match=r"engine e-0#2 gave .* back, which it was not asked"):
            await asker.answer(call_id, [a, strange])
        assert asker.given == []
        assert wire.connection.held == ["a"], "it hears that the engine is lost"


async def test_no_client_is_given_what_another_has_there() -> None:
    """It would not know it, and the other would wait for ever."""
    async with open_wire() as wire:
        other = Wire(wire.router, wire.pull, wire.dealer, wire.push)
        other.link = ZmqLink(wire.connection, other._deliver)
        wire.ask("mine")
        other.ask("theirs")
        await wire.heard_id()
        theirs = await wire.heard_id()
        asker = Asker(wire)
        with pytest.raises(WireError, match="not asked"):
            await asker.answer(await asker.ask("mine"), [theirs])
        assert wire.connection.held == ["mine", "theirs"]


async def test_one_that_its_client_left_before_it_was_given_back_leaves_nothing_behind() -> None:
    """The engine has given it up, so it does not answer to the abort that comes behind."""
    async with open_wire() as wire:
        idle: list[bool] = []
        wire.connection.on_idle = lambda: idle.append(True)
        wire.ask("a")
        a = await wire.heard_id()
        asker = Asker(wire)
        call_id = await asker.ask("a")
        wire.link.abort("a")
        await asker.answer(call_id, [a])
        assert asker.given == [[]]
        assert idle
        assert wire.connection.is_idle
        assert wire.connection.meter.measured().abort_to_free_s.count == 1, "nor is it waited for"


async def test_one_that_ends_before_it_was_given_back_is_not_given() -> None:
    async with open_wire() as wire:
        wire.ask("a")
        a = await wire.heard_id()
        asker = Asker(wire)
        call_id = await asker.ask("a")
        await wire.say(WireOutput(a, (4,), finish_reason=FinishCode.STOP), finished_requests=[a])
        await asker.answer(call_id, [a])
        assert asker.given == [[]]
