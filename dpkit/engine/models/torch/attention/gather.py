"""Attention by gathering blocks, then torch's own kernel: on any device, and the default.

Decodes of like length are one padded call, so that one long text among short ones does not make
all of them long; each prefill chunk is a call of its own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen
from torch.nn.functional import scaled_dot_product_attention

from dpkit.engine.models.torch.attention.base import additive, on_device
from dpkit.engine.models.torch.attention.sdpa import plan_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.engine.models.torch.attention.base import CacheKind, Span
    from dpkit.engine.models.torch.attention.sdpa import OneSpan


class GatherBackend:
    """Copies the blocks that a step looks at, in groups."""

    def obstacle(self, kind: CacheKind) -> str | None:  # noqa: ARG002 - there is none
        """Nothing stands in its way."""
        return None

    def plan(self, spans: Sequence[Span], kind: CacheKind) -> GatherAttention:
        """Group decodes by the power of two that their number of blocks reaches."""
        groups = defaultdict(list)
        for span in spans:
            if span.num_tokens == 1:
                groups[(len(span.blocks) - 1).bit_length()].append(span)
        return GatherAttention(
            decodes=[_plan_decodes(group, kind) for group in groups.values()],
            chunks=[plan_one(span, kind) for span in spans if span.num_tokens > 1],
        )


@frozen(kw_only=True)
class Decodes:
    """One token each of as many requests."""

    tokens: Tensor  # [requests]: where they are among the tokens of the step
    block_tables: Tensor  # [requests * blocks of the longest], padded with block 0
    mask: Tensor  # [requests, 1, 1, positions]: zero where the request has a token

    def attend(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """All at once, padded to the longest.

        The query heads that share a KV head become the queries of one head, so that nothing has to
        be repeated.
        """
        requests, (kv_heads, head_dim) = len(self.tokens), cache.shape[-2:]
        # `index_select` is three times as fast here as indexing.
        keys, values = (
            part.index_select(0, self.block_tables)
            .view(requests, -1, kv_heads, head_dim)
            .transpose(1, 2)
            for part in cache
        )
        grouped = queries.view(requests, kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self.mask, scale=scale
        )
        return attended.flatten(1, 2)


@frozen(kw_only=True)
class GatherAttention:
    """One step: groups of decodes, and prefill chunks."""

    decodes: Sequence[Decodes]
    chunks: Sequence[OneSpan]

    def __call__(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """See `Attention`."""
        attended = torch.empty_like(queries)
        for group in self.decodes:
            asking = queries.index_select(0, group.tokens)
            attended.index_copy_(0, group.tokens, group.attend(asking, cache, scale))
        for chunk in self.chunks:
            attended[chunk.tokens] = chunk.attend(queries[chunk.tokens], cache, scale)
        return attended


def _plan_decodes(spans: Sequence[Span], kind: CacheKind) -> Decodes:
    lengths = np.array([span.context for span in spans])
    tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int64)
    for table, span in zip(tables, spans, strict=True):
        table[: len(span.blocks)] = span.blocks
    mask = np.arange(tables.shape[1] * kind.block_size) < lengths[:, None]
    return Decodes(
        tokens=on_device(np.array([span.tokens.start for span in spans]), kind),
        block_tables=on_device(tables.ravel(), kind),
        mask=additive(mask[:, None, None], kind),
    )
