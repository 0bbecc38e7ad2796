"""What users of the peers report of what they could not see, asked over HTTP; M07: `dpkit run`."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import trio

from tests.nursery.lab import loop_of
from tests.serve.desk import COMPLETIONS, ECHO, open_desk

if TYPE_CHECKING:
    from trio.testing import MockClock

NO_SECOND_LIFE = "supervision = {intensity = 0}\n"


async def test_M06_the_rank_that_is_down_is_named_with_its_error(
    autojump_clock: MockClock,
) -> None:
    toml = ECHO.replace("count = 2", "count = 4") + NO_SECOND_LIFE
    async with open_desk(toml) as desk:
        [slot] = [slot for slot in desk.cluster._slots if slot.rank == 2]
        loop_of(slot).lose(ZeroDivisionError("the GPU is on fire"))
        await trio.sleep(1)
        told = json.loads((await desk.get("/statistics")).body)
        [down] = [engine for engine in told["engines"] if engine["state"] == "down"]
        assert told["ranks"][down["engine"]] == 2
        assert down["last_error"] == "ZeroDivisionError: the GPU is on fire"
        ready = await desk.get("/ready")
        assert ready.status == 200
        assert json.loads(ready.body)["engines"]["e-2"] == "down"
        [lost] = [each for each in desk.cluster.events if each.kind == "engine_down"]
        assert lost.engine == slot.engine
        assert (await desk.ask(COMPLETIONS, prompt="a"))["choices"][0]["text"] == "a"


async def test_M05_statistics_are_those_of_the_life_that_serves(autojump_clock: MockClock) -> None:
    async with open_desk(ECHO.replace("count = 2", "count = 1")) as desk:
        await desk.ask(COMPLETIONS, prompt="abc")
        (slot,) = desk.cluster._slots
        loop_of(slot).lose(ZeroDivisionError("as a test says"))
        await trio.sleep(60)
        await desk.ask(COMPLETIONS, prompt="abcdef")
        [told] = json.loads((await desk.get("/statistics")).body)["engines"]
        assert (told["engine"], told["restarts"]) == ("e-0#1", 1)
        assert told["core"]["output_tokens"] == 7
        assert told["totals"]["output_tokens"] == 11
