"""dpkit's messages cross the wire unchanged; vLLM's are read as vLLM means them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings

from dpkit.errors import (
    DpkitError,
    EngineLost,
    ModelFailed,
    NoEngineReady,
    RequestRejected,
    TryLater,
    WireError,
)
from dpkit.messages import EngineId, EngineOutput, GenerateRequest, SamplingParams, TokenLogprob
from dpkit.names import FinishReason
from dpkit.wire import codec
from dpkit.wire.codec import Add
from dpkit.wire.convert import (
    error_from_wire,
    error_to_wire,
    from_wire,
    output_from_wire,
    output_to_wire,
    to_wire,
)
from dpkit.wire.structs import (
    Envelope,
    FinishCode,
    LogprobArrays,
    PrefillStats,
    RequestError,
    SamplingMap,
    WireOutput,
    WireRequest,
)
from dpkit.wire.tensors import Tensor, pack
from tests.wire import messages
from tests.wire.vectors import VECTORS

ENGINE = EngineId("engine-0", 3)
EOS, USERS = 2, 77


def sent(request: WireRequest) -> WireRequest:
    """A request, after its journey."""
    message = codec.decode_input(codec.encode_input(Add(request)))
    assert isinstance(message, Add)
    return message.request


def answered(output: WireOutput) -> WireOutput:
    """An output, after its journey."""
    envelope = codec.decode_output(codec.encode_envelope(Envelope(outputs=[output])))
    assert isinstance(envelope, Envelope)
    return envelope.outputs[0]


def asked(**sampling: Any) -> WireRequest:
    return WireRequest("r-0", (5,), None, SamplingMap(**sampling), None, 0.0, None, None, None)


def of_vector(name: str) -> WireRequest:
    message = codec.decode_input([codec.ADD, *VECTORS[name].frames])
    assert isinstance(message, Add)
    return message.request


# -- Requests --------------------------------------------------------------------------------------


@given(messages.requests)
def test_what_an_engine_acts_on_crosses_unchanged(request: GenerateRequest) -> None:
    read = from_wire(sent(to_wire(request, wire_id="w-1")))
    assert read == evolve(request, request_id="w-1")


def test_what_the_client_heeds_stays_with_it() -> None:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SamplingParams(stop=("END",), n=3, echo=True),
        engine="engine-1",
        deadline=5.0,
        tenant="me",
        resume=True,
    )
    read = from_wire(sent(to_wire(request, wire_id="r")))
    assert read == GenerateRequest(request_id="r", prompt_token_ids=(1,))


def test_the_users_id_travels_beside_the_wires() -> None:
    request = GenerateRequest(request_id="mine", prompt_token_ids=(1,))
    wire = sent(
        to_wire(request, wire_id="mine-7", client_index=1, current_wave=4, arrival_time=99.5)
    )
    assert (wire.request_id, wire.external_req_id) == ("mine-7", "mine")
    assert (wire.client_index, wire.current_wave, wire.arrival_time) == (1, 4, 99.5)


def test_an_earlier_lifes_output_travels_in_a_key_of_our_own() -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), output_token_ids=(8, 9))
    wire = sent(to_wire(request, wire_id="r"))
    assert wire.sampling_params is not None
    assert wire.sampling_params.extra_args == {"dpkit": {"output_token_ids": [8, 9]}}
    assert from_wire(wire).output_token_ids == (8, 9)
    fresh = to_wire(evolve(request, output_token_ids=()), wire_id="r")
    assert fresh.sampling_params is not None
    assert fresh.sampling_params.extra_args is None


@pytest.mark.parametrize("extra", [{"dpkit": 5}, {"dpkit": {"output_token_ids": ["x"]}}])
def test_a_key_of_our_own_that_makes_no_sense_refuses_the_request(extra: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected, match="cannot serve request: Expected"):
        from_wire(asked(extra_args=extra))


def test_other_peoples_extra_args_are_passed_over() -> None:
    assert from_wire(asked(extra_args={"kv_hint": 1})).output_token_ids == ()


def test_a_bias_named_twice_is_added_twice() -> None:
    sampling = SamplingParams(logit_bias=((5, 1.0), (6, 2.0), (5, 0.5)))
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    read = from_wire(sent(to_wire(request, wire_id="r")))
    assert read.sampling.logit_bias == ((5, 1.5), (6, 2.0))


class Half(float):
    """A float of somebody else's, as NumPy has them."""


