"""A Llama-family transformer over a flat batch of tokens and a paged KV cache.

Weights under Hugging Face's names, float32, used where they lie: views of the mapped file, which
all engines and all processes share. Stateless, so several threads may run it at once. Knows
nothing of requests, sampling or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from dpkit.engine.models.torch.attention import attend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from dpkit.engine.models.torch.architecture import Architecture
    from dpkit.engine.models.torch.batch import TensorBatch

    Read = Callable[[str], Tensor]


class Linear:
    """The one place where activations meet a weight matrix."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight  # [outputs, inputs]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Multiply [tokens, inputs] to [tokens, outputs]."""
        return F.linear(inputs, self._weight)


@frozen(kw_only=True)
class Layer:
    """One layer's weights."""

    attention_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Transformer:
    """Tokens in, scores of the next token out."""

    def __init__(self, architecture: Architecture, read: Read) -> None:
        self.architecture = architecture
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [_read_layer(read, index) for index in range(architecture.num_layers)]
        self._norm = read("model.norm.weight")
        self._head = Linear(self._embedding if architecture.tied else read("lm_head.weight"))
        self._inverse_wavelengths = _inverse_wavelengths(architecture)

    def __call__(self, step: TensorBatch, cache: Tensor) -> Tensor:
        """Compute one step, storing its keys and values in `cache`.

        Returns:
            Scores [rows that sample, vocabulary] of what follows each of `step.sampled`.
        """
        rotation = self._rotation(step.positions)
        hidden = F.embedding(step.token_ids, self._embedding)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            normed = self._normalise(hidden, layer.attention_norm)
            hidden = hidden + self._attention(layer, normed, rotation, layer_cache, step)
            normed = self._normalise(hidden, layer.mlp_norm)
            hidden = hidden + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
        return self._head(self._normalise(hidden[step.sampled], self._norm))

    def _attention(
        self,
        layer: Layer,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        step: TensorBatch,
    ) -> Tensor:
        heads = (len(hidden), -1, self.architecture.head_dim)
        queries = _rotate(layer.query(hidden).view(heads), *rotation)
        keys = _rotate(layer.key(hidden).view(heads), *rotation)
        values = layer.value(hidden).view(heads)
        return layer.output(attend(queries, keys, values, cache, step).flatten(1))

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.architecture.norm_epsilon)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every token's angles, [tokens, 1, head_dim]."""
        angles = positions[:, None].to(torch.float32) * self._inverse_wavelengths
        both_halves = torch.cat([angles, angles], dim=-1)[:, None]
        return both_halves.cos(), both_halves.sin()


def _read_layer(read: Read, index: int) -> Layer:
    def weight(name: str) -> Tensor:
        return read(f"model.layers.{index}.{name}.weight")

    return Layer(
        attention_norm=weight("input_layernorm"),
        query=Linear(weight("self_attn.q_proj")),
        key=Linear(weight("self_attn.k_proj")),
        value=Linear(weight("self_attn.v_proj")),
        output=Linear(weight("self_attn.o_proj")),
        mlp_norm=weight("post_attention_layernorm"),
        gate=Linear(weight("mlp.gate_proj")),
        up=Linear(weight("mlp.up_proj")),
        down=Linear(weight("mlp.down_proj")),
    )


def _inverse_wavelengths(architecture: Architecture) -> Tensor:
    exponents = torch.arange(0, architecture.head_dim, 2).to(torch.float32) / architecture.head_dim
    inverse: Tensor = 1.0 / architecture.rope_theta**exponents
    return inverse


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim]: dimension i turns with i + half."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine
