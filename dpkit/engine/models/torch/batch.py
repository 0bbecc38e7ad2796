"""From the scheduler's batch to tensors: one flat list of tokens, without padding.

Linear layers see [tokens, hidden]. Only attention must know whose token is whose: its backend gets
the rows' spans and plans the step. Built once a step, used by every layer.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from dpkit.engine.models.torch.attention import choose_backend
from dpkit.engine.models.torch.attention.base import CacheKind, Span, on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.engine.models.torch.attention.base import Attention, AttentionBackend
    from dpkit.messages import Batch, BatchRow


@frozen(kw_only=True)
class TensorBatch:
    """One step's work as the transformer sees it."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]: where the KV of each goes, counted over all blocks
    attention: Attention  # the backend's plan of the step
    sampled: Tensor  # the tokens whose successors' scores are asked for: see `_sampled`


def build_tensors(
    batch: Batch, kind: CacheKind, backend: AttentionBackend | None = None
) -> TensorBatch:
    """Lay out `batch` for a cache of that kind; its best backend, if none is given."""
    rows, size = batch.rows, kind.block_size
    ends = list(accumulate(len(row.token_ids) for row in rows))
    spans = [_span(row, end, size) for row, end in zip(rows, ends, strict=True)]
    token_ids = [token for row in rows for token in row.token_ids]
    return TensorBatch(
        token_ids=on_device(np.array(token_ids, np.int64), kind),
        positions=on_device(np.concatenate([_positions(row) for row in rows]), kind),
        slots=on_device(np.concatenate([_slots(row, size) for row in rows]), kind),
        attention=(backend or choose_backend(kind)).plan(spans, kind),
        sampled=on_device(np.array(_sampled(rows, ends), np.int64), kind),
    )


def _sampled(rows: Sequence[BatchRow], ends: Sequence[int]) -> list[int]:
    """The last token of each row that samples, then the one before each that is to be scored."""
    last = [end - 1 for row, end in zip(rows, ends, strict=True) if row.output_index is not None]
    for row, end in zip(rows, ends, strict=True):
        if row.scored:
            first = end - _context(row)  # where the row's position 0 would be
            last += [first + place - 1 for place in row.scored]
    return last


def _context(row: BatchRow) -> int:
    """Positions that are cached when this row is computed."""
    return row.start + len(row.token_ids)


def _positions(row: BatchRow) -> np.ndarray:
    return np.arange(row.start, _context(row))


def _span(row: BatchRow, end: int, block_size: int) -> Span:
    holding = -(-_context(row) // block_size)  # blocks that hold something
    return Span(
        tokens=slice(end - len(row.token_ids), end),
        start=row.start,
        blocks=np.asarray(row.block_ids[:holding], np.int64),
    )


def _slots(row: BatchRow, block_size: int) -> np.ndarray:
    block, offset = np.divmod(_positions(row), block_size)
    return np.asarray(row.block_ids, np.int64)[block] * block_size + offset
