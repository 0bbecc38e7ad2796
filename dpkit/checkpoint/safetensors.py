"""The safetensors format in numpy: eight bytes of header length, a JSON header, the raw data.

Reads F32, F16 and BF16 (which numpy has no name for) without torch; files are memory-mapped, so
that what is float32 already is never copied and its pages are shared by all processes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from dpkit.checkpoint.dtypes import WIDEN
from dpkit.checkpoint.fields import LARGEST, check_is_file, parse_object, read_text
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_INDEX = "model.safetensors.index.json"

_LONGEST_HEADER = 100_000_000  # the format's own bound

_ALIGNMENT = 64  # of the data in files written here: a cache line, and what the widest loads want


@frozen
class _Entry:
    """One tensor of the header."""

    dtype: str
    shape: Sequence[int]
    begin: int  # of its data, from the end of the header
    end: int


class SafetensorsFile:
    """One mapped file; a `TensorSource`. The mapping lives as long as any array read from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = _map(path)
        try:
            header, self._start = _read_header(self._data)
        except (ModelUnsupported, ValueError, struct.error) as error:
            raise ModelUnsupported(f"{path}: not a safetensors file, or cut short") from error
        header.pop("__metadata__", None)
        self._header = {name: _entry(path, name, entry) for name, entry in header.items()}

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Name and shape of every tensor, in file order."""
        return {name: entry.shape for name, entry in self._header.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32.

        Raises:
            ModelUnsupported: of a type that isn't read here, or its data is not all there.
        """
        entry = self._header[name]
        if (decoder := WIDEN.get(entry.dtype)) is None:
            raise ModelUnsupported(
                f"{self._path}: tensor {name!r} is {entry.dtype}; {', '.join(WIDEN)} are read"
            )
        begin, end = self._start + entry.begin, self._start + entry.end
        count = prod(entry.shape)
        if end > len(self._data) or end - begin != count * decoder.dtype.itemsize:
            raise ModelUnsupported(f"{self._path}: cut short at tensor {name!r}; fetch it again")
        if count == 0:  # numpy refuses a view of nothing
            return np.zeros(entry.shape, np.float32)
        raw = np.frombuffer(self._data, decoder.dtype, count, begin)
        return decoder.widen(raw).reshape(entry.shape)


def _map(path: Path) -> mmap.mmap:
    """The file, writable as torch wants it; its pages are shared until somebody does write."""
    check_is_file(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelUnsupported(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelUnsupported(f"{path}: not a safetensors file, or cut short: empty") from error


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' data begins."""
    (length,) = struct.unpack_from("<Q", data)
    if length > _LONGEST_HEADER:  # a slice of so much would be a copy of the whole file
        raise ValueError("no such header")
    return parse_object(data[8 : 8 + length].decode(), "header"), 8 + length


def _entry(path: Path, name: str, entry: object) -> _Entry:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(type(size) is int and 0 <= size <= LARGEST for size in shape)
            and type(begin) is type(end) is int
            and 0 <= begin <= end
        ):
            return _Entry(dtype, shape, begin, end)
    raise ModelUnsupported(f"{path}: the entry of tensor {name!r} is damaged; fetch it again")


class SafetensorsFolder:
    """The `.safetensors` files of a directory, seen as one `TensorSource`.

    Those that its index names, if it has one: a directory may hold the same weights twice.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / _INDEX
        paths = _indexed(index) if index.exists() else sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelUnsupported(f"{folder}: no *.safetensors file; other weights are not read")
        files = [SafetensorsFile(path) for path in paths]
        self._owner = {name: file for file in files for name in file.shapes()}

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Name and shape of every tensor of every file."""
        return {name: file.shapes()[name] for name, file in self._owner.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, from whichever file has it."""
        return self._owner[name].read(name)


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(read_text(index))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelUnsupported(f"{index}: not an index of safetensors files") from error
    for name in names:
        if not (isinstance(name, str) and name.endswith(".safetensors") and "/" not in name):
            raise ModelUnsupported(
                f"{index}: not an index of safetensors files: it names {name!r:.80}"
            )
    paths = sorted(index.parent / name for name in names)
    for path in paths:
        if not path.exists():
            raise ModelUnsupported(f"{path} is missing, which {index.name} names; fetch it again")
    return paths


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], NDArray[np.float32]],
    *,
    on_bytes: Callable[[int, int], None],
) -> None:
    """Write float32 tensors one at a time, so that the model never is in memory as a whole.

    `on_bytes(done, total)` is called after each; the file is on disk when this returns.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    total = 0
    for name, shape in shapes.items():
        size = 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [total, total + size]}
        total += size
    with path.open("wb") as file:
        file.writelines(_framed(json.dumps(header)))
        done = 0
        for name in shapes:
            done += file.write(np.ascontiguousarray(read(name), np.float32).data)
            on_bytes(done, total)
        file.flush()
        os.fsync(file.fileno())


def _framed(header: str) -> Iterable[bytes]:
    body = header.encode()
    body += b" " * (-(len(body) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(body)), body
