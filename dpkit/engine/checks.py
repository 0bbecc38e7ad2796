"""What an engine does not take: requests that can never be served, and results that do not fit.

Pure functions of the messages, the limits and the model's spec; they know no queue and no block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.errors import ModelFailed

if TYPE_CHECKING:
    from dpkit.abc import Model
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import Batch, GenerateRequest, ModelSpec, StepResult
    from dpkit.sampling import SamplingParams


def find_problem(request: GenerateRequest, limits: EngineLimits, spec: ModelSpec) -> str | None:
    """Why `request` can never be served by an engine of these limits, if so."""
    prompt = request.prompt_token_ids
    if not prompt:
        return "the prompt is empty; give at least one token"
    token_ids = prompt + request.output_token_ids
    if min(token_ids) < 0 or max(token_ids) >= spec.vocab_size:
        found = f"{min(token_ids)} to {max(token_ids)}"
        return f"token ids must be 0 to {spec.vocab_size - 1}, not {found}"
    return _size_problem(request, limits) or _sampling_problem(request.sampling, spec)


def _size_problem(request: GenerateRequest, limits: EngineLimits) -> str | None:
    length, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if (said := len(request.output_token_ids)) >= max_tokens:
        return f"it has {said} output tokens from before, and max_tokens = {max_tokens}"
    asked, longest = length + max_tokens, limits.max_model_len
    sizes = f"{length} prompt tokens and max_tokens = {max_tokens}"
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


def check_result(model: Model, batch: Batch, result: StepResult) -> None:
    """Check that a model gave each row what it asked for: a token, logprobs, or neither.

    Raises:
        ModelFailed: it did not; the message names the model's class.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}.execute()"
    sampled, rows, vocab_size = result.sampled, batch.rows, model.spec.vocab_size
    if len(sampled) != len(rows):
        raise ModelFailed(f"{name} returned {len(sampled)} tokens for {len(rows)} rows")
    for index, (row, token_id) in enumerate(zip(rows, sampled, strict=True)):
        if row.output_index is None:
            if token_id is not None:
                raise ModelFailed(f"{name} sampled row {index}, which ends inside its prompt")
        elif type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ModelFailed(
                f"{name} must sample an int from 0 to {vocab_size - 1} for row {index}, "
                f"not {token_id!r}"
            )
        elif row.sampling.logprobs is not None and index not in result.logprobs:
            raise ModelFailed(f"{name} told no logprob for row {index}, which asks for it")
        told = len(result.prompt_logprobs.get(index, ()))
        if told != len(row.scored):
            raise ModelFailed(
                f"{name} told {told} prompt logprobs for row {index}, not {len(row.scored)}"
            )
