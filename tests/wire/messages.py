"""Messages of every kind and shape, for Hypothesis."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import strategies as st
from msgspec.structs import fields

from dpkit.engine.core import EngineCoreStatistics
from dpkit.messages import (
    EngineId,
    EngineOutput,
    EngineStats,
    GenerateRequest,
    SamplingParams,
    StepReport,
    StepWork,
    TokenLogprob,
)
from dpkit.names import FinishReason
from dpkit.wire.structs import (
    Addresses,
    CoordinatorPublish,
    EngineReport,
    Envelope,
    FinishCode,
    Hello,
    Init,
    LogprobArrays,
    PrefillStats,
    PromptLogprobArrays,
    ReadyResponse,
    RequestError,
    SamplingMap,
    SchedulerStats,
    StartWave,
    UtilityAnswer,
    UtilityCall,
    WireOutput,
    WireRequest,
)
from dpkit.wire.tensors import Tensor

texts = st.text(max_size=20)
counts = st.integers(0, 2**63 - 1)
signed = st.integers(-(2**63), 2**63 - 1)
token_ids = st.integers(0, 2**31 - 1)
several_ids = st.lists(token_ids, max_size=8).map(tuple)
reals = st.floats(allow_nan=False, width=64)
shares = st.floats(0, 1)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
# What no field of dpkit's looks into; arrays inside come back as lists, keys as they were.
opaque: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | signed | reals | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
opaque_maps = st.dictionaries(texts, opaque, max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Or None."""
    return st.none() | strategy


# -- The wire's ------------------------------------------------------------------------------------

tensors = st.builds(
    Tensor,
    st.sampled_from(["<i4", "<f4", "int64", "bfloat16"]),
    st.lists(st.integers(0, 300), max_size=3),
    st.binary(max_size=10) | st.binary(min_size=250, max_size=520),  # inline, or frames
)
sampling_maps = st.builds(
    SamplingMap,
    n=signed,
    temperature=reals,
    top_p=reals,
    top_k=signed,
    min_p=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    repetition_penalty=reals,
    seed=maybe(signed | counts),
    stop_token_ids=maybe(several_ids),
    max_tokens=maybe(counts),
    min_tokens=counts,
    logprobs=maybe(signed),
    prompt_logprobs=maybe(signed),
    eos_token_id=maybe(token_ids),
    logit_bias=maybe(st.dictionaries(token_ids, reals, max_size=4)),
    extra_args=maybe(opaque_maps),
    structured_outputs=maybe(opaque_maps),
    bad_words=maybe(st.lists(texts, max_size=2)),
)
sampling_maps |= st.builds(SamplingMap, ignore_eos=st.booleans())
wire_requests = st.builds(
    WireRequest,
    texts,
    maybe(several_ids | st.lists(token_ids, min_size=200, max_size=300).map(tuple)),
    mm_features=opaque,
    sampling_params=maybe(sampling_maps),
    pooling_params=opaque,
    arrival_time=reals,
    lora_request=opaque,
    cache_salt=maybe(texts),
    data_parallel_rank=maybe(counts),
    prompt_embeds=maybe(tensors),
    client_index=counts,
    current_wave=counts,
    priority=signed,
    trace_headers=maybe(st.dictionaries(texts, texts, max_size=2)),
    resumable=st.booleans(),
    external_req_id=maybe(texts),
    reasoning_ended=maybe(st.booleans()),
    abort_immediately=st.booleans(),
    session_id=maybe(texts),
    kv_hints=maybe(opaque_maps),
)
calls = st.builds(
    UtilityCall, counts, st.integers(0, 2**64 - 1), texts, st.lists(opaque, max_size=3).map(tuple)
)
wire_outputs = st.builds(
    WireOutput,
    texts,
    several_ids,
    maybe(st.builds(LogprobArrays, tensors, tensors, tensors, maybe(opaque))),
    maybe(st.builds(PromptLogprobArrays, tensors, tensors, tensors)),
    finish_reason=maybe(st.sampled_from(FinishCode)),
    stop_reason=maybe(signed | texts),
    events=maybe(st.lists(opaque_maps, max_size=2)),
    prefill_stats=maybe(st.builds(PrefillStats, num_cached_tokens=counts)),
    num_nans_in_logits=counts,
    error=maybe(st.builds(RequestError, code=texts, message=texts, retryable=st.booleans())),
)
engine_reports = st.builds(
    EngineReport,
    **dict.fromkeys(EngineReport.__struct_fields__, counts)
    | {"step_time_s": seconds, "peak_kv_usage": shares, "prefill_context": seconds},
)
scheduler_stats = st.builds(
    SchedulerStats,
    num_running_reqs=counts,
    num_waiting_reqs=counts,
    kv_cache_usage=shares,
    step_counter=counts,
    current_wave=counts,
    iteration_details=opaque,
    waiting_lora_adapters=st.dictionaries(texts, counts, max_size=2),
)
scheduler_stats |= st.builds(SchedulerStats, dpkit=engine_reports)
batches = st.builds(
    Envelope,
    counts,
    st.lists(wire_outputs, min_size=1, max_size=3),
    maybe(scheduler_stats),
    reals,
    finished_requests=maybe(st.lists(texts, max_size=3)),
    weight_version=maybe(texts),
)
envelopes = st.one_of(
    batches,
    st.builds(Envelope, scheduler_stats=scheduler_stats),
    st.builds(Envelope, finished_requests=st.lists(texts, max_size=3)),
    st.builds(
        Envelope,
        utility_output=st.builds(
            UtilityAnswer, signed, maybe(texts), maybe(st.tuples(st.none(), opaque))
        ),
    ),
    st.builds(Envelope, wave_complete=counts),
    st.builds(Envelope, start_wave=counts),
)
hellos = st.builds(
    Hello, status=st.sampled_from(["HELLO", "READY"]), local=st.booleans(), headless=st.booleans()
)
addresses = st.builds(
    Addresses,
    inputs=st.lists(texts, max_size=3).map(tuple),
    outputs=st.lists(texts, max_size=3).map(tuple),
    coordinator_input=maybe(texts),
    coordinator_output=maybe(texts),
    frontend_stats_publish_address=maybe(texts),
)
inits = st.builds(Init, addresses=addresses, parallel_config=opaque_maps)


