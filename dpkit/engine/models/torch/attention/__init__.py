"""Attention over a paged KV cache, and the backends that can compute it.

A layer's cache is one tensor [2, blocks, block_size, kv_heads, head_dim]; index 0 is keys. Once a
step a backend plans: it turns the rows' block tables into the index tensors that it wants. Each
layer then stores its new keys and values, which is the same for all backends, and asks the plan.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from dpkit.engine.models.torch.attention.gather import GatherBackend
from dpkit.engine.models.torch.attention.sdpa import SdpaBackend
from dpkit.engine.models.torch.attention.varlen import VarlenBackend
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dpkit.engine.models.torch.attention.base import AttentionBackend, CacheKind
    from dpkit.engine.models.torch.batch import TensorBatch

BACKENDS: Mapping[str, AttentionBackend] = MappingProxyType(
    {
        "cuda_varlen": VarlenBackend(),
        "gather": GatherBackend(),
        "sdpa": SdpaBackend(),
    }
)
"""By name, the fastest first."""


@cache
def choose_backend(kind: CacheKind, name: str = "auto") -> AttentionBackend:
    """The backend of that name, or the fastest that can serve such a cache; there is one for any.

    Raises:
        ModelUnsupported: there is none of that name, or it cannot serve such a cache; says why.
    """
    if name == "auto":
        return next(backend for backend in BACKENDS.values() if backend.obstacle(kind) is None)
    if (backend := BACKENDS.get(name)) is None:
        raise ModelUnsupported(f"no attention backend {name!r}; there are {', '.join(BACKENDS)}")
    if (obstacle := backend.obstacle(kind)) is not None:
        raise ModelUnsupported(f"attention backend {name!r} {obstacle}")
    return backend


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cache: Tensor,
    step: TensorBatch,
    *,
    scale: float | None = None,
) -> Tensor:
    """Store the step's keys and values [tokens, kv_heads, head_dim], then attend.

    Args:
        queries: [tokens, heads, head_dim], rotated.
        keys: rotated.
        values: likewise.
        cache: this layer's, [2, blocks, block_size, kv_heads, head_dim].
        step: whose token is whose.
        scale: what scores are multiplied by; None: 1 / sqrt(head_dim).
    """
    for stored, new in zip(cache, (keys, values), strict=True):
        stored.flatten(0, 1).index_copy_(0, step.slots, new)
    return step.attention(queries, cache, scale)
