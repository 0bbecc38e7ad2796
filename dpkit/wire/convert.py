"""dpkit's own messages as the wire has them, and back: requests, outputs and errors.

The two differ in what they know: the wire has no deadline, tenant or stop string (the client
watches those), and dpkit has no images, adapters or grammars, which are refused. Between two sides
of dpkit everything an engine acts on arrives as it was sent. Sans-IO; knows no bytes (`codec`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct

from dpkit.errors import (
    DpkitError,
    EngineLost,
    RequestRejected,
    TryLater,
    WireError,
    describe,
    reason,
)
from dpkit.messages import EngineOutput, GenerateRequest, SamplingParams
from dpkit.names import FinishReason
from dpkit.sampling import shown
from dpkit.wire.logprobs import arrays_of_output, arrays_of_prompt, told_by
from dpkit.wire.structs import (
    FinishCode,
    PrefillStats,
    RequestError,
    SamplingMap,
    TokenIds,
    WireOutput,
    WireRequest,
)

if TYPE_CHECKING:
    from dpkit.messages import EngineId, TokenLogprob

T = TypeVar("T")

_OWN = "dpkit"  # the key of `extra_args` under which dpkit's client tells dpkit's engines more

_CODES = {
    FinishReason.STOP: FinishCode.STOP,
    FinishReason.LENGTH: FinishCode.LENGTH,
    FinishReason.ABORT: FinishCode.ABORT,
    FinishReason.ERROR: FinishCode.ERROR,
}
_REASONS = {code: reason for reason, code in _CODES.items()} | {
    FinishCode.REPETITION: FinishReason.STOP  # the engine found that the text goes round in circles
}

_RETRY_AFTER_S = 1.0  # the wire says "later" without saying when; as long as most requests run

# What would change the text or the answer if it was passed over. The rest concerns the frontend.
_UNSUPPORTED = ("mm_features", "pooling_params", "lora_request", "prompt_embeds", "resumable")
_UNSUPPORTED_SAMPLING = (
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "bad_words_token_ids",
    "thinking_token_budget",
    "repetition_detection",
)


# -- Requests --------------------------------------------------------------------------------------


class _Resumed(Struct):
    """What dpkit's client adds: output of an earlier life."""

    output_token_ids: tuple[int, ...] = ()


class _Plain(Struct):
    """The parts of a request that nobody has checked yet, if it was not made by `Client`."""

    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    cache_salt: str
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def to_wire(
    request: GenerateRequest,
    *,
    wire_id: str,
    client_index: int = 0,
    current_wave: int = 0,
    arrival_time: float = 0.0,
) -> WireRequest:
    """Write a request for an engine.

    Args:
        request: What is asked. Its pin, deadline, tenant and `resume` are for the client to heed.
        wire_id: Unique for the life of the engine; the request's own id travels beside it.
        client_index: Where in the engine's list of frontends the answers go.
        current_wave: The newest wave the client has heard of.
        arrival_time: Unix seconds.

    Raises:
        RequestRejected: a part of the request is of a type that no message holds.
    """
    plain = request if _is_plain(request) else _checked(request)
    resumed = {_OWN: {"output_token_ids": plain.output_token_ids}}
    return WireRequest(
        request_id=wire_id,
        prompt_token_ids=plain.prompt_token_ids,
        mm_features=None,
        sampling_params=_sampling_to_wire(
            request.sampling, resumed if plain.output_token_ids else None
        ),
        pooling_params=None,
        arrival_time=arrival_time,
        lora_request=None,
        cache_salt=plain.cache_salt or None,
        data_parallel_rank=None,
        client_index=client_index,
        current_wave=current_wave,
        priority=plain.priority,
        external_req_id=request.request_id,
    )


def _is_plain(request: GenerateRequest) -> bool:
    return request.is_checked and -(2**63) <= request.priority < 2**63


def _checked(request: GenerateRequest) -> _Plain:
    sampling: object = request.sampling
    if not isinstance(sampling, SamplingParams):
        raise RequestRejected(
            f"cannot send request: sampling must be SamplingParams, not {shown(sampling)}",
            request_id=request.request_id,
        )
    try:
        return msgspec.convert(request, _Plain, from_attributes=True)
    except msgspec.ValidationError as error:
        raise RequestRejected(
            f"cannot send request: {error}", request_id=request.request_id
        ) from error


