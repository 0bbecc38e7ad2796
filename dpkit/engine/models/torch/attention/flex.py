"""Attention by torch's FlexAttention: CUDA without any further package.

All rows are one sequence of queries against one sequence of keys, gathered without padding; a block
mask says who may look at what, so that the kernel skips what belongs to others.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dpkit.engine.models.torch.attention.base import on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from dpkit.engine.models.torch.attention.base import CacheKind, Span


class FlexBackend:
    """One call for all rows."""

    def obstacle(self, kind: CacheKind) -> str | None:
        """Without a GPU it computes all that it could have skipped."""
        return None if kind.device.type == "cuda" else f"needs a CUDA device, not {kind.device}"

    def plan(self, spans: Sequence[Span], kind: CacheKind) -> FlexAttention:
        """Say of each query and each key whose it is and where in the text."""
        asking = _places(spans, [span.start for span in spans], kind)
        asked = _places(spans, [0] * len(spans), kind)

        def may_see(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            past = asked.positions[key] <= asking.positions[query]
            return past & (asked.owners[key] == asking.owners[query])

        mask = create_block_mask(
            may_see, None, None, len(asking.owners), len(asked.owners), device=kind.device
        )
        return FlexAttention(kernel=_kernel(kind.device.type), keys=asked.slots, mask=mask)


@frozen(kw_only=True)
class FlexAttention:
    """One step: where all keys are, and who may look at which."""

    kernel: Callable[..., Tensor]
    keys: Tensor  # slots in the cache, counted over all blocks
    mask: BlockMask

    def __call__(self, queries: Tensor, cache: Tensor, scale: float | None) -> Tensor:
        """See `Attention`."""
        keys, values = (
            part.flatten(0, 1).index_select(0, self.keys).transpose(0, 1)[None] for part in cache
        )
        asking = queries.transpose(0, 1)[None]
        attended = self.kernel(
            asking, keys, values, block_mask=self.mask, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@cache
def _kernel(device: str) -> Callable[..., Tensor]:
    """Compiled, it is a fused kernel; as it is (on a CPU, for tests) it computes all scores."""
    kernel: Callable[..., Tensor] = flex_attention
    return kernel if device == "cpu" else torch.compile(kernel, dynamic=True)


@frozen(kw_only=True)
class _Places:
    """Tokens of several texts, one text after the other."""

    owners: Tensor  # the index of each one's span
    positions: Tensor
    slots: Tensor  # in the cache, counted over all blocks


def _places(spans: Sequence[Span], starts: Sequence[int], kind: CacheKind) -> _Places:
    """Each span's positions from its start on."""
    positions = [np.arange(start, s.context) for start, s in zip(starts, spans, strict=True)]
    slots = [
        span.blocks[places // kind.block_size] * kind.block_size + places % kind.block_size
        for span, places in zip(spans, positions, strict=True)
    ]
    owners = np.repeat(np.arange(len(spans)), [len(places) for places in positions])
    return _Places(
        owners=on_device(owners, kind),
        positions=on_device(np.concatenate(positions), kind),
        slots=on_device(np.concatenate(slots), kind),
    )