def test_subclasses_of_float_cross_as_floats() -> None:
    sampling = SamplingParams(temperature=Half(0.5), logit_bias={1: 3})
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    read = from_wire(sent(to_wire(request, wire_id="r"))).sampling
    assert (read.temperature, read.logit_bias) == (0.5, ((1, 3.0),))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": "hello"},
        {"prompt_token_ids": (1, "x")},
        {"prompt_token_ids": (True,)},
        {"prompt_token_ids": (-1,)},
        {"prompt_token_ids": (2**99,)},
        {"output_token_ids": (2**31,)},
        {"cache_salt": None},
        {"priority": 2**64},
        {"sampling": None},
    ],
)
def test_a_request_of_odd_parts_is_refused_before_it_is_sent(fields: dict[str, Any]) -> None:
    """An engine that met such bytes would have to give up the whole connection."""
    request = evolve(GenerateRequest(request_id="r", prompt_token_ids=(1,)), **fields)
    with pytest.raises(RequestRejected, match="cannot send request") as caught:
        to_wire(request, wire_id="r-1")
    assert caught.value.request_id == "r"


def test_a_priority_that_no_message_holds_is_refused_of_a_checked_request_too() -> None:
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1,), priority=2**63, is_checked=True
    )
    with pytest.raises(RequestRejected, match="priority"):
        to_wire(request, wire_id="r-1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mm_features": [{}]}, "mm_features"),
        ({"pooling_params": [None]}, "pooling_params"),
        ({"lora_request": ["ad", 1, "/lora", None, False, False]}, "lora_request"),
        ({"prompt_embeds": Tensor("float32", (0, 4), b"")}, "prompt_embeds"),
        ({"resumable": True}, "resumable"),
        ({"prompt_token_ids": None}, "no prompt_token_ids"),
        ({"sampling_params": None}, "no sampling_params"),
    ],
)
def test_requests_that_dpkit_cannot_serve_are_refused(changes: dict[str, Any], said: str) -> None:
    request = asked()
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(RequestRejected, match=said) as caught:
        from_wire(request)
    assert caught.value.request_id == "r-0"


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"n": 2}, "n must be 1"),
        ({"n": 0}, "n must be 1"),
        ({"max_tokens": None}, "no max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"min_tokens": 17}, "min_tokens must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"logprobs": -1}, "logprobs must be"),
        ({"logprobs": 21}, "logprobs must be"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
        ({"stop_token_ids": (2**32 - 1,)}, "stop_token_ids must be"),
        ({"eos_token_id": -1}, "stop_token_ids must be"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must"),
        ({"structured_outputs": {"regex": "a+"}}, "does not do structured_outputs"),
        ({"allowed_token_ids": [5]}, "does not do allowed_token_ids"),
        ({"bad_words": ["bad"]}, "does not do bad_words"),
        ({"bad_words_token_ids": [[5]]}, "does not do bad_words_token_ids"),
        ({"logprob_token_ids": [5]}, "does not do logprob_token_ids"),
        ({"prompt_logprob_token_ids": [5]}, "does not do prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 3}, "does not do prompt_logprob_start"),
        ({"thinking_token_budget": 9}, "does not do thinking_token_budget"),
        ({"repetition_detection": {"max": 1}}, "does not do repetition_detection"),
    ],
)
def test_sampling_that_dpkit_cannot_do_is_refused(sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestRejected, match=f"cannot serve request: .*{said}"):
        from_wire(sent(asked(**sampling)))


def test_absent_sampling_keys_are_vllms_defaults() -> None:
    sampling = from_wire(sent(asked())).sampling
    assert sampling == SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)