def _ready(told: Any) -> ReadyResponse:
    return ReadyResponse(**told)


ready_responses = st.fixed_dictionaries(
    {
        field.name: {"int": counts, "str": texts, "bool": st.booleans()}[field.type.__name__]
        for field in fields(ReadyResponse)
        if field.required
    },
    optional={
        "dp_stats_address": maybe(texts),
        "kv_cache_size_tokens": maybe(counts),
        "kv_cache_max_concurrency": maybe(reals),
        "kv_events_config": maybe(opaque_maps),
        "enable_sleep_mode": st.booleans(),
    },
).map(_ready)
publishes = st.builds(
    CoordinatorPublish,
    maybe(st.lists(st.tuples(counts, counts, shares), max_size=4).map(tuple)),
    counts,
    st.booleans(),
)
start_waves = st.builds(StartWave, counts, maybe(counts))


# -- dpkit's ---------------------------------------------------------------------------------------


def _sampling(max_tokens: int, fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)


samplings = st.builds(
    _sampling,
    st.integers(1, 2**31 - 1),
    st.fixed_dictionaries(
        {},
        optional={
            "min_tokens": st.integers(0, 1),
            "temperature": st.floats(0, 100),
            "top_k": token_ids,
            "top_p": st.floats(0, 1, exclude_min=True),
            "min_p": shares,
            "seed": maybe(signed | counts),
            "repetition_penalty": st.floats(0.01, 100),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
            "stop_token_ids": several_ids,
            "ignore_eos": st.booleans(),
            "logprobs": maybe(st.integers(0, 20)),
            "prompt_logprobs": maybe(st.integers(0, 20)),
        },
    ),
)
requests = st.builds(
    GenerateRequest,
    request_id=texts,
    prompt_token_ids=several_ids,
    sampling=samplings,
    cache_salt=texts,
    priority=signed,
    output_token_ids=several_ids,
)

logprobs = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)


@st.composite
def token_logprobs(draw: st.DrawFn, top: int) -> TokenLogprob:
    """What a model tells of a token, beside at most `top` others."""
    return TokenLogprob(
        token_id=draw(token_ids),
        logprob=draw(logprobs),
        rank=draw(st.integers(1, 2**31 - 1)),
        top=draw(st.lists(st.tuples(token_ids, logprobs), max_size=top).map(tuple)),
    )


@st.composite
def outputs(draw: st.DrawFn, *, top: int, prompt_top: int) -> EngineOutput:
    """An output that tells logprobs of its tokens and of a prompt."""
    told = draw(st.lists(token_logprobs(top), max_size=3).map(tuple))
    return EngineOutput(
        request_id=draw(texts),
        token_ids=tuple(logprob.token_id for logprob in told),
        logprobs=told,
        prompt_logprobs=draw(st.lists(token_logprobs(prompt_top), max_size=3).map(tuple)),
        cached_tokens=draw(maybe(counts)),
        finish_reason=draw(
            maybe(st.sampled_from([reason for reason in FinishReason if reason != "error"]))
        ),
    )


stats = st.builds(
    EngineStats,
    engine=st.builds(EngineId, texts, counts),
    index=counts,
    seq=counts,
    waiting=counts,
    running=counts,
    kv_cache_usage=shares,
    current_wave=counts,
    step_counter=counts,
    report=st.builds(
        StepReport,
        step_time_s=seconds,
        unprefilled_tokens=counts,
        scheduled_tokens=counts,
        context_tokens=counts,
        generated_tokens=counts,
        kv_tokens_used=counts,
        kv_tokens=counts,
        last_step=st.builds(
            StepWork,
            decodes=counts,
            prefill_tokens=counts,
            decode_context=counts,
            prefill_context=seconds,
        ),
        sent=counts,
        acknowledged=counts,
    ),
)


def _core(told: Any) -> EngineCoreStatistics:
    return EngineCoreStatistics(**told)


core_statistics = st.fixed_dictionaries(
    {
        field.name: shares if field.name.endswith("_usage") else counts
        for field in attrs.fields(EngineCoreStatistics)
    }
).map(_core)
