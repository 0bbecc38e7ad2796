"""What an engine does not take: requests that can never be served, and results that do not fit.

Pure functions of the messages, the limits and the model's spec; they know no queue and no block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dpkit.engine.foreign import name_of
from dpkit.errors import ModelFailed, plural
from dpkit.messages import SamplingParams, StepResult, TokenLogprob
from dpkit.sampling import shown

if TYPE_CHECKING:
    from dpkit.abc import Model
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import Batch, BatchRow, GenerateRequest, ModelSpec


def find_problem(request: GenerateRequest, limits: EngineLimits, spec: ModelSpec) -> str | None:
    """Why `request` can never be served by an engine of these limits, if so.

    Never raises, whatever the request holds: clients may be anybody's.
    """
    return (
        _type_problem(request, spec)
        or _history_problem(request)
        or size_problem(request, limits)
        or _sampling_problem(request.sampling, spec)
    )


def _type_problem(request: GenerateRequest, spec: ModelSpec) -> str | None:
    for name, kind in (
        ("sampling", SamplingParams),
        ("cache_salt", str),
        ("prompt_token_ids", tuple),
        ("output_token_ids", tuple),
    ):
        value: object = getattr(request, name)
        if not isinstance(value, kind):
            return f"{name} must be a {kind.__name__}, not {type(value).__name__}"
        if isinstance(value, tuple) and (problem := _token_problem(name, value, spec.vocab_size)):
            return problem
    if not request.prompt_token_ids:
        return "the prompt is empty; give at least one token"
    return None


def _token_problem(name: str, token_ids: tuple[int, ...], vocab_size: int) -> str | None:
    # Not `isinstance`: True would pass for a token, and numpy's ints don't keep their range.
    if strange := set(map(type, token_ids)) - {int}:
        return f"{name} must hold ints, not {strange.pop().__name__}"
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        found = [shown(each) for each in dict.fromkeys((min(token_ids), max(token_ids)))]
        return f"token ids must be 0 to {vocab_size - 1}, not {' to '.join(found)}"
    return None


def _history_problem(request: GenerateRequest) -> str | None:
    max_tokens = request.sampling.max_tokens
    if (said := len(request.output_token_ids)) >= max_tokens:
        tokens = plural(said, "output token")
        return f"it has {tokens} from before, and max_tokens = {max_tokens}"
    return None


def size_problem(request: GenerateRequest, limits: EngineLimits) -> str | None:
    """By how much `request` is too long for an engine of these limits, if it is."""
    length, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    asked, longest = length + max_tokens, limits.max_model_len
    sizes = f"{plural(length, 'prompt token')} and max_tokens = {max_tokens}"
    if longest is not None and asked > longest:
        return f"{sizes} are {asked - longest} more than the model's {longest} positions"
    # The token sampled last is never computed, so it needs no room.
    if (excess := asked - 1 - limits.kv_tokens) > 0:
        return (
            f"{sizes} need room for {asked - 1} tokens, {excess} more than the KV cache's "
            f"{limits.kv_tokens} ({limits.num_blocks} blocks)"
        )
    return None


def _sampling_problem(sampling: SamplingParams, spec: ModelSpec) -> str | None:
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
    }
    for name, token_ids in named.items():
        if token_ids and max(token_ids) >= spec.vocab_size:
            return f"{name} must name tokens 0 to {spec.vocab_size - 1}, not {max(token_ids)}"
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not spec.tells_logprobs:
            return f"{name} was asked for, and this model tells none; leave it out"
    return None


def check_duration(model: Model, result: object) -> None:
    """Check that a step's result is one and says how long the step lasts.

    Raises:
        ModelFailed: it is not; the message names the model's class.
    """
    name = name_of(model, "execute")
    if not isinstance(result, StepResult):
        raise ModelFailed(f"{name} must return a StepResult, not {type(result).__name__}")
    duration: object = result.duration_s
    if isinstance(duration, bool) or not (
        isinstance(duration, int | float) and 0 <= duration < math.inf
    ):
        raise ModelFailed(f"{name} must say a duration_s from 0 on, not {shown(duration)}")


def check_result(model: Model, batch: Batch, result: StepResult) -> None:
    """Check that a model gave each row what it asked for: a token, logprobs, or neither.

    Raises:
        ModelFailed: it did not; the message names the model's class.
    """
    name = name_of(model, "execute")
    rows, vocab_size = batch.rows, model.spec.vocab_size
    _check_kinds(name, result)
    sampled = result.sampled
    if len(sampled) != len(rows):
        raise ModelFailed(f"{name} returned {len(sampled)} tokens for {len(rows)} rows")
    for index, (row, token_id) in enumerate(zip(rows, sampled, strict=True)):
        if row.output_index is None:
            if token_id is not None:
                raise ModelFailed(f"{name} sampled row {index}, which ends inside its prompt")
        elif type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ModelFailed(
                f"{name} must sample an int from 0 to {vocab_size - 1} for row {index}, "
                f"not {shown(token_id)}"
            )
        elif row.sampling.logprobs is not None:
            _check_logprobs(name, index, [result.logprobs.get(index)])
        if row.scored or result.prompt_logprobs:
            _check_scored(name, index, row, result.prompt_logprobs.get(index, ()))


def _check_kinds(name: str, result: StepResult) -> None:
    for part, kind in (("sampled", Sequence), ("logprobs", Mapping), ("prompt_logprobs", Mapping)):
        value: object = getattr(result, part)
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            noun = kind.__name__.lower()
            raise ModelFailed(f"{name} must give `{part}` as a {noun}, not {type(value).__name__}")


def _check_scored(name: str, index: int, row: BatchRow, told: object) -> None:
    if not isinstance(told, Sequence):
        kind = type(told).__name__
        raise ModelFailed(f"{name} must tell prompt logprobs as a sequence, not {kind}")
    if len(told) != len(row.scored):
        raise ModelFailed(
            f"{name} told {len(told)} prompt logprobs for row {index}, not {len(row.scored)}"
        )
    _check_logprobs(name, index, told)


def _check_logprobs(name: str, index: int, told: Sequence[object]) -> None:
    for logprob in told:
        if logprob is None:
            raise ModelFailed(f"{name} told no logprob for row {index}, which asks for it")
        if not isinstance(logprob, TokenLogprob):
            kind = type(logprob).__name__
            raise ModelFailed(f"{name} must tell row {index} a TokenLogprob, not {kind}")
