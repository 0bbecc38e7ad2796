"""The codec: strict on what it writes, lenient on what it reads, and clear on what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext, encode

import dpkit
from dpkit.errors import RequestRejected, WireError
from dpkit.wire import codec
from dpkit.wire.codec import Abort, Add, Utility
from dpkit.wire.structs import (
    CoordinatorPublish,
    Envelope,
    FinishCode,
    Hello,
    Init,
    LogprobArrays,
    ReadyResponse,
    SamplingMap,
    SchedulerStats,
    StartWave,
    UtilityAnswer,
    UtilityCall,
    WireOutput,
    WireRequest,
)
from dpkit.wire.tensors import Tensor, pack, unpack
from tests.wire import messages

LIMIT = 1000


def request(**fields: Any) -> WireRequest:
    plain = {
        "request_id": "r-0",
        "prompt_token_ids": (1, 2),
        "mm_features": None,
        "sampling_params": SamplingMap(),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return WireRequest(**{**plain, **fields})


def read_envelope(value: Any, *more: bytes) -> Envelope:
    envelope = codec.decode_output([encode(value), *more])
    assert isinstance(envelope, Envelope)
    return envelope


def read_output(*fields: Any) -> WireOutput:
    return read_envelope([0, [fields]]).outputs[0]


# -- What is written is read -----------------------------------------------------------------------


@given(messages.wire_requests)
def test_requests_come_back_as_they_were(request: WireRequest) -> None:
    assert codec.decode_input(codec.encode_input(Add(request))) == Add(request)


@given(messages.calls)
def test_utility_calls_come_back_as_they_were(call: UtilityCall) -> None:
    assert codec.decode_input(codec.encode_input(Utility(call))) == Utility(call)


@given(st.lists(messages.texts).map(tuple))
def test_aborts_come_back_as_they_were(ids: tuple[str, ...]) -> None:
    assert codec.decode_input(codec.encode_input(Abort(ids))) == Abort(ids)


@given(messages.envelopes)
def test_envelopes_come_back_as_they_were(envelope: Envelope) -> None:
    assert codec.decode_output(codec.encode_envelope(envelope)) == envelope


@given(messages.hellos)
def test_hellos_come_back_as_they_were(hello: Hello) -> None:
    frame = codec.encode_hello(hello.status, hello.local, hello.headless)
    assert codec.decode_hello(frame) == hello


@given(messages.inits)
def test_inits_come_back_as_they_were(init: Init) -> None:
    assert codec.decode_init(codec.encode_init(init)) == init


@given(messages.ready_responses)
def test_ready_responses_come_back_as_they_were(response: ReadyResponse) -> None:
    assert codec.decode_ready_response(codec.encode_ready_response(response)) == response


@given(messages.publishes)
def test_publishes_come_back_as_they_were(publish: CoordinatorPublish) -> None:
    assert codec.decode_publish(codec.encode_publish(publish)) == publish


@given(messages.start_waves)
def test_starts_of_waves_come_back_as_they_were(start: StartWave) -> None:
    assert codec.decode_from_coordinator(codec.encode_start_wave(start)) == start


# -- Strict on what is written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(),
        Envelope(outputs=[], weight_version="default"),
        Envelope(outputs=[WireOutput("r-0", (1,))], utility_output=UtilityAnswer(1)),
        Envelope(finished_requests=[], wave_complete=1),
        Envelope(scheduler_stats=SchedulerStats(), start_wave=1),
        Envelope(wave_complete=1, start_wave=2),
    ],
)
def test_an_empty_or_mixed_envelope_is_never_written(envelope: Envelope) -> None:
    with pytest.raises(ValueError, match="exactly one kind"):
        codec.encode_envelope(envelope)


def test_every_field_is_written() -> None:
    (payload,) = codec.encode_envelope(Envelope(outputs=[WireOutput("r-0", (1,))]))
    written = msgspec.msgpack.decode(payload)
    assert (len(written), len(written[1][0])) == (9, 19)
    assert len(msgspec.msgpack.decode(codec.encode_input(Add(request()))[1])) == 22


def test_the_stats_map_is_written_whole() -> None:
    (payload,) = codec.encode_envelope(Envelope(scheduler_stats=SchedulerStats()))
    stats = msgspec.msgpack.decode(payload)[2]
    assert len(stats) == 18  # without dpkit's own key, which only its engines write
    assert len(stats["prefix_cache_stats"]) == 8


def test_all_keys_of_a_ready_response_are_written() -> None:
    vector = codec.decode_ready_response(ready_payload())
    assert vector is not None
    assert len(msgspec.msgpack.decode(codec.encode_ready_response(vector))) == 28


def ready_payload(**changes: Any) -> bytes:
    plain = {
        "max_model_len": 1,
        "num_gpu_blocks": 1,
        "block_size": 1,
        "dtype": "float32",
        "vllm_version": "0.33.0",
        "world_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": 0,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "instance_id": "",
        "supports_lora": False,
        "max_loras": 0,
    }
    return encode({key: value for key, value in {**plain, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "\ud800"},
        {"prompt_token_ids": (2**64,)},
        {"priority": 2**80},
        {"kv_hints": object()},
        {"external_req_id": "\udfff"},
    ],
)
def test_a_request_that_no_message_holds_is_refused_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected, match="cannot send request"):
        codec.encode_input(Add(request(**fields)))


def test_what_does_not_travel_is_named() -> None:
    with pytest.raises(RequestRejected, match=r"cannot send request: .*\bobject does not travel$"):
        codec.encode_input(Add(request(kv_hints={"where": object()})))


# -- Lenient on what is read -----------------------------------------------------------------------


def test_short_arrays_take_defaults() -> None:
    assert read_envelope([3, [["r-0", [7]]]]) == Envelope(3, [WireOutput("r-0", (7,))])
    assert read_envelope([]) == Envelope()


def test_fields_of_later_releases_are_passed_over() -> None:
    (payload,) = codec.encode_envelope(Envelope(outputs=[WireOutput("r-0", (7,))]))
    fields = msgspec.msgpack.decode(payload)
    fields[1][0].append("new")
    assert read_envelope([*fields, {"newer": 1}]).outputs == [WireOutput("r-0", (7,))]


def test_unknown_keys_are_passed_over() -> None:
    stats = read_envelope([0, [], {"num_running_reqs": 2, "novelty": [1]}]).scheduler_stats
    assert stats == SchedulerStats(num_running_reqs=2)
    assert codec.decode_hello(
        encode({"status": "HELLO", "local": True, "headless": False, "novelty": {}})
    ) == Hello(status="HELLO", local=True, headless=False)


def test_a_whole_number_will_do_for_a_float() -> None:
    assert read_envelope([0, [], None, 12]).timestamp == 12.0


def test_nil_will_not_do_for_a_number_that_has_a_default() -> None:
    with pytest.raises(WireError, match="Expected `int`, got `None`"):
        read_output("r-0", [1], *[None] * 12)


def test_frames_nobody_refers_to_are_passed_over() -> None:
    assert read_envelope([0, [["r-0", [7]]]], b"stray", b"").outputs == [WireOutput("r-0", (7,))]


@pytest.mark.parametrize("size", [0, 4, 252, 256, 1024])
def test_arrays_are_read_inline_and_from_frames_at_any_size(size: int) -> None:
    data = bytes(range(256)) * 4
    expected = Tensor("<i4", (size // 4,), data[:size])
    three = [expected] * 3
    arrays: list[Any] = [["<i4", [size // 4], Ext(3, data[:size])], ["<i4", [size // 4], 2]]
    value = [0, [["r-0", [], [arrays[0], arrays[1], arrays[1]]]]]
    envelope = read_envelope(value, b"stray", data[:size])
    assert envelope.outputs[0].new_logprobs == LogprobArrays(*three)


def test_large_arrays_are_written_to_frames_of_their_own() -> None:
    small, large = (pack("<i4", (n,), range(n)) for n in (63, 64))
    arrays = LogprobArrays(large, small, large)
    envelope = Envelope(outputs=[WireOutput("r-0", (), arrays), WireOutput("r-1", (), arrays)])
    frames = codec.encode_envelope(envelope)
    assert frames[1:] == [large.data] * 4
    assert codec.decode_output(frames) == envelope


def test_frames_may_be_anything_with_bytes_in_it() -> None:
    frames = codec.encode_input(Add(request()))
    assert codec.decode_input(list(map(memoryview, frames))) == Add(request())  # type: ignore[arg-type]


# -- Refused, and said so --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("where", ["array", "opaque"])
def test_pickles_are_not_opened(code: int, where: str) -> None:
    pickle = Ext(code, b"cposix\nsystem\n(S'false'\ntR.")
    value: Any = [["<i4", [1], pickle]] * 3 if where == "array" else None
    with pytest.raises(WireError, match=f"extension type {code} is a Python pickle"):
        read_output("r-0", [], value, None, pickle)


def test_an_unknown_extension_is_refused() -> None:
    with pytest.raises(WireError, match="extension type 77 is unknown"):
        read_output("r-0", [], None, None, Ext(77, b""))


@pytest.mark.parametrize("number", [-1, 0, 2, 2**63])
def test_an_array_in_a_frame_that_is_not_there_is_refused(number: int) -> None:
    array = ["<i4", [1], number]
    with pytest.raises(WireError, match=f"frame {number} of"):
        read_envelope([0, [["r-0", [], [array] * 3]]], b"abcd")


@pytest.mark.parametrize(
    "array", [["<i4", [1]], ["<i4", [-1], 1], ["<i4", "x", 1], [1, [1], 1], ["<i4", [1], {}], 5]
)
def test_what_is_no_array_is_refused(array: Any) -> None:
    with pytest.raises(WireError, match="an array: its dtype, shape"):
        read_envelope([0, [["r-0", [], [array] * 3]]], b"abcd")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("r-0", [-1]), "Expected `int` >= 0"),
        (("r-0", [2**31]), "Expected `int` <= 2147483647"),
        (("r-0", [], None, None, None, 5), "Invalid enum value 5"),
        ((7, []), "Expected `str`, got `int` - at `$[1][0][0]`"),
        (("r-0",), "Expected `array` of at least length 2, got 1"),
    ],
)
def test_an_unreadable_output_is_told_with_its_place(fields: Any, said: str) -> None:
    with pytest.raises(WireError) as caught:
        read_output(*fields)
    message = str(caught.value)
    assert said in message
    assert "bytes in 1 frame;" in message
    assert "the layout of vLLM 0.33.0" in message


def test_all_frames_of_an_unreadable_output_are_counted() -> None:
    with pytest.raises(
        WireError, match=r"^cannot read an output: .*bytes in 3 frames; expected is"
    ):
        read_envelope([0, [["r-0", [-1]]]], b"abcd", b"efgh")


def test_a_message_beyond_the_limit_is_not_even_read() -> None:
    frames = codec.encode_input(Add(request(prompt_token_ids=(1,) * LIMIT)))
    with pytest.raises(WireError, match=r"a request has 1,0\d\d bytes, and 1,000 are the most"):
        codec.decode_input(frames, limit=LIMIT)
    stray = [*codec.encode_envelope(Envelope(finished_requests=[])), b" " * LIMIT]
    with pytest.raises(WireError, match="1,000 are the most"):
        codec.decode_output(stray, limit=LIMIT)


@pytest.mark.parametrize("kind", [codec.START_WAVE, b"\x04", b"\x05", b"", b"\x00\x00", b"x" * 99])
def test_an_input_of_another_type_is_refused(kind: bytes) -> None:
    with pytest.raises(WireError, match="an input's type is 00, 01 or 03"):
        codec.decode_input([kind, b"\x90"])


def test_too_few_frames_are_refused() -> None:
    for frames in ([], [codec.ADD]):
        with pytest.raises(WireError, match=f"this one has {len(frames)} frames"):
            codec.decode_input(frames)
        with pytest.raises(WireError, match="neither READY nor a wave"):
            codec.decode_from_coordinator(frames)
    with pytest.raises(WireError, match="at least one frame"):
        codec.decode_output([])


def test_depth_without_end_is_refused() -> None:
    with pytest.raises(WireError, match="recursion"):
        codec.decode_input([codec.UTILITY, b"\x94\x00\x00\xa0" + b"\x91" * 100_000])


def test_a_length_that_is_a_lie_takes_no_memory() -> None:
    for lie in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            codec.decode_output([b"\x92\x00" + lie])
        with pytest.raises(WireError):
            codec.decode_input([codec.UTILITY, b"\x94\x00\x00\xa0" + lie])


def test_a_routing_id_that_is_no_rank_is_refused() -> None:
    with pytest.raises(WireError, match="has 2 bytes"):
        codec.rank_of(b"\x00abcd")


def test_a_ready_response_may_be_empty_but_not_half() -> None:
    assert codec.decode_ready_response(b"") is None
    with pytest.raises(WireError, match="missing required field `dtype`"):
        codec.decode_ready_response(ready_payload(dtype=None))


def test_a_subscriber_that_says_something_else_is_refused() -> None:
    with pytest.raises(WireError, match="'FIRST_REQ', which is unknown"):
        codec.decode_to_coordinator(encode(["FIRST_REQ", 1]))


@pytest.mark.parametrize("engines", [0, -1, 2**16 + 1, 2**63])
def test_a_number_of_engines_that_have_no_ranks_is_refused(engines) -> None:
    with pytest.raises(WireError, match="there cannot be"):
        codec.decode_to_coordinator(encode(["SCALE_ELASTIC_EP", engines]))


def test_finish_codes_are_the_wires() -> None:
    assert [read_output("r", [], None, None, None, n).finish_reason for n in range(5)] == [
        *FinishCode
    ]


# -- Arrays ----------------------------------------------------------------------------------------


def test_arrays_are_little_endian_whatever_the_machine() -> None:
    assert pack("<i4", (2,), [1, 258]).data.hex() == "0100000002010000"
    assert unpack(Tensor("float32", (2,), bytes.fromhex("0000003f000080bf"))) == (0.5, -1.0)


@pytest.mark.parametrize("numbers", [[2**31], ["x"], [None], [0.5]])
def test_numbers_that_do_not_fit_are_refused(numbers: list[Any]) -> None:
    with pytest.raises(ValueError, match="no <i4"):
        pack("<i4", (1,), numbers)


@pytest.mark.parametrize("shape", [(2,), (0,), (2**40, 2**40), ()])
def test_bytes_must_fit_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="takes") as caught:
        unpack(Tensor("<i8", shape, b"abcd"))
    assert "4 came" in str(caught.value)


def test_an_array_of_a_dtype_we_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'bfloat16'"):
        unpack(Tensor("bfloat16", (2,), b"abcd"))


def test_the_example_of_the_page_runs() -> None:
    page = (Path(dpkit.__file__).parents[1] / "docs" / "wire.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102 - our own page
    assert names["frames"][0] == codec.ADD
