"""Where activations meet weight matrices: as they lie in the file, packed for the CPU, or in int4.

Matrices that share their input are one `Linear`: what is packed is packed as one. Packing is done
by private operators of torch, which are tried before they are relied on. Knows nothing of layers.
"""

from __future__ import annotations

import abc
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from dpkit.names import Quant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Operators that torch keeps to itself, for want of anything public: `can_pack` tries them first.
_ONEDNN, _ATEN = torch.ops.mkldnn, torch.ops.aten

_GROUP = 32  # weights of a row that share a scale, as in GGUF's types: finer groups lose nothing
_LEVELS = 15  # steps from the least weight of a group to the greatest
_MIDDLE = 8  # the level whose weight the kernel calls zero
_OUTPUTS = 16  # matrices whose rows are no multiple of this stay as they are


class Linear(Protocol):
    """Matrices that share their input."""

    def __call__(self, inputs: Tensor) -> Sequence[Tensor]:
        """Multiply [tokens, inputs] to [tokens, outputs] for each matrix, and add its bias."""


class LinearKind(Protocol):
    """How matrices are made into a `Linear`."""

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        """Take matrices [outputs, inputs], all in the dtype that is computed in, and biases."""


class Mapped:
    """Weights used where they lie: nothing is copied, processes share them."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._parts = list(zip(weights, biases, strict=True))

    def __call__(self, inputs: Tensor) -> Sequence[Tensor]:
        """See `Linear`."""
        return [F.linear(inputs, weight, bias) for weight, bias in self._parts]


class _Joined(abc.ABC):
    """One matrix of several, one below the other."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._sizes = [len(weight) for weight in weights]
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            zeros = (weight.new_zeros(len(weight)) for weight in weights)
            filled = zip(biases, zeros, strict=True)
            self._bias = torch.cat([zero if bias is None else bias for bias, zero in filled])

    def __call__(self, inputs: Tensor) -> Sequence[Tensor]:
        """See `Linear`."""
        return torch.split(self._multiply(inputs), self._sizes, dim=-1)

    @abc.abstractmethod
    def _multiply(self, inputs: Tensor) -> Tensor:
        """Multiply by the joined matrix and add the joined bias."""


class Fused(_Joined):
    """One private copy, plain."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        super().__init__(weights, biases)
        self._weight = torch.cat([*weights])

    def _multiply(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self._weight, self._bias)


class Packed(_Joined):
    """In the order in which oneDNN reads it: 1.1 to 2 times as fast as plain."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        super().__init__(weights, biases)
        self._weight = _ONEDNN._reorder_linear_weight(torch.cat([*weights]))  # noqa: SLF001

    def _multiply(self, inputs: Tensor) -> Tensor:
        product: Tensor = _ONEDNN._linear_pointwise(  # noqa: SLF001
            inputs, self._weight, self._bias, "none", [], ""
        )
        return product


class Int4(_Joined):
    """Four bits a weight, scale and offset for each group of a row: bfloat16 only."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        super().__init__(weights, biases)
        levels, self._scales = quantise(torch.cat([*weights]))
        self._weight = _ATEN._convert_weight_to_int4pack_for_cpu(levels, 1)  # noqa: SLF001

    def _multiply(self, inputs: Tensor) -> Tensor:
        product: Tensor = _ATEN._weight_int4pack_mm_for_cpu(  # noqa: SLF001
            inputs, self._weight, _GROUP, self._scales
        )
        return product if self._bias is None else product + self._bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels 0 to 15, int32 [outputs, inputs], and scales and middles [groups, outputs, 2]."""
    groups = weight.float().view(len(weight), -1, _GROUP)
    least, greatest = groups.aminmax(dim=-1)
    scale = ((greatest - least) / _LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    levels = ((groups - least[..., None]) / scale[..., None]).round().clamp(0, _LEVELS)
    scales = torch.stack([scale, least + _MIDDLE * scale], dim=-1).transpose(0, 1)
    return levels.flatten(1).to(torch.int32), scales.to(weight.dtype).contiguous()


def linear_kind(dtype: torch.dtype, quant: Quant, device: torch.device) -> LinearKind:
    """The kind for a layer's matrices.

    float32 stays mapped: it is exact, is there at once, and costs nobody a copy.
    """
    if device.type != "cpu":
        return Fused
    if quant is Quant.INT4:
        return _int4_where_it_fits
    if dtype is torch.float32:
        return Mapped
    return Packed if can_pack(dtype) else Fused


def _int4_where_it_fits(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    fits = inputs % _GROUP == 0 and outputs % _OUTPUTS == 0
    kind: LinearKind = Int4 if fits else linear_kind(weights[0].dtype, Quant.NONE, _CPU)
    return kind(weights, biases)


_CPU = torch.device("cpu")


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU has the operators, and they multiply."""
    weight = torch.linspace(-1, 1, 16 * 32).view(16, 32).to(dtype)
    inputs = torch.linspace(-1, 1, 3 * 32).view(3, 32).to(dtype)
    try:
        (packed,) = Packed([weight], [None])(inputs)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(packed.float(), F.linear(inputs, weight).float(), rtol=0.02, atol=0.02)