def _sampling_to_wire(sampling: SamplingParams, extra_args: dict[str, Any] | None) -> SamplingMap:
    """Write what an engine acts on: stop strings, `echo` and `n` are the client's affair."""
    bias: dict[int, float] = {}
    for token_id, value in sampling.logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + value  # a token named twice gets both
    # Subclasses of float, such as NumPy's, pass for floats everywhere but on the wire.
    return SamplingMap(
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        repetition_penalty=float(sampling.repetition_penalty),
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=sampling.top_k,
        min_p=float(sampling.min_p),
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids or None,
        ignore_eos=sampling.ignore_eos,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logit_bias=bias or None,
        extra_args=extra_args,
    )


def from_wire(wire: WireRequest) -> GenerateRequest:
    """Read a request, whose id is then the wire's.

    Raises:
        RequestRejected: it asks for what a dpkit engine does not do, or a value is out of range.
    """
    sampling = wire.sampling_params
    try:
        _refuse(wire, _UNSUPPORTED)
        _refuse(sampling, _UNSUPPORTED_SAMPLING)
        return GenerateRequest(
            request_id=wire.request_id,
            prompt_token_ids=_there(wire.prompt_token_ids, "prompt_token_ids"),
            sampling=_sampling_from_wire(_there(sampling, "sampling_params")),
            cache_salt=wire.cache_salt or "",
            priority=wire.priority,
            output_token_ids=_resumed(sampling),
        )
    except ValueError as error:
        raise RequestRejected(
            f"cannot serve request: {error}", request_id=wire.request_id
        ) from error


def _there(part: T | None, name: str) -> T:
    if part is None:
        raise ValueError(f"it has no {name}")
    return part


