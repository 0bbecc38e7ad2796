"""A model whose tokens are recorded.

Part of `dpkit.testing.history`, which is told of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpkit.testing.wrapper import ModelWrapper

if TYPE_CHECKING:
    from dpkit.abc import Model
    from dpkit.messages import Batch, StepResult
    from dpkit.testing.history import History


class RecordingModel(ModelWrapper):
    """Its cache is the wrapped model's, with the number of the life that uses it."""

    def __init__(self, model: Model, history: History) -> None:
        super().__init__(model)
        self._history = history

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        """Begin a life."""
        cache = super().allocate(num_blocks=num_blocks, block_size=block_size)
        return self._history.begin_life(), cache

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Compute a step, and note what it sampled."""
        life, inner = cache
        result = super().execute(batch, inner)
        for row, token_id in zip(batch.rows, result.sampled, strict=False):
            if row.output_index is not None and token_id is not None:
                self._history.produced(life, row.request_id, row.output_index, token_id)
        return result