def test_empty_lists_ask_for_nothing() -> None:
    request = sent(asked(bad_words=[], allowed_token_ids=[], logprob_token_ids=[], top_k=-1))
    assert from_wire(request).sampling.top_k == 0


def test_a_request_of_vllms_rust_frontend_is_read_as_it_means_it() -> None:
    request = from_wire(of_vector("rust_request_1"))
    assert request == GenerateRequest(
        request_id="cmpl-1626e104-e0522f5b",
        prompt_token_ids=(10, 11),
        sampling=SamplingParams(
            temperature=0.699999988079071,
            top_p=0.8999999761581421,
            top_k=5,
            seed=42,
            max_tokens=3,
            min_tokens=2,
            presence_penalty=0.5,
            stop_token_ids=(77,),
            logit_bias={5: 1.5},
            ignore_eos=True,
        ),
        cache_salt="salt",
        priority=3,
    )


# -- What ends a text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "stop_token_ids", "ignore_eos"),
    [
        ({"ignore_eos": False}, (), False),  # dpkit's client: the engine's own end tokens
        ({"ignore_eos": True}, (), True),
        ({"eos_token_id": EOS}, (EOS,), False),  # vLLM's: those, and the one it names
        ({"eos_token_id": EOS, "stop_token_ids": (USERS,)}, (USERS, EOS), False),
        ({"eos_token_id": EOS, "ignore_eos": False}, (EOS,), False),
        ({"eos_token_id": EOS, "ignore_eos": True}, (), True),
        ({}, (), True),  # none named: so it was told to ignore them
        ({"stop_token_ids": (USERS,)}, (USERS,), True),
    ],
)
def test_end_tokens(
    sampling: dict[str, Any], stop_token_ids: tuple[int, ...], ignore_eos: bool
) -> None:
    read = from_wire(sent(asked(**sampling))).sampling
    assert (read.stop_token_ids, read.ignore_eos) == (stop_token_ids, ignore_eos)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_dpkits_client_always_says_whether_end_tokens_count(ignore_eos: bool) -> None:
    sampling = SamplingParams(ignore_eos=ignore_eos)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    wire = sent(to_wire(request, wire_id="r")).sampling_params
    assert wire is not None
    assert wire.ignore_eos is ignore_eos
    assert wire.eos_token_id is None


@pytest.mark.parametrize(
    ("last", "finish", "reason"),
    [
        (USERS, FinishReason.STOP, USERS),
        (EOS, FinishReason.STOP, None),  # the end token is no stop reason, even if listed
        (9, FinishReason.STOP, None),  # another end token of the model's
        (USERS, FinishReason.LENGTH, None),
        (USERS, None, None),
    ],
)
def test_the_stop_reason_is_the_stop_token(
    last: int, finish: FinishReason | None, reason: int | None
) -> None:
    request = asked(stop_token_ids=(USERS, EOS), eos_token_id=EOS)
    output = EngineOutput(request_id="r-0", token_ids=(1, last), finish_reason=finish)
    assert output_to_wire(output, request).stop_reason == reason


# -- Outputs ---------------------------------------------------------------------------------------


@given(messages.outputs(top=3, prompt_top=2))
@settings(max_examples=60)
def test_outputs_cross_unchanged_with_their_logprobs(output: EngineOutput) -> None:
    request = asked(logprobs=3, prompt_logprobs=2)
    assert output_from_wire(answered(output_to_wire(output, request)), request) == output


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (FinishCode.STOP, FinishReason.STOP),
        (FinishCode.LENGTH, FinishReason.LENGTH),
        (FinishCode.ABORT, FinishReason.ABORT),
        (FinishCode.ERROR, FinishReason.ERROR),
        (FinishCode.REPETITION, FinishReason.STOP),
    ],
)
def test_finish_codes(code: FinishCode, reason: FinishReason) -> None:
    read = output_from_wire(WireOutput("r", (), finish_reason=code), asked())
    assert read.finish_reason is reason
    written = output_to_wire(EngineOutput(request_id="r", finish_reason=reason), asked())
    assert written.finish_reason is (FinishCode.STOP if code == FinishCode.REPETITION else code)


