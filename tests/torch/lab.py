"""What a torch model says of a text, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dpkit.engine.models.torch.attention.base import CacheKind
from dpkit.engine.models.torch.batch import build_tensors
from dpkit.messages import Batch, BatchRow, SamplingParams

if TYPE_CHECKING:
    from dpkit.engine.models.torch.model import TorchModel


def scores(model: TorchModel, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scores of what follows each of `ids`, computed with a cache of that type."""
    row = BatchRow(
        request_id="r",
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(),
        token_ids=ids,
        start=0,
        block_ids=range(8, 0, -1),
        output_index=0,
        scored=range(1, len(ids)),
    )
    step = build_tensors(Batch(rows=(row,)), CacheKind(block_size=16, dtype=dtype))
    with torch.inference_mode():
        last, *before = model._transformer(step, model.allocate(num_blocks=9, block_size=16))
    return torch.stack([*before, last]).float()
