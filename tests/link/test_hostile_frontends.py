"""Whatever a frontend sends, its engine lives, and the other frontend is served as if alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from trio.testing import wait_all_tasks_blocked

from dpkit.engine.models.echo import EchoModel
from dpkit.errors import WireError
from dpkit.wire.codec import Abort, Utility, encode_input
from dpkit.wire.structs import FinishCode, UtilityCall
from tests.link.lab import ask, open_desk

if TYPE_CHECKING:
    from tests.link.lab import Desk

GOOD = [
    encode_input(ask("a", range(40), logprobs=3, logit_bias={1: 2.0}, stop_token_ids=(7,), seed=1)),
    encode_input(Abort(("a", "b"))),
    encode_input(Utility(UtilityCall(0, 1, "pause_generation", ("wait", True)))),
    encode_input(Utility(UtilityCall(0, 2, "reset_prefix_cache", (False, False)))),
    encode_input(Utility(UtilityCall(0, 3, "resume_scheduler"))),
    encode_input(Utility(UtilityCall(0, 4, "dpkit_take_back", (["a", "b", "a"],)))),
    encode_input(Utility(UtilityCall(0, 5, "dpkit_progress"))),
]
RESUMED = ask("c", range(9))
assert RESUMED.request.sampling_params is not None
RESUMED.request.sampling_params.extra_args = {"dpkit": {"output_token_ids": [1, 2]}}
GOOD.append(encode_input(RESUMED))
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, -0.5, float("nan"), "", "x", [], [1], {}, {"a": 1}]


def flipped(random: random.Random) -> list[bytes]:
    """A message with a byte or two changed, or cut short."""
    frames = [bytearray(frame) for frame in random.choice(GOOD)]
    for _ in range(random.randint(1, 2)):
        frame = random.choice(frames)
        if random.random() < 0.1:
            del frame[random.randrange(len(frame) + 1) :]
        elif frame:
            frame[random.randrange(len(frame))] = random.randrange(256)
    return [bytes(frame) for frame in frames]


def strange(random: random.Random) -> list[bytes]:
    """A message of the right shape, in which some value is not what it should be."""
    kind, payload = random.choice(GOOD)
    value = msgspec.msgpack.decode(payload)
    place = value
    while True:
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], list | dict) and place[key] and random.random() < 0.8:
            place = place[key]
        else:
            place[key] = random.choice(VALUES)
            return [kind, msgspec.msgpack.encode(value)]


async def serves(desk: Desk, number: int) -> None:
    """The second frontend is served."""
    desk.call(1, "resume_scheduler")
    name = f"fine-{number}"
    desk.say(1, ask(name, (1, 2)))
    await wait_all_tasks_blocked()
    told = [(tokens, finish) for each, tokens, finish in desk.told(1) if each == name]
    assert told == [((1,), None), ((2,), None), ((256,), FinishCode.STOP)]
    desk.sent[1].clear()


@pytest.mark.parametrize("make", [flipped, strange])
@pytest.mark.parametrize(
    "messages",
    [4_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_an_engine_survives_whatever_a_frontend_says(autojump_clock, make, messages) -> None:
    source = random.Random(f"{make.__name__}")
    understood = 0
    async with open_desk(model=EchoModel()) as desk:
        for number in range(messages):
            try:
                desk.frontends.receive(0, make(source))
            except WireError:
                pass
            else:
                understood += 1
            if number % 50 == 0:
                await serves(desk, number)
                desk.sent[0].clear()
        desk.say(0, Abort(desk.frontends._ports[0].held))
        await serves(desk, messages)
        assert not any(desk.loop.core.get_request_counts())
        desk.loop.core.check()
    assert messages / 20 < understood < messages
