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

from dpkit.checkpoint.dtypes import WIDEN
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_INDEX = "model.safetensors.index.json"

_ALIGNMENT = 64  # of the data in files written here: a cache line, and what the widest loads want


class SafetensorsFile:
    """One mapped file; a `TensorSource`. The mapping lives as long as any array read from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                # ACCESS_COPY: arrays come out writable, as torch wants them; pages stay shared
                # until somebody does write.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            (length,) = struct.unpack_from("<Q", self._data)
            header: dict[str, dict[str, Any]] = json.loads(self._data[8 : 8 + length])
        except (ValueError, struct.error) as error:
            raise ModelUnsupported(f"{path}: not a safetensors file, or cut short") from error
        header.pop("__metadata__", None)
        self._header = header
        self._start = 8 + length

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Name and shape of every tensor, in file order."""
        return {name: entry["shape"] for name, entry in self._header.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32.

        Raises:
            ModelUnsupported: of a type that isn't read here, or its data is not all there.
        """
        entry = self._header[name]
        if (decoder := WIDEN.get(entry["dtype"])) is None:
            raise ModelUnsupported(
                f"{self._path}: tensor {name!r} is {entry['dtype']}; {', '.join(WIDEN)} are read"
            )
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        count = prod(entry["shape"])
        if end > len(self._data) or end - begin != count * decoder.dtype.itemsize:
            raise ModelUnsupported(f"{self._path}: cut short at tensor {name!r}; fetch it again")
        raw = np.frombuffer(self._data, decoder.dtype, count, begin)
        return decoder.widen(raw).reshape(entry["shape"])


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
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelUnsupported(f"{index}: not an index of safetensors files") from error
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
