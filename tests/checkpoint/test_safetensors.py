"""The safetensors format, checked against its own package in both directions."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dpkit.checkpoint.safetensors import SafetensorsFile, SafetensorsFolder, write_safetensors
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

numpy_format = pytest.importorskip("safetensors.numpy")

WEIGHTS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([0.5, -1.0], np.float32),
}


def write(path: Path, weights: dict[str, NDArray[np.float32]]) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    shapes = {name: array.shape for name, array in weights.items()}
    write_safetensors(
        path, shapes, weights.__getitem__, on_bytes=lambda done, total: seen.append((done, total))
    )
    return seen


def test_the_package_reads_what_is_written_here(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", WEIGHTS)
    read = numpy_format.load_file(tmp_path / "m.safetensors")
    assert read.keys() == WEIGHTS.keys()
    assert all(np.array_equal(read[name], array) for name, array in WEIGHTS.items())


def test_what_the_package_writes_is_read_here(tmp_path: Path) -> None:
    half = {"c": np.array([1.5, -2.0], np.float16)}
    numpy_format.save_file(WEIGHTS | half, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert all(np.array_equal(file.read(name), array) for name, array in WEIGHTS.items())
    assert file.read("c").tolist() == [1.5, -2.0]
    assert file.read("c").dtype == np.float32


def test_bfloat16_is_read_without_torch(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + b"\xc0\x3f\x00\xc0"
    (tmp_path / "m.safetensors").write_bytes(data)
    assert SafetensorsFile(tmp_path / "m.safetensors").read("t").tolist() == [1.5, -2.0]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    assert write(tmp_path / "m.safetensors", WEIGHTS) == [(24, 32), (32, 32)]


def test_data_begins_where_the_widest_loads_want_it(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", WEIGHTS)
    (length,) = struct.unpack_from("<Q", (tmp_path / "m.safetensors").read_bytes())
    assert (8 + length) % 64 == 0


def test_several_files_are_one_model(tmp_path: Path) -> None:
    for number, (name, array) in enumerate(WEIGHTS.items()):
        write(tmp_path / f"model-{number}.safetensors", {name: array})
    folder = SafetensorsFolder(tmp_path)
    assert {name: tuple(shape) for name, shape in folder.shapes().items()} == {
        name: array.shape for name, array in WEIGHTS.items()
    }
    assert np.array_equal(folder.read("b"), WEIGHTS["b"])


def test_a_file_cut_short_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write(path, WEIGHTS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelUnsupported, match=r"m.safetensors: cut short at tensor 'b'"):
        SafetensorsFile(path).read("b")


@pytest.mark.parametrize(
    "data", [b"", b"abc", struct.pack("<Q", 2**40), b"\x02" + bytes(7) + b"no"]
)
def test_another_kind_of_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(ModelUnsupported, match="not a safetensors file, or cut short"):
        SafetensorsFile(tmp_path / "m.safetensors")


def test_a_header_without_end_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 2**40))
    with pytest.raises(ModelUnsupported) as caught:
        SafetensorsFile(tmp_path / "m.safetensors")
    assert str(caught.value.__cause__) == "no such header"


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    numpy_format.save_file({"t": np.arange(3)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelUnsupported, match="tensor 't' is I64; F32, F16, BF16 are read"):
        SafetensorsFile(tmp_path / "m.safetensors").read("t")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelUnsupported, match=r"no \*\.safetensors file"):
        SafetensorsFolder(tmp_path)
