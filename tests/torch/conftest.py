"""Models for tests: tiny random ones, and the demo model where it has been fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpkit.messages import GenerateRequest, SamplingParams

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from dpkit.engine.core import EngineCore  # noqa: E402
from dpkit.engine.limits import resolve_limits  # noqa: E402
from dpkit.engine.models.torch import load_torch_model  # noqa: E402
from dpkit.testing.tiny import write_tiny_directory  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dpkit.engine.models.torch.model import TorchModel


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests share the machine with one another."""
    torch.set_num_threads(1)


def _load(path: Path | str, **options: Any) -> TorchModel:
    """In float32 unless told otherwise: exact text is compared in it only."""
    model = load_torch_model(str(path), **({"dtype": "float32"} | options))
    model.threads_per_engine = 1
    return model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    """Random weights; untied, because a tied random model says one token for ever."""
    folder = tmp_path_factory.mktemp("tiny")
    return _load(write_tiny_directory(folder, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def load() -> Callable[..., TorchModel]:
    return _load


@pytest.fixture(scope="session")
def demo_model(demo_path: Path) -> TorchModel:
    """SmolLM2-135M-Instruct, from the Hugging Face directory."""
    return _load(demo_path)


class Engine:
    """One engine core with its cache, run until all requests are answered."""

    def __init__(self, model: TorchModel, **limits: Any) -> None:
        resolved = resolve_limits(model.spec, **({"num_blocks": 256} | limits))
        self.core = EngineCore(model, limits=resolved)
        self.cache = model.allocate(num_blocks=resolved.num_blocks, block_size=resolved.block_size)

    def answer(self, asked: Mapping[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
        """Token ids of each answer, by request id; all requests at once."""
        for request_id, (prompt, sampling) in asked.items():
            self.core.add(
                GenerateRequest(
                    request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling
                )
            )
        answers: dict[str, list[int]] = {request_id: [] for request_id in asked}
        while self.core.has_requests():
            for output in self.core.step(self.cache):
                assert output.error is None
                answers[output.request_id] += output.token_ids
        self.core.check()
        return answers


@pytest.fixture(scope="session")
def make_engine() -> type[Engine]:
    """The class itself: fixtures are how importlib mode shares code."""
    return Engine
