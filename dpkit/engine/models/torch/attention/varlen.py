"""Attention by the `flash-attn` package, which reads the paged cache in place: CUDA only."""

from __future__ import annotations

from importlib import util
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from dpkit.engine.models.torch.attention.base import on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from dpkit.engine.models.torch.attention.base import CacheKind, Span

_PAGE = 256  # the package's kernels want blocks of a multiple of this


class VarlenBackend:
    """One call for all rows, without padding and without a copy."""

    def obstacle(self, kind: CacheKind) -> str | None:
        """It is particular about the device, the numbers and the blocks."""
        if kind.device.type != "cuda":
            return f"needs a CUDA device, not {kind.device.type}"
        if util.find_spec("flash_attn") is None:
            return "needs the package flash-attn"
        if kind.dtype not in {torch.float16, torch.bfloat16}:
            return f"computes in float16 and bfloat16, not {kind.dtype}"
        if kind.block_size % _PAGE:
            return f"needs a block_size that is a multiple of {_PAGE}, not {kind.block_size}"
        return None

    def plan(self, spans: Sequence[Span], kind: CacheKind) -> VarlenAttention:
        """Count off where each row's queries and keys end."""
        from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - where it is installed

        counts, contexts = [s.num_tokens for s in spans], [s.context for s in spans]
        tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int32)
        for table, span in zip(tables, spans, strict=True):
            table[: len(span.blocks)] = span.blocks
        return VarlenAttention(
            kernel=flash_attn_varlen_func,
            arguments={
                "cu_seqlens_q": on_device(_ends(counts), kind),
                "cu_seqlens_k": on_device(_ends(contexts), kind),
                "max_seqlen_q": max(counts),
                "max_seqlen_k": max(contexts),
                "block_table": on_device(tables, kind),
                "causal": True,  # the last query sees the last key, whatever is cached before
            },
        )


def _ends(counts: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(counts)], np.int32)


@frozen(kw_only=True)
class VarlenAttention:
    """One step: the kernel and what is the same for all layers."""

    kernel: Callable[..., Tensor]
    arguments: dict[str, Any]

    def __call__(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """See `Attention`."""
        keys, values = cache
        return self.kernel(queries, keys, values, softmax_scale=scale, **self.arguments)
