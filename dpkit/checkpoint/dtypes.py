"""How stored numbers become float32: plain types and the block-quantised ones of GGUF.

A table, one entry a type: the numpy type of one stored item, how many weights an item holds, and
the function that widens an array of items. Layouts are those of ggml's `ggml-common.h`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

_BLOCK = 32  # weights that share one scale, in all types here


@frozen
class Stored:
    """One stored type."""

    dtype: np.dtype[Any]
    weights: int  # per item
    widen: Callable[[NDArray[Any]], NDArray[np.float32]]


def _as_it_is(items: NDArray[Any]) -> NDArray[np.float32]:
    return items


def _from_half(items: NDArray[Any]) -> NDArray[np.float32]:
    return items.astype(np.float32)


def _from_bfloat16(items: NDArray[Any]) -> NDArray[np.float32]:
    """A bfloat16 is the upper half of a float32."""
    return (items.astype(np.uint32) << 16).view(np.float32)


def _from_q8_0(blocks: NDArray[Any]) -> NDArray[np.float32]:
    scale = blocks["d"].astype(np.float32)[:, None]
    values: NDArray[np.float32] = scale * blocks["q"]
    return values


def _from_q4_0(blocks: NDArray[Any]) -> NDArray[np.float32]:
    scale = blocks["d"].astype(np.float32)[:, None]
    return scale * (_nibbles(blocks["q"]) - np.float32(8))


def _from_q4_1(blocks: NDArray[Any]) -> NDArray[np.float32]:
    scale = blocks["d"].astype(np.float32)[:, None]
    least = blocks["m"].astype(np.float32)[:, None]
    return scale * _nibbles(blocks["q"]) + least


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Sixteen bytes hold 32 weights: the low halves are the first sixteen."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


WIDEN: Mapping[str, Stored] = MappingProxyType(
    {
        "F32": Stored(np.dtype("<f4"), 1, _as_it_is),
        "F16": Stored(np.dtype("<f2"), 1, _from_half),
        "BF16": Stored(np.dtype("<u2"), 1, _from_bfloat16),
    }
)
"""What both formats have."""

DEQUANTISE: Mapping[str, Stored] = MappingProxyType(
    {
        **WIDEN,
        "Q8_0": Stored(np.dtype([("d", "<f2"), ("q", "i1", 32)]), _BLOCK, _from_q8_0),
        "Q4_0": Stored(np.dtype([("d", "<f2"), ("q", "u1", 16)]), _BLOCK, _from_q4_0),
        "Q4_1": Stored(np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]), _BLOCK, _from_q4_1),
    }
)
"""What GGUF has."""
