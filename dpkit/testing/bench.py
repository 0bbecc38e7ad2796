"""One engine core with a model's cache, stepped by hand: where `check_model` tries a model.

Knows nothing of what the texts should be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.engine.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import Model
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import EngineOutput, GenerateRequest, StepResult
    from dpkit.testing.rules import Subject

MOST_STEPS = 2000
"""More than any sound model takes for what the suite asks."""


class Bench:
    """A core with the cache that its model made for it."""

    def __init__(self, subject: Subject, model: Model, limits: EngineLimits) -> None:
        self._subject = subject
        self.core = EngineCore(model, limits=limits)
        with subject.must("allocate makes a cache"):
            self._cache = model.allocate(num_blocks=limits.num_blocks, block_size=limits.block_size)
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.results: list[StepResult] = []

    def step(self) -> None:
        """Let the model compute one step, if there is one."""
        core, model = self.core, self.core.model
        if (batch := core.schedule()) is not None:
            with self._subject.must("execute gives each row what it asks for, and does not raise"):
                result = model.execute(batch, self._cache)
                outputs = core.apply(batch, result)
            self.results.append(result)
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, asks: Sequence[GenerateRequest]) -> dict[str, tuple[int, ...]]:
        """Serve requests to their ends; returns the tokens of each."""
        for ask in asks:
            self.core.add(ask)
        for _ in range(MOST_STEPS):
            if not self.core.has_requests():
                return self.texts()
            self.step()
        steps = f"{len(asks)} requests took more than {MOST_STEPS} steps"
        self._subject.demand("requests end", holds=False, how=steps)
        return {}

    def texts(self) -> dict[str, tuple[int, ...]]:
        """Tokens of each request so far."""
        refused = [str(output.error) for output in self.core.take_outputs()]
        self._subject.demand("a spec does not refuse small requests", not refused, str(refused))
        return {
            request_id: tuple(token for output in outputs for token in output.token_ids)
            for request_id, outputs in self.outputs.items()
        }
