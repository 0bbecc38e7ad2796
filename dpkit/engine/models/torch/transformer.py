"""A Llama-family transformer over a flat batch of tokens and a paged KV cache.

Weights under Hugging Face's names. Stateless, so several threads may run it at once. Knows nothing
of requests, sampling or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from dpkit.engine.models.torch.attention import attend
from dpkit.engine.models.torch.linear import Linear, linear_kind
from dpkit.names import Quant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.engine.models.torch.architecture import Architecture
    from dpkit.engine.models.torch.batch import TensorBatch
    from dpkit.engine.models.torch.linear import LinearKind
    from dpkit.engine.models.torch.weights import Weights


@frozen(kw_only=True)
class Layer:
    """One layer's weights."""

    attention_norm: Tensor
    query_key_value: Linear
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Transformer:
    """Tokens in, scores of the next token out."""

    def __init__(
        self, architecture: Architecture, weights: Weights, quant: Quant = Quant.NONE
    ) -> None:
        of = architecture
        self.architecture = of
        self._embedding = weights.read("model.embed_tokens.weight", of.vocab_size, of.hidden_size)
        dtype, device = self._embedding.dtype, self._embedding.device
        kind = linear_kind(dtype, quant, device)
        self._layers = [_LayerReader(of, weights, kind, i).layer() for i in range(of.num_layers)]
        self._norm = weights.read("model.norm.weight", of.hidden_size)
        head = self._embedding
        if not of.tied:
            head = weights.read("lm_head.weight", of.vocab_size, of.hidden_size)
        # Never int4: all that the layers made is decided here.
        self._head = linear_kind(dtype, Quant.NONE, device)([head], [None])
        self._inverse_wavelengths = _inverse_wavelengths(of).to(device)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device

    def __call__(self, step: TensorBatch, cache: Tensor) -> Tensor:
        """Compute one step, storing its keys and values in `cache`.

        Returns:
            Scores [len(step.sampled), vocabulary] of what follows each of `step.sampled`.
        """
        rotation = self._rotation(step.positions)
        hidden = F.embedding(step.token_ids, self._embedding)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            normed = self._normalise(hidden, layer.attention_norm)
            hidden = hidden + self._attention(layer, normed, rotation, layer_cache, step)
            normed = self._normalise(hidden, layer.mlp_norm)
            gate, up = layer.gate_up(normed)
            hidden = hidden + layer.down(F.silu(gate) * up)[0]
        return self._head(self._normalise(hidden[step.sampled], self._norm))[0]

    def _attention(
        self,
        layer: Layer,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        step: TensorBatch,
    ) -> Tensor:
        size = self.architecture.head_dim
        queries, keys, values = (
            part.view(len(hidden), -1, size) for part in layer.query_key_value(hidden)
        )
        if layer.head_norms is not None:
            query_norm, key_norm = layer.head_norms
            queries = self._normalise(queries, query_norm)
            keys = self._normalise(keys, key_norm)
        queries, keys = _rotate(queries, *rotation), _rotate(keys, *rotation)
        return layer.output(attend(queries, keys, values, cache, step).flatten(1))[0]

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.architecture.norm_epsilon)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every token's angles, [tokens, 1, head_dim]."""
        angles = positions[:, None].to(torch.float32) * self._inverse_wavelengths
        both_halves = torch.cat([angles, angles], dim=-1)[:, None]
        return both_halves.cos().to(self.dtype), both_halves.sin().to(self.dtype)


@frozen
class _LayerReader:
    """Reads one layer."""

    of: Architecture
    weights: Weights
    kind: LinearKind
    index: int

    def layer(self) -> Layer:
        of = self.of
        queries, keys = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
        return Layer(
            attention_norm=self._norm("input_layernorm", of.hidden_size),
            query_key_value=self._linear(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                (queries, keys, keys),
                of.hidden_size,
            ),
            head_norms=self._head_norms() if of.head_norms else None,
            output=self._linear(("self_attn.o_proj",), (of.hidden_size,), queries),
            mlp_norm=self._norm("post_attention_layernorm", of.hidden_size),
            gate_up=self._linear(
                ("mlp.gate_proj", "mlp.up_proj"), (of.intermediate_size,) * 2, of.hidden_size
            ),
            down=self._linear(("mlp.down_proj",), (of.hidden_size,), of.intermediate_size),
        )

    def _linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> Linear:
        parts = list(zip(names, outputs, strict=True))
        return self.kind(
            [self._read(f"{name}.weight", size, inputs) for name, size in parts],
            [
                self._read(f"{name}.bias", size) if name.split(".")[1] in self.of.biases else None
                for name, size in parts
            ],
        )

    def _head_norms(self) -> tuple[Tensor, Tensor]:
        size = self.of.head_dim
        return self._norm("self_attn.q_norm", size), self._norm("self_attn.k_norm", size)

    def _norm(self, name: str, size: int) -> Tensor:
        return self._read(f"{name}.weight", size)

    def _read(self, name: str, *shape: int) -> Tensor:
        return self.weights.read(f"model.layers.{self.index}.{name}", *shape)


def _inverse_wavelengths(architecture: Architecture) -> Tensor:
    exponents = torch.arange(0, architecture.head_dim, 2).to(torch.float32) / architecture.head_dim
    inverse: Tensor = 1.0 / architecture.rope_theta**exponents
    if architecture.rope_divisors:
        inverse = inverse / torch.tensor(architecture.rope_divisors)
    return inverse


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim]: dimension i turns with i + half."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine
