"""What vLLM's engines are sent: complete, within the ranges that they read, and nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dpkit.errors import RequestRejected
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.wire.codec import Add, decode_input, encode_input
from dpkit.wire.convert import from_wire
from dpkit.wire.foreign import to_vllm

if TYPE_CHECKING:
    from dpkit.wire.structs import WireRequest

EOS = frozenset({7, 3, 9})


def written(
    output: tuple[int, ...] = (), eos: frozenset[int] = EOS, **sampling: Any
) -> WireRequest:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=(1, 2),
        output_token_ids=output,
        sampling=SamplingParams(**({"max_tokens": 20} | sampling)),
    )
    return to_vllm(request, wire_id="r-0", eos_token_ids=eos, arrival_time=1e9, current_wave=4)


def sampling_of(wire: WireRequest) -> dict[str, Any]:
    """The map as it is on the wire."""
    frames = encode_input(Add(wire))
    fields = msgspec.msgpack.decode(frames[1])
    assert isinstance(fields[3], dict)
    return fields[3]


def test_the_moment_the_wave_and_the_ids_are_told() -> None:
    wire = written()
    assert (wire.request_id, wire.external_req_id) == ("r-0", "r")
    assert (wire.arrival_time, wire.current_wave, wire.client_index) == (1e9, 4, 0)


@pytest.mark.parametrize(
    ("sampling", "end", "stops", "all_stops"),
    [
        ({}, 3, [7, 9], [3, 7, 9]),
        ({"stop_token_ids": (5, 7)}, 3, [5, 7, 9], [3, 5, 7, 9]),
        ({"ignore_eos": True}, None, None, None),
        ({"ignore_eos": True, "stop_token_ids": (5, 7)}, None, [5, 7], [5, 7]),
    ],
)
def test_the_tokens_that_end_a_text_are_named(
    sampling: dict[str, Any], end: int | None, stops: list[int] | None, all_stops: list[int] | None
) -> None:
    said = sampling_of(written(**sampling))
    assert said.get("_eos_token_id") == end
    assert said.get("stop_token_ids") == stops
    assert said.get("_all_stop_token_ids") == all_stops


def test_a_model_without_end_tokens_names_none() -> None:
    said = sampling_of(written(eos=frozenset()))
    assert not {"_eos_token_id", "stop_token_ids", "_all_stop_token_ids"} & said.keys()


def test_output_of_a_former_life_is_the_end_of_the_prompt() -> None:
    wire = written((8, 9), max_tokens=5, min_tokens=4, prompt_logprobs=1)
    said = sampling_of(wire)
    assert wire.prompt_token_ids == (1, 2, 8, 9)
    assert (said["max_tokens"], said["min_tokens"]) == (3, 2)
    assert not {"extra_args", "prompt_logprobs"} & said.keys()
    assert "min_tokens" not in sampling_of(written((8, 9), max_tokens=5, min_tokens=1))


def test_the_seed_that_vllm_reads_as_none_is_another() -> None:
    assert sampling_of(written(seed=-1))["seed"] == 2**64 - 1
    assert sampling_of(written(seed=-2))["seed"] == -2


def test_what_vllm_does_not_read_is_refused() -> None:
    with pytest.raises(RequestRejected, match="temperature must be at most 2 for an engine"):
        written(temperature=2.01)
    assert sampling_of(written(temperature=2.0))["temperature"] == 2.0


def test_dpkit_engines_read_it_alike() -> None:
    frames = encode_input(Add(written(stop_token_ids=(5,), min_tokens=2, temperature=0.5)))
    message = decode_input(frames)
    assert isinstance(message, Add)
    read = from_wire(message.request).sampling
    assert not read.ignore_eos
    assert set(read.stop_token_ids) == {5, 7, 9, 3}
    assert (read.min_tokens, read.temperature) == (2, 0.5)
