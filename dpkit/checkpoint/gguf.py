"""The GGUF format: one file that holds metadata, tokenizer and (quantised) weights.

Reads versions 2 and 3, little-endian, memory-mapped; knows nothing of what the metadata means.
`gguf_hf` translates it.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from dpkit.checkpoint.dtypes import DEQUANTISE, Stored
from dpkit.checkpoint.fields import Fields, check_is_file
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4  # GGML's
_ALIGNMENT = 32  # of the tensor data, where the metadata does not say otherwise

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
# Those one meets and that aren't read: a refusal should name them.
_REFUSED = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}


@frozen
class _Entry:
    """Where one tensor lies and what it is made of."""

    shape: tuple[
        int, ...
    ]  # outermost first, as numpy and torch count; the file counts the other way
    kind: int
    offset: int  # from the start of the tensor data


class GgufFile:
    """One mapped file. The mapping lives as long as any float32 array read from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        try:
            cursor = _Cursor(self._data)
            self.metadata, self.entries = _read_header(cursor, path)
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ModelUnsupported(f"{path}: cut short or damaged in its header") from error
        self.fields = Fields(str(path), self.metadata)
        alignment = self.fields.whole("general.alignment", default=_ALIGNMENT)
        self._start = cursor.at + -cursor.at % alignment

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised.

        Raises:
            ModelUnsupported: of a type that isn't read here, or its data is not all there.
        """
        entry = self.entries[name]
        stored = self._stored(name, entry.kind)
        items, rest = divmod(prod(entry.shape), stored.weights)
        begin = self._start + entry.offset
        if begin + items * stored.dtype.itemsize > len(self._data):
            raise ModelUnsupported(f"{self.path}: cut short at tensor {name!r}; fetch it again")
        if rest or not items:  # whole items only, and numpy refuses a view of nothing
            raise ModelUnsupported(f"{self.path}: tensor {name!r} has no shape: {entry.shape}")
        raw = np.frombuffer(self._data, stored.dtype, items, begin)
        return stored.widen(raw).reshape(entry.shape)

    def _stored(self, name: str, kind: int) -> Stored:
        if kind in _TYPES:
            return DEQUANTISE[_TYPES[kind]]
        known = _REFUSED.get(kind, f"of GGML type {kind}")
        raise ModelUnsupported(
            f"{self.path}: tensor {name!r} is {known}; {', '.join(DEQUANTISE)} are read"
        )


def _map(path: Path) -> mmap.mmap:
    check_is_file(path)
    try:
        with path.open("rb") as file:
            if (magic := file.read(4)) != _MAGIC:
                raise ModelUnsupported(f"{path}: not a GGUF file; it begins with {magic!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelUnsupported(f"{path}: cannot be read: {error.strerror}") from error


class _Cursor:
    """Reads header values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = len(_MAGIC)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Many at once: a vocabulary and its merges are 100,000, so this loop is kept bare."""
        data, at, length_of = self._data, self.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = at + 8 + length_of(data, at)[0]
            if end > len(data):
                raise ValueError("a string reaches beyond the file")
            found.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return found

    def value(self) -> Any:
        kind = self.scalar("I")
        return self._array() if kind == _ARRAY else self._typed(kind)

    def _typed(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise ValueError(f"metadata of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"array of unknown type {kind}")
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return list(values)


def _read_header(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
    if (version := cursor.scalar("I")) not in _VERSIONS:
        raise ModelUnsupported(f"{path}: GGUF version {version}; versions 2 and 3 are read")
    tensors, pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value() for _ in range(pairs)}
    entries = {cursor.string(): _read_entry(cursor) for _ in range(tensors)}
    return metadata, entries


def _read_entry(cursor: _Cursor) -> _Entry:
    if (dimensions := cursor.scalar("I")) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    innermost_first = [cursor.scalar("Q") for _ in range(dimensions)]
    return _Entry(tuple(reversed(innermost_first)), cursor.scalar("I"), cursor.scalar("Q"))
