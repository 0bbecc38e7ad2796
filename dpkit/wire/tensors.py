"""Arrays on the wire: (dtype, shape, bytes), little-endian, without NumPy or torch.

Knows only how numbers lie in bytes. Where those bytes travel, inline or in a frame of their own, is
`codec`'s affair. An engine process that serves no logprobs never comes here.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# NumPy's names and torch's. Only what logprobs and token ids are made of.
_FORMATS = {
    "<i4": "i",
    "int32": "i",
    "<i8": "q",
    "int64": "q",
    "<f2": "e",
    "float16": "e",
    "<f4": "f",
    "float32": "f",
    "<f8": "d",
    "float64": "d",
}


class Tensor:
    """One array as it travels. Not attrs: msgspec would then write it as a map, not ask `codec`."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: bytes) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.data = data

    def __repr__(self) -> str:
        return f"Tensor({self.dtype!r}, {self.shape}, <{len(self.data)} bytes>)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        mine, theirs = (self.dtype, self.shape, self.data), (other.dtype, other.shape, other.data)
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.data))


def pack(dtype: str, shape: Sequence[int], numbers: Sequence[float]) -> Tensor:
    """Make an array of `numbers`, row by row.

    Raises:
        ValueError: a number does not fit the dtype, or is none.
    """
    try:
        data = struct.pack(f"<{len(numbers)}{_FORMATS[dtype]}", *numbers)
    except (struct.error, OverflowError, TypeError) as error:
        raise ValueError(f"no {dtype}: {error}") from error
    return Tensor(dtype, shape, data)


def unpack(tensor: Tensor) -> tuple[float, ...]:
    """All numbers of an array, row by row: ints for an integer dtype, else floats.

    Raises:
        ValueError: the dtype is none of ours, or the bytes are too many or too few for the shape.
    """
    code = _FORMATS.get(tensor.dtype)
    if code is None:
        raise ValueError(f"an array of dtype {tensor.dtype!r}, where {', '.join(_FORMATS)} can be")
    count = math.prod(tensor.shape)
    expected = count * struct.calcsize(f"<{code}")
    if expected != len(tensor.data):
        raise ValueError(
            f"an array of shape {list(tensor.shape)} and dtype {tensor.dtype!r} takes "
            f"{expected} bytes, and {len(tensor.data)} came"
        )
    return struct.unpack(f"<{count}{code}", tensor.data)
