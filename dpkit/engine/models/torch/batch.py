"""From the scheduler's batch to tensors: one flat list of tokens, without padding.

Linear layers see [tokens, hidden]. Only attention must know whose token is whose: for it, decodes
stand together as one padded block table and each prefill chunk stands alone. Built once a step,
used by every layer.
"""

from __future__ import annotations

from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.messages import Batch, BatchRow


@frozen(kw_only=True)
class Decodes:
    """The first tokens of the step: one each of as many requests."""

    block_tables: Tensor  # [requests, blocks of the longest], padded with block 0
    mask: Tensor  # [requests, 1, 1, positions]: True where the request has a token


@frozen(kw_only=True)
class Chunk:
    """A stretch of one request's prompt, computed together."""

    tokens: slice  # where they are among the tokens of the step
    block_table: Tensor  # [blocks]
    context: int  # positions attended to: what is cached before, and the chunk itself
    mask: Tensor | None  # [tokens, context]; None: the chunk is the whole context, so causal


@frozen(kw_only=True)
class TensorBatch:
    """One step's work as the transformer sees it."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]: where the KV of each goes, counted over all blocks
    decodes: Decodes | None
    chunks: Sequence[Chunk]
    sampled: Tensor  # the tokens whose successors' scores are asked for: see `_sampled`


def build_tensors(batch: Batch, block_size: int) -> TensorBatch:
    """Lay out `batch` for a cache of blocks of `block_size` tokens."""
    rows = batch.rows
    ends = list(accumulate(len(row.token_ids) for row in rows))
    singles = list(takewhile(lambda row: len(row.token_ids) == 1, rows))
    chunks = list(zip(rows, ends, strict=True))[len(singles) :]
    return TensorBatch(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids]),
        positions=torch.from_numpy(np.concatenate([_positions(row) for row in rows])),
        slots=torch.from_numpy(np.concatenate([_slots(row, block_size) for row in rows])),
        decodes=_decodes(singles, block_size) if singles else None,
        chunks=[_chunk(row, end, block_size) for row, end in chunks],
        sampled=torch.tensor(_sampled(rows, ends), dtype=torch.int64),
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


def _blocks(row: BatchRow, block_size: int) -> np.ndarray:
    """The part of the row's block table that holds something."""
    return np.asarray(row.block_ids[: -(-_context(row) // block_size)], np.int64)


def _slots(row: BatchRow, block_size: int) -> np.ndarray:
    block, offset = np.divmod(_positions(row), block_size)
    return np.asarray(row.block_ids, np.int64)[block] * block_size + offset


def _decodes(rows: Sequence[BatchRow], block_size: int) -> Decodes:
    lengths = np.array([_context(row) for row in rows])
    width = -(-int(lengths.max()) // block_size)
    tables = np.zeros((len(rows), width), np.int64)
    for table, row in zip(tables, rows, strict=True):
        blocks = _blocks(row, block_size)
        table[: len(blocks)] = blocks
    mask = np.arange(width * block_size) < lengths[:, None]
    return Decodes(
        block_tables=torch.from_numpy(tables), mask=torch.from_numpy(mask[:, None, None])
    )


def _chunk(row: BatchRow, end: int, block_size: int) -> Chunk:
    context = _context(row)
    mask = None if row.start == 0 else np.arange(context) <= _positions(row)[:, None]
    return Chunk(
        tokens=slice(end - len(row.token_ids), end),
        block_table=torch.from_numpy(_blocks(row, block_size)),
        context=context,
        mask=None if mask is None else torch.from_numpy(mask),
    )
