"""Stored numbers come out as what they stand for; blocks are made here byte by byte."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dpkit.checkpoint.dtypes import DEQUANTISE


def widen(kind: str, data: bytes) -> list[float]:
    stored = DEQUANTISE[kind]
    numbers = stored.widen(np.frombuffer(data, stored.dtype))
    assert numbers.dtype == np.float32
    return numbers.ravel().tolist()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("F32", struct.pack("<3f", 1.5, -2.0, 0.0)),
        ("F16", struct.pack("<3e", 1.5, -2.0, 0.0)),
        ("BF16", b"\xc0\x3f\x00\xc0\x00\x00"),
    ],
)
def test_plain_numbers_keep_their_value(kind: str, data: bytes) -> None:
    assert widen(kind, data) == [1.5, -2.0, 0.0]


def test_q8_0_is_scale_times_signed_byte() -> None:
    data = struct.pack("<e32b", 0.5, *range(-16, 16))
    assert widen("Q8_0", data) == [0.5 * q for q in range(-16, 16)]


def test_q4_0_counts_from_minus_eight_with_the_low_halves_first() -> None:
    data = struct.pack("<e", 0.25) + bytes(low | (15 - low) << 4 for low in range(16))
    expected = [0.25 * (low - 8) for low in range(16)] + [0.25 * (7 - low) for low in range(16)]
    assert widen("Q4_0", data) == expected


def test_q4_1_counts_from_its_own_least() -> None:
    data = struct.pack("<ee", 0.25, -3.0) + bytes(low | (15 - low) << 4 for low in range(16))
    expected = [0.25 * low - 3.0 for low in range(16)] + [
        0.25 * (15 - low) - 3 for low in range(16)
    ]
    assert widen("Q4_1", data) == expected


def test_each_block_has_its_own_scale() -> None:
    data = struct.pack("<e32b", 1.0, *[1] * 32) + struct.pack("<e32b", 2.0, *[1] * 32)
    assert widen("Q8_0", data) == [1.0] * 32 + [2.0] * 32
