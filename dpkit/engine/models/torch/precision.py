"""In what numbers a model computes. Plain data: `dpkit explain` asks without importing torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dpkit.errors import ModelUnsupported
from dpkit.names import Dtype, Quant

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEM_BYTES: Mapping[Dtype, int] = MappingProxyType({Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2})
"""Bytes of one number of a KV cache."""

# CPUs that multiply bfloat16 in hardware; the others would widen each number first.
_FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16"}

_CPU_INFO = Path("/proc/cpuinfo")


def resolve_dtype(dtype: Dtype, quant: Quant = Quant.NONE, device: str = "cpu") -> Dtype:
    """What `auto` comes to on a device of this machine: any GPU is fast at bfloat16.

    Raises:
        ModelUnsupported: `dtype` and `quant` exclude each other.
    """
    if quant is Quant.INT4:
        # The kernel that multiplies four-bit weights is twenty times slower in float32.
        if dtype is Dtype.FLOAT32:
            raise ModelUnsupported(
                'quant = "int4" computes in bfloat16, not in float32; leave dtype out'
            )
        return Dtype.BFLOAT16
    if dtype is Dtype.AUTO:
        fast = device != "cpu" or cpu_is_fast_at_bfloat16()
        return Dtype.BFLOAT16 if fast else Dtype.FLOAT32
    return dtype


@cache
def cpu_is_fast_at_bfloat16() -> bool:
    """Whether this CPU has instructions for it, as the kernel says."""
    try:
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # no Linux
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not _FAST_BFLOAT16.isdisjoint(flags.split())