def _refuse(asked: object, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(asked, name, None):
            raise ValueError(f"this engine does not do {name}; leave it out")


def _sampling_from_wire(sampling: SamplingMap) -> SamplingParams:
    if sampling.n != 1:
        raise ValueError(f"n must be 1 on the way to an engine, not {sampling.n}")
    stop_token_ids, ignore_eos = _ends(sampling)
    return SamplingParams(
        max_tokens=_there(sampling.max_tokens, "max_tokens"),
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=0 if sampling.top_k == -1 else sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _ends(sampling: SamplingMap) -> tuple[tuple[int, ...], bool]:
    """Stop tokens, and whether the model's own end tokens are ignored.

    A foreign frontend knows the end token and names it; if it names none, it was told to ignore it
    (vLLM's Rust frontend says it so). dpkit's client leaves the end tokens to the engine, which
    knows them all, and so always says `ignore_eos`.
    """
    stop_token_ids = sampling.stop_token_ids or ()
    if sampling.ignore_eos is True:
        return stop_token_ids, True
    if sampling.eos_token_id is None:
        return stop_token_ids, sampling.ignore_eos is UNSET
    return (*stop_token_ids, sampling.eos_token_id), False


def _resumed(sampling: SamplingMap | None) -> tuple[int, ...]:
    extra = None if sampling is None else sampling.extra_args
    if not extra or _OWN not in extra:
        return ()
    return msgspec.convert(extra[_OWN], _Resumed).output_token_ids


# -- Outputs ---------------------------------------------------------------------------------------


def output_to_wire(output: EngineOutput, asked: WireRequest) -> WireOutput:
    """Write what a step added to a request.

    Args:
        output: Of the engine; its id is the wire's.
        asked: The request, as it came.

    Raises:
        ModelFailed: a model told logprobs that are no numbers.
    """
    finish = output.finish_reason
    return WireOutput(
        request_id=output.request_id,
        new_token_ids=output.token_ids,
        new_logprobs=arrays_of_output(output.logprobs),
        new_prompt_logprobs_tensors=arrays_of_prompt(output.prompt_logprobs),
        finish_reason=None if finish is None else _CODES[finish],
        stop_reason=_stop_reason(output, asked) if finish is FinishReason.STOP else None,
        prefill_stats=None if output.cached_tokens is None else _prefilled(output, asked),
        error=None if output.error is None else error_to_wire(output.error),
    )


def _prefilled(output: EngineOutput, asked: WireRequest) -> PrefillStats:
    """Where the KV of the prompt came from; what a cache keeps of it is not counted here."""
    prompt, cached = len(asked.prompt_token_ids or ()), output.cached_tokens or 0
    return PrefillStats(
        num_prompt_tokens=prompt,
        num_computed_tokens=prompt - cached,
        num_cached_tokens=cached,
        num_local_cached_tokens=cached,
    )


def _stop_reason(output: EngineOutput, asked: WireRequest) -> int | None:
    """The stop token that ended the text; an end token is none."""
    sampling = asked.sampling_params
    if sampling is None or not output.token_ids:
        return None
    last = output.token_ids[-1]
    is_named = last in (sampling.stop_token_ids or ()) and last != sampling.eos_token_id
    return last if is_named else None


def output_from_wire(
    wire: WireOutput,
    asked: WireRequest,
    *,
    request_id: str | None = None,
    engine: EngineId | None = None,
) -> EngineOutput:
    """Read what a step added to a request.

    Args:
        wire: Of the engine.
        asked: The request, as it was sent. vLLM's engines tell as many logprobs of each token as
            any request of the step asked for: what this one did not ask for is left out.
        request_id: The client's own id; None: the wire's.
        engine: Who sent it; an error names it.

    Raises:
        WireError: its logprobs cannot be read, or are not one a token where they were asked for.
    """
    request_id = wire.request_id if request_id is None else request_id
    finish = None if wire.finish_reason is None else _REASONS[wire.finish_reason]
    sampling, prompt = asked.sampling_params, wire.new_prompt_logprobs_tensors
    told: tuple[TokenLogprob, ...] = ()
    told_of_prompt: tuple[TokenLogprob, ...] = ()
    if sampling is not None and sampling.logprobs is not None:
        told = _told(wire, sampling.logprobs)
    if sampling is not None and sampling.prompt_logprobs is not None and prompt is not None:
        told_of_prompt = told_by(prompt, sampling.prompt_logprobs)
    failed, prefilled = finish is FinishReason.ERROR, wire.prefill_stats
    return EngineOutput(
        request_id=request_id,
        token_ids=wire.new_token_ids,
        logprobs=told,
        prompt_logprobs=told_of_prompt,
        cached_tokens=None if prefilled is None else prefilled.num_cached_tokens,
        finish_reason=finish,
        error=error_from_wire(wire.error, engine=engine, request_id=request_id) if failed else None,
    )


def _told(wire: WireOutput, top: int) -> tuple[TokenLogprob, ...]:
    arrays, expected = wire.new_logprobs, len(wire.new_token_ids)
    told = () if arrays is None else told_by(arrays, top)
    if len(told) != expected:
        raise WireError(
            f"an output of {wire.request_id} has {len(told)} logprobs for {expected} tokens"
        )
    return told


def error_to_wire(error: Exception) -> RequestError:
    """Write why a request failed."""
    said = _words_of(error)
    message = said.encode(errors="backslashreplace").decode()  # half a character cannot be sent
    if isinstance(error, RequestRejected):
        return RequestError(code="validation_error", message=message)
    if isinstance(error, EngineLost):
        return RequestError(code="engine_lost", message=message, retryable=True)
    retryable = isinstance(error, DpkitError) and error.retryable
    return RequestError(code="internal_error", message=message, retryable=retryable)


def _words_of(error: Exception) -> str:
    if isinstance(error, EngineLost) and error.__cause__ is not None:
        # Whoever reads it has another name for the request than this end knows, and others yet.
        return f"engine {error.engine} is lost: {reason(error.__cause__)}"
    return str(error) if isinstance(error, DpkitError) else describe(error)


def error_from_wire(
    error: RequestError | None, *, engine: EngineId | None = None, request_id: str | None = None
) -> DpkitError:
    """Read why a request failed; None: the engine does not say."""
    if error is None:
        message = "the engine ended the request with an error, and does not say which"
        return DpkitError(message, engine=engine, request_id=request_id)
    if error.code == "validation_error":
        return RequestRejected(error.message, engine=engine, request_id=request_id)
    if error.code == "engine_lost":
        return EngineLost(error.message, engine=engine, request_id=request_id)
    message = f"{error.code}: {error.message}"
    if error.retryable:
        return TryLater(message, retry_after=_RETRY_AFTER_S, engine=engine, request_id=request_id)
    return DpkitError(message, engine=engine, request_id=request_id)
