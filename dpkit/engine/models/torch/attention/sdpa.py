"""Attention of one request after the other: on any device, and what the others are tested by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen
from torch.nn.functional import scaled_dot_product_attention

from dpkit.engine.models.torch.attention.base import additive, on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.engine.models.torch.attention.base import CacheKind, Span


class SdpaBackend:
    """One call of torch's own kernel a request."""

    def obstacle(self, kind: CacheKind) -> str | None:  # noqa: ARG002 - there is none
        """Nothing stands in its way."""
        return None

    def plan(self, spans: Sequence[Span], kind: CacheKind) -> SdpaAttention:
        """Plan each for itself."""
        return SdpaAttention([plan_one(span, kind) for span in spans])


@frozen(kw_only=True)
class OneSpan:
    """A stretch of one request's text, computed together."""

    tokens: slice  # where they are among the tokens of the step
    block_table: Tensor  # [blocks]
    context: int  # positions attended to: what is cached before, and the stretch itself
    mask: Tensor | None  # [tokens, context]; None: the stretch is the whole context, so causal

    def attend(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """Attend from [tokens, heads, head_dim]."""
        keys, values = (
            part.index_select(0, self.block_table)
            .flatten(0, 1)[: self.context]
            .transpose(0, 1)[None]
            for part in cache
        )
        attended = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


@frozen
class SdpaAttention:
    """One step, request by request."""

    spans: Sequence[OneSpan]

    def __call__(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """See `Attention`."""
        parts = [span.attend(queries[span.tokens], cache, scale) for span in self.spans]
        return torch.cat(parts)


def plan_one(span: Span, kind: CacheKind) -> OneSpan:
    """Plan the attention of one row."""
    mask = None
    if span.start > 0:
        positions = np.arange(span.start, span.context)
        mask = additive(np.arange(span.context) <= positions[:, None], kind)
    return OneSpan(
        tokens=span.tokens,
        block_table=on_device(span.blocks, kind),
        context=span.context,
        mask=mask,
    )
