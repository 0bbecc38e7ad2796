"""Random numbers that are looked up, not drawn: SplitMix64 read at any position of its stream.

One stream a request, named by its seed; its i-th number names the stream of output token i; the
t-th number of that is the noise of token id t. Nothing has state.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def stream_at(seed: int, position: int) -> int:
    """The number at `position` of the stream of `seed` (any int), as a signed 64-bit int."""
    number = (seed + (position + 1) * _GAMMA) & _MASK
    number = ((number ^ (number >> 30)) * _MIX_1) & _MASK
    number = ((number ^ (number >> 27)) * _MIX_2) & _MASK
    return _signed(number ^ (number >> 31))


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def streams_at(seeds: Tensor, positions: Tensor) -> Tensor:
    """`stream_at` of int64 tensors, broadcast against each other; torch's int64 wraps."""
    numbers = (positions + 1) * _signed(_GAMMA) + seeds
    numbers ^= _shifted(numbers, 30)
    numbers *= _signed(_MIX_1)
    numbers ^= _shifted(numbers, 27)
    numbers *= _signed(_MIX_2)
    numbers ^= _shifted(numbers, 31)
    return numbers


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right with zeros coming in; torch's own repeats the sign."""
    return (numbers >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def gumbel(keys: Tensor, positions: Tensor) -> Tensor:
    """Gumbel noise, float32, of each position of each key's stream.

    -log of an exponential variate, whose small values (those that win) need resolution: so the
    exponential is taken as -log1p(-u) with a u that is finely spaced near zero, in steps of 2^-31.
    """
    upper = _shifted(streams_at(keys, positions), 33).to(torch.float32)
    uniform = upper.mul_(2.0**-31 * (1.0 - 2.0**-23)).add_(2.0**-32)  # never 0, never 1
    return uniform.neg_().log1p_().neg_().log_().neg_()
