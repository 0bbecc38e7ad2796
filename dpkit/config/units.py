"""Durations and sizes: strings with a unit in TOML, plain numbers in Python.

A bare number says nothing of its unit, and a wrong guess is off by a thousand; so TOML never holds
one where time or memory is meant.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from dpkit.config.checks import BadValue, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

Seconds = Annotated[float, "seconds"]
Bytes = Annotated[int, "bytes"]

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = _DECIMAL | _BINARY
# Fifteen digits fit a double exactly: no rounding surprises, no overflow.
_NUMBER = r"(\d{1,15}|\d{1,8}\.\d{1,7})"

DURATION = rf"^{_NUMBER} ?({'|'.join(_SECONDS)})$"
SIZE = rf"^{_NUMBER} ?({'|'.join(_BYTES)})$"


def parse_duration(raw: object) -> float:
    """Seconds of ``"100ms"``, ``"10s"``, ``"1.5m"``, ``"1h"``.

    Raises:
        BadValue: not a string of this form.
    """
    return _parse(raw, DURATION, _SECONDS, 'a duration such as "100ms" (units: ms, s, m, h)')


def parse_size(raw: object) -> int:
    """Bytes of ``"512MiB"``, ``"2GB"``, ``"1.5GiB"``; a fraction of a byte is rounded.

    Raises:
        BadValue: not a string of this form.
    """
    units = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
    return round(_parse(raw, SIZE, _BYTES, f'a size such as "512MiB" (units: {units})'))


def show_duration(seconds: float) -> str:
    """A duration as a file would have it: ``"100ms"``, ``"90s"``, ``"1h"``."""
    return f"{seconds * 1e3:g}ms" if 0 < seconds < 1 else _show(seconds, _SECONDS, "s")


def show_size(size: int) -> str:
    """A size as a file would have it: ``"512MiB"``, ``"1000B"``."""
    return _show(size, {"B": 1} | _BINARY, "B")


def _show(amount: float, units: Mapping[str, float], base: str) -> str:
    """In the largest unit of which there is a whole number."""
    whole = [unit for unit in units if amount >= units[unit] and amount % units[unit] == 0]
    unit = whole[-1] if whole and amount else base
    return f"{amount / units[unit]:.15g}{unit}"


def _parse(raw: object, pattern: str, units: Mapping[str, float], expected: str) -> float:
    match = re.fullmatch(pattern, raw, re.ASCII) if isinstance(raw, str) else None
    if match is None:
        raise BadValue(f"expected {expected}, got {describe(raw)}")
    return float(match[1]) * units[match[2]]
