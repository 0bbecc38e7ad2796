"""Requests for engines that are vLLM's own, which know less than dpkit's and trust their frontend.

vLLM's frontend checks a request and completes it: with the tokens that end a text, and within the
ranges that its engines read. An engine that cannot read a request stops listening without a word,
so what is out of those ranges is refused here. Sans-IO; answers are read as dpkit's (`convert`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from dpkit.errors import RequestRejected
from dpkit.sampling import shown
from dpkit.wire.convert import to_wire

if TYPE_CHECKING:
    from collections.abc import Collection

    from dpkit.messages import GenerateRequest
    from dpkit.wire.structs import SamplingMap, WireRequest

HOTTEST = 2.0
"""The highest temperature that vLLM reads."""


def to_vllm(
    request: GenerateRequest,
    *,
    wire_id: str,
    eos_token_ids: Collection[int],
    arrival_time: float,
    current_wave: int = 0,
) -> WireRequest:
    """Write a request for an engine of vLLM's; arguments and errors as `to_wire`.

    Args:
        request: What is asked. Output of an earlier life becomes the end of the prompt, since vLLM
            knows no other way to go on from it.
        wire_id: Unique for the life of the engine.
        eos_token_ids: The model's own end tokens, which the engine is told with every request.
        arrival_time: Unix seconds.
        current_wave: The newest wave the client has heard of.
    """
    wire = to_wire(
        _with_longer_prompt(request),
        wire_id=wire_id,
        current_wave=current_wave,
        arrival_time=arrival_time,
    )
    sampling = wire.sampling_params
    assert sampling is not None  # noqa: S101 - to_wire always writes some
    if sampling.temperature > HOTTEST:
        raise RequestRejected(
            f"cannot serve request: temperature must be at most {HOTTEST:g} for an engine of "
            f"vLLM's, not {shown(sampling.temperature)}",
            request_id=request.request_id,
        )
    _name_ends(sampling, eos_token_ids)
    return wire


def _with_longer_prompt(request: GenerateRequest) -> GenerateRequest:
    said = request.output_token_ids
    if not said:
        return request
    sampling = request.sampling
    return evolve(
        request,
        prompt_token_ids=request.prompt_token_ids + said,
        output_token_ids=(),
        sampling=evolve(
            sampling,
            max_tokens=sampling.max_tokens - len(said),
            min_tokens=max(0, sampling.min_tokens - len(said)),
            prompt_logprobs=None,  # told with the first token, in the life before
        ),
    )


def _name_ends(sampling: SamplingMap, eos_token_ids: Collection[int]) -> None:
    """Say which tokens end the text, and which therefore must not come before `min_tokens`.

    One end token has a field of its own; of several, the others are stop tokens, as vLLM's own
    frontend has it.
    """
    if sampling.seed == -1:  # read as "none"; any other number draws as well
        sampling.seed = 2**64 - 1
    stops = sampling.stop_token_ids or ()
    if not sampling.ignore_eos and eos_token_ids:
        sampling.eos_token_id, *others = sorted(eos_token_ids)
        stops = tuple(dict.fromkeys((*stops, *others)))
        sampling.stop_token_ids = stops or None
        stops = (sampling.eos_token_id, *stops)
    sampling.all_stop_token_ids = tuple(dict.fromkeys(stops))
