"""Engines small enough to reason about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.abc import Model


def _make_core(model: Model | None = None, **limits: Any) -> EngineCore:
    defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 64}
    return EngineCore(model or EchoModel(), limits=EngineLimits(**(defaults | limits)))


def _ask(request_id: str, prompt: int | tuple[int, ...] = 4, **sampling: Any) -> GenerateRequest:
    """Ask for endless echo; a prompt given by its length is one that no other request shares."""
    if isinstance(prompt, int):
        first = sum(request_id.encode()) % 256
        prompt = tuple((first + i * (1 + first % 7)) % 256 for i in range(prompt))
    sampling = {"max_tokens": 8, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(**sampling)
    )


@pytest.fixture
def make_core() -> Callable[..., EngineCore]:
    return _make_core


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    return _ask