def test_an_output_is_given_the_clients_own_id() -> None:
    read = output_from_wire(WireOutput("w-1", (4,)), asked(), request_id="mine")
    assert (read.request_id, read.token_ids) == ("mine", (4,))


def test_only_the_logprobs_that_were_asked_for_are_read() -> None:
    told = TokenLogprob(token_id=4, logprob=-1.0, rank=2, top=((3, -0.5), (4, -1.0), (5, -2.0)))
    output = EngineOutput(request_id="r", token_ids=(4,), logprobs=(told,), prompt_logprobs=(told,))
    wire = answered(output_to_wire(output, asked()))
    assert output_from_wire(wire, asked()) == EngineOutput(request_id="r", token_ids=(4,))
    read = output_from_wire(wire, asked(logprobs=1, prompt_logprobs=0))
    assert read.logprobs == (evolve(told, top=((3, -0.5),)),)
    assert read.prompt_logprobs == (evolve(told, top=()),)


def test_logprobs_are_written_as_vllm_has_them() -> None:
    told = TokenLogprob(token_id=42, logprob=-0.5, rank=1, top=((7, -1.0), (8, -2.0)))
    output = EngineOutput(request_id="r-0", token_ids=(42,), logprobs=(told,))
    expected = codec.decode_output(VECTORS["outputs_logprobs_inline"].frames)
    assert isinstance(expected, Envelope)
    assert output_to_wire(output, asked()) == expected.outputs[0]


def test_prompt_logprobs_are_written_as_vllm_has_them() -> None:
    told = TokenLogprob(token_id=1, logprob=-1.0, rank=1, top=((2, -2.0),))
    output = EngineOutput(request_id="r-0", prompt_logprobs=(told,))
    expected = codec.decode_output(VECTORS["outputs_prompt_logprobs"].frames)
    assert isinstance(expected, Envelope)
    assert output_to_wire(output, asked()) == expected.outputs[0]


def test_what_a_prompt_found_in_the_cache_is_told_as_vllm_tells_it() -> None:
    vllms = codec.decode_output(VECTORS["outputs_first_token_events"].frames)
    assert isinstance(vllms, Envelope)
    assert output_from_wire(vllms.outputs[0], asked()).cached_tokens == 0
    output = EngineOutput(request_id="r-0", token_ids=(42,), cached_tokens=2)
    told = output_to_wire(output, of_vector("request_minimal")).prefill_stats
    assert told == PrefillStats(
        num_prompt_tokens=3, num_computed_tokens=1, num_cached_tokens=2, num_local_cached_tokens=2
    )
    assert output_to_wire(EngineOutput(request_id="r-0"), asked()).prefill_stats is None


def test_logprobs_of_numpys_and_torchs_dtypes_are_read_alike() -> None:
    for whole, real in (("<i4", "<f4"), ("<i8", "<f8"), ("int32", "float16"), ("int64", "<f2")):
        arrays = LogprobArrays(
            pack(whole, (1, 2), [4, 5]), pack(real, (1, 2), [-0.5, -1]), pack(whole, (1,), [1])
        )
        read = output_from_wire(WireOutput("r", (4,), arrays), asked(logprobs=1))
        assert read.logprobs == (TokenLogprob(token_id=4, logprob=-0.5, rank=1, top=((5, -1.0),)),)


