"""A text that goes on in another engine is the text of an undisturbed run, seeds and all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpkit.messages import GenerateRequest
from dpkit.sampling import SamplingParams

if TYPE_CHECKING:
    from dpkit.engine.models.torch.model import TorchModel

PROMPT = (5, 9, 200, 31, 7)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.1, "seed": 3, "top_p": 0.95},
    "penalised": {
        "temperature": 0.8,
        "seed": 4,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "min-tokens": {
        "temperature": 1.0,
        "seed": 5,
        "min_tokens": 12,
        "stop_token_ids": range(3, 200),
    },
}


def go_on(engine: Any, sampling: SamplingParams, before: list[int]) -> list[int]:
    """What the engine says after `before`."""
    engine.core.add(
        GenerateRequest(
            request_id="r",
            prompt_token_ids=PROMPT,
            sampling=sampling,
            output_token_ids=tuple(before),
        )
    )
    said: list[int] = []
    while engine.core.has_requests():
        for output in engine.core.step(engine.cache):
            said += output.token_ids
    engine.core.check()
    return said


@pytest.mark.parametrize("name", SAMPLINGS)
def test_wherever_it_was_cut_the_text_is_that_of_an_undisturbed_run(
    tiny_model: TorchModel, make_engine: Any, name: str
) -> None:
    sampling = SamplingParams(**({"max_tokens": 16, "ignore_eos": True} | SAMPLINGS[name]))
    whole = go_on(make_engine(tiny_model), sampling, [])
    assert len(whole) > 12
    for cut in range(1, len(whole)):
        other = make_engine(tiny_model, max_num_batched_tokens=4, block_size=4)
        assert go_on(other, sampling, whole[:cut]) == whole[cut:]
