"""Durations and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkit.config.units import parse_duration, parse_size, show_duration, show_size
from dpkit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("10s", 10.0), ("1.5m", 90.0), ("2 h", 7200.0), ("0s", 0.0), ("0.5ms", 5e-4)],
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("7B", 7), ("0.1kB", 100)],
)
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize(
    "raw",
    [
        *["", "10", "ms", "-1s", "+1s", "1e3s", "1 day", "1S", "1_0s", ".5s", "5.s", "\u0661s"],
        *[" 1s", "1s\n", "9" * 400 + "s", 10, 0.1, True, None, ["1s"]],
    ],
)
def test_anything_else_is_refused(raw: object) -> None:
    with pytest.raises(ConfigError, match='expected a duration such as "100ms"'):
        parse_duration(raw)
    with pytest.raises(ConfigError, match='expected a size such as "512MiB"'):
        parse_size(raw)


@given(st.integers(0, 10**15 - 1))
def test_a_size_is_shown_as_it_is_read(size: int) -> None:
    assert parse_size(show_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.1, "100ms"), (1.5, "1.5s"), (90.0, "90s"), (120.0, "2m"), (7200.0, "2h")],
)
def test_durations_are_shown_as_a_file_would_have_them(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0B"), (1000, "1000B"), (2**29, "512MiB")])
def test_sizes_are_shown_as_a_file_would_have_them(size: int, text: str) -> None:
    assert show_size(size) == text
