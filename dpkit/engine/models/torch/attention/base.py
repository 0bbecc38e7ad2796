"""What attention is given and what a backend must do; see the package.

Knows blocks and heads, nothing of layers' weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@frozen(kw_only=True)
class Span:
    """One row of a batch, as attention sees it."""

    tokens: slice  # where they are among the tokens of the step
    start: int  # position of the first in its text
    blocks: NDArray[np.int64]  # those that hold its text up to its last token

    @property
    def num_tokens(self) -> int:
        """Tokens that look back."""
        return int(self.tokens.stop - self.tokens.start)

    @property
    def context(self) -> int:
        """Positions that the last of them sees, itself included."""
        return self.start + self.num_tokens


@frozen(kw_only=True)
class CacheKind:
    """What decides which backend can serve a KV cache."""

    block_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, cache: Tensor) -> CacheKind:
        """The kind of a cache [layers, 2, blocks, block_size, kv_heads, head_dim]."""
        return cls(device=cache.device, dtype=cache.dtype, block_size=cache.shape[3])


class Attention(Protocol):
    """One step's plan; asked once a layer."""

    def __call__(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """Let each token look at its own request's past.

        Args:
            queries: [tokens, heads, head_dim], rotated.
            cache: the layer's, with the step's keys and values in it.
            scale: what scores are multiplied by; None: 1 / sqrt(head_dim).

        Returns:
            [tokens, heads, head_dim]
        """


class AttentionBackend(Protocol):
    """A way to compute attention."""

    def obstacle(self, kind: CacheKind) -> str | None:
        """Why it cannot serve such a cache here, if so; goes on from its name."""

    def plan(self, spans: Sequence[Span], kind: CacheKind) -> Attention:
        """Prepare one step; `spans` cover its tokens in order."""


def additive(visible: NDArray[np.bool_], kind: CacheKind) -> Tensor:
    """A mask that is added to scores: torch's kernel makes it of a boolean one in every layer."""
    mask = torch.zeros(visible.shape, dtype=kind.dtype, device=kind.device)
    return mask.masked_fill_(on_device(~visible, kind), -torch.inf)


def on_device(numbers: NDArray[np.generic], kind: CacheKind) -> Tensor:
    """Bring an index to where the cache is; on a GPU the host does not wait for it."""
    return torch.from_numpy(numbers).to(kind.device, non_blocking=True)