IDS, VALUES, RANKS = (
    pack("<i4", (1, 2), [4, 5]),
    pack("<f4", (1, 2), [-1, -2]),
    pack("<i4", (1,), [1]),
)
EMPTY = Tensor("<i4", (2**40, 0), b"")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (LogprobArrays(VALUES, VALUES, RANKS), "token ids and ranks are whole numbers, not <f4"),
        (LogprobArrays(IDS, VALUES, VALUES), "logprobs of different shapes: LogprobArrays"),
        (LogprobArrays(IDS, VALUES, IDS), "logprobs of different shapes: LogprobArrays"),
        (LogprobArrays(IDS, RANKS, RANKS), "logprobs of different shapes: LogprobArrays"),
        (LogprobArrays(RANKS, RANKS, RANKS), r"logprobs have a row a token, not shape \(1,\)"),
        (LogprobArrays(EMPTY, EMPTY, RANKS), "logprobs have a row a token, not shape"),
        (
            LogprobArrays(IDS, Tensor("<f4", (1, 2), b"short"), RANKS),
            "cannot read logprobs: .*5 came",
        ),
        (LogprobArrays(pack("<i4", (1, 2), [4, -5]), VALUES, RANKS), "ranks are 0 to 2147483647"),
        (LogprobArrays(Tensor("bfloat16", (1, 2), b"abcd"), VALUES, RANKS), "dtype 'bfloat16'"),
        (None, "has 0 logprobs for 1 token"),
    ],
)
def test_logprobs_that_do_not_fit_are_refused(arrays: LogprobArrays | None, message: str) -> None:
    with pytest.raises(WireError, match=message):
        output_from_wire(WireOutput("r", (4,), arrays), asked(logprobs=1))


def test_logprobs_are_one_a_token() -> None:
    wire = WireOutput("r", (4, 5), LogprobArrays(IDS, VALUES, RANKS))
    with pytest.raises(WireError, match="1 logprobs for 2 tokens"):
        output_from_wire(wire, asked(logprobs=1))


@pytest.mark.parametrize(
    "odd", [{"logprob": "x"}, {"token_id": 2**40}, {"rank": None}, {"top": ((1,),)}]
)
def test_a_model_that_tells_no_numbers_is_named_as_the_culprit(odd: dict[str, Any]) -> None:
    told = evolve(TokenLogprob(token_id=4, logprob=-1.0, rank=1), **odd)
    with pytest.raises(ModelFailed, match="logprobs that cannot be sent"):
        output_to_wire(EngineOutput(request_id="r", logprobs=(told,)), asked())


# -- Errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (RequestRejected("too long"), "validation_error", False),
        (EngineLost("gone"), "engine_lost", True),
        (NoEngineReady("not yet"), "internal_error", True),
        (ModelFailed("what"), "internal_error", False),
        (ZeroDivisionError("oh"), "internal_error", False),
    ],
)
def test_errors_are_written_by_what_a_frontend_makes_of_them(
    error: Exception, code: str, retryable: bool
) -> None:
    written = error_to_wire(error)
    assert (written.code, written.retryable) == (code, retryable)
    assert str(error) in written.message


@pytest.mark.parametrize("kind", [RequestRejected, EngineLost])
def test_errors_that_dpkit_knows_come_back_as_they_were(kind: type[DpkitError]) -> None:
    output = EngineOutput(request_id="r", finish_reason=FinishReason.ERROR, error=kind("why"))
    wire = answered(output_to_wire(output, asked()))
    read = output_from_wire(wire, asked(), request_id="mine", engine=ENGINE)
    assert read.finish_reason is FinishReason.ERROR
    error = read.error
    assert isinstance(error, kind)
    assert (str(error), error.engine, error.request_id) == ("why", ENGINE, "mine")


def test_other_errors_say_whether_to_try_again() -> None:
    paused = error_from_wire(RequestError(code="engine_paused", message="wait", retryable=True))
    assert isinstance(paused, TryLater)
    assert str(paused) == "engine_paused: wait"
    other = error_from_wire(RequestError(code="oops", message="no"))
    assert (other.http_status, other.retryable, str(other)) == (500, False, "oops: no")


def test_an_error_that_does_not_say_which_is_an_error_all_the_same() -> None:
    wire = WireOutput("r", (), finish_reason=FinishCode.ERROR)
    read = output_from_wire(wire, asked())
    assert "does not say which" in str(read.error)
    stray = WireOutput("r", (), error=RequestError(code="x", message="y"))
    assert output_from_wire(stray, asked()).error is None


def test_an_error_message_of_any_text_can_be_sent() -> None:
    output = EngineOutput(
        request_id="r", finish_reason=FinishReason.ERROR, error=RequestRejected("\ud800!")
    )
    read = output_from_wire(answered(output_to_wire(output, asked())), asked())
    assert str(read.error) == "\\ud800!"
