"""Bytes that went wrong on the way, or were never right: a message or a `WireError`, always."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkit.errors import RequestRejected, WireError
from dpkit.messages import EngineId
from dpkit.wire import codec
from dpkit.wire.codec import Abort, Add, EngineDead, Utility
from dpkit.wire.convert import from_wire, output_from_wire
from dpkit.wire.reports import statistics_from_wire, stats_from_wire
from dpkit.wire.structs import Envelope, SamplingMap, SchedulerStats, WireRequest
from tests.wire.vectors import VECTORS, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Decode = Callable[[Sequence[bytes]], Any]


def one(decode: Callable[[bytes], Any]) -> Decode:
    return lambda frames: decode(b"".join(frames))


ASKED = WireRequest(
    "r", (1,), None, SamplingMap(logprobs=5, prompt_logprobs=2), None, 0.0, None, None, None
)
TO_ENGINE = {
    codec.ADD: named("request_", "rust_request_"),
    codec.ABORT: ["abort_two", "rust_abort"],
    codec.UTILITY: named("utility_call", "rust_utility"),
}
SOUND: list[tuple[Decode, tuple[bytes, ...]]] = [
    *(
        (codec.decode_input, (kind, *VECTORS[name].frames))
        for kind, names in TO_ENGINE.items()
        for name in names
    ),
    *((codec.decode_output, VECTORS[name].frames) for name in named("outputs_", "coord_")),
    *((one(codec.decode_hello), VECTORS[name].frames) for name in named("handshake_hello")),
    *((one(codec.decode_init), VECTORS[name].frames) for name in named("rust_init")),
    (one(codec.decode_ready_response), VECTORS["engine_ready_response"].frames),
    (one(codec.decode_publish), VECTORS["coordinator_publish"].frames),
    (one(codec.decode_to_coordinator), VECTORS["scale_marker"].frames),
    (codec.decode_from_coordinator, (codec.START_WAVE, *VECTORS["start_dp_wave"].frames)),
]
DECODERS = [
    codec.decode_input,
    codec.decode_output,
    codec.decode_from_coordinator,
    *map(
        one,
        (
            codec.decode_hello,
            codec.decode_init,
            codec.decode_ready_response,
            codec.decode_publish,
            codec.decode_to_coordinator,
        ),
    ),
]


def damaged(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """A message as a bad cable, a bug or a stranger would have it."""
    result = list(frames)
    place = rng.randrange(len(result))
    frame = bytearray(result[place])
    match rng.randrange(8):
        case 0:
            del frame[rng.randrange(len(frame)) :]
        case 1:
            frame[:] = rng.randbytes(rng.randrange(80))
        case 2:
            at = rng.randrange(len(frame) + 1)
            frame[at:at] = rng.randbytes(rng.randrange(1, 5))
        case 3:
            return rng.sample(result, rng.randrange(len(result)))
        case _:
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    result[place] = bytes(frame)
    return result


def use(message: Any) -> str:
    """Do what an engine or a client does with a message; say how it went."""
    try:
        if isinstance(message, Add):
            from_wire(message.request)
        if isinstance(message, Envelope):
            for output in message.outputs:
                output_from_wire(output, ASKED)
            load(message.scheduler_stats)
    except (RequestRejected, WireError) as error:
        return type(error).__name__
    return "used"


def load(stats: SchedulerStats | None) -> None:
    if stats is not None:
        told = stats_from_wire(stats, engine=EngineId("e"), index=0, seq=1)
        assert 0.0 <= told.kv_cache_usage <= 1.0
        assert told.waiting >= 0 <= told.running
        statistics_from_wire(stats)


def check_damage(rounds: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(rounds):
        decode, frames = rng.choice(SOUND)
        try:
            message = decode(damaged(rng, frames))
        except WireError:
            outcomes["refused"] += 1
            continue
        outcomes[use(message)] += 1
        if isinstance(message, Add | Abort | Utility):
            written = codec.encode_input(message)
            assert codec.encode_input(decode(written)) == written
    return outcomes


def test_a_hundred_thousand_damaged_messages_are_messages_or_errors() -> None:
    outcomes = check_damage(100_000, seed=1)
    print(outcomes)
    assert {"refused", "used", "RequestRejected", "WireError"} <= outcomes.keys()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_million_damaged_messages_are_messages_or_errors(seed: int) -> None:
    assert check_damage(100_000, seed).total() == 100_000


@given(st.sampled_from(DECODERS), st.lists(st.binary(max_size=40), max_size=4))
def test_anything_at_all_is_a_message_or_an_error(decode: Decode, frames: list[bytes]) -> None:
    with suppress(WireError):
        use(decode(frames))


@pytest.mark.parametrize("index", range(len(SOUND)))
def test_every_truncation_is_a_message_or_an_error(index: int) -> None:
    decode, frames = SOUND[index]
    *before, last = frames
    for end in range(len(last)):
        with suppress(WireError):
            use(decode([*before, last[:end]]))


def test_undamaged_they_are_all_read() -> None:
    for decode, frames in SOUND:
        assert decode(frames) is not None
    assert codec.decode_output([codec.ENGINE_DEAD]) == EngineDead()
