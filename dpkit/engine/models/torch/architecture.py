"""What of a config.json the transformer needs; what it cannot compute is refused by name.

Plain data; knows neither torch nor files. Four families are one transformer: they differ in which
projections have a bias, and in whether each head of queries and keys is normalised.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from dpkit.checkpoint.fields import Fields
from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@frozen(kw_only=True)
class _Family:
    """How an architecture differs from Llama."""

    biases: tuple[str, ...] = ()  # projections that have one whatever the config says
    head_norms: bool = False


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(),
        "MistralForCausalLM": _Family(),
        "Qwen2ForCausalLM": _Family(biases=("q_proj", "k_proj", "v_proj")),
        "Qwen3ForCausalLM": _Family(head_norms=True),
    }
)

# Keys that give more projections a bias.
_BIASES = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}

# Keys that change the computation, and the values under which they don't.
_PLAIN: Mapping[str, object] = MappingProxyType({"hidden_act": "silu", "quantization_config": None})

_MOST_PARTS = 65_536  # layers, heads, or dimensions of a head: beyond that a file is damaged


@frozen(kw_only=True)
class Shape:
    """What the KV cache and the scheduler must know of a model."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


@frozen(kw_only=True)
class Architecture(Shape):
    """The shape of a Llama-family transformer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_epsilon: float
    rope_theta: float
    rope_divisors: tuple[float, ...]  # one a frequency; empty: all 1
    biases: frozenset[str]  # projections that have one
    head_norms: bool  # each head of queries and keys is normalised before it is rotated
    tied: bool  # the output projection is the embedding


def config_fields(path: Path, config: Mapping[str, Any]) -> Fields:
    """The `config` of the model at `path`, which is a directory or a `.gguf` file."""
    return Fields(str(path if path.suffix == ".gguf" else path / "config.json"), config)


def named_architecture(path: Path, config: Mapping[str, Any]) -> str:
    """The class that the config says it is for.

    Raises:
        ModelUnsupported: what it says is no name.
    """
    fields, key = config_fields(path, config), "architectures"
    names = fields.strings(key, default=())
    if not all(map(str.isidentifier, names)):
        fields.refuse(key, "must be a list of class names", names)
    return next(iter(names), "none named")


def is_ours(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether `read_architecture` knows the architecture; it may still refuse an option of it."""
    return named_architecture(path, config) in _FAMILIES


def read_architecture(path: Path, config: Mapping[str, Any]) -> Architecture:
    """Take what is needed from the `config` of the model at `path`.

    Raises:
        ModelUnsupported: it asks for something that isn't built, or lacks something.
    """
    fields = config_fields(path, config)
    family = _family(path, fields)
    shape = _read_shape(fields)
    more = [names for key, names in _BIASES.items() if fields.flag(key, default=False)]
    return Architecture(
        **asdict(shape),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_heads=fields.whole("num_attention_heads"),
        norm_epsilon=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        rope_divisors=_rope_divisors(fields, shape.head_dim),
        biases=frozenset(family.biases).union(*more),
        head_norms=family.head_norms,
        tied=fields.flag("tie_word_embeddings", default=False),
    )


def read_shape(path: Path, config: Mapping[str, Any]) -> Shape:
    """As much of any architecture, ours or not, as its config says in the usual words.

    Raises:
        ModelUnsupported: it is ours and asks for something that isn't built, or it lacks something.
    """
    if is_ours(path, config):
        return read_architecture(path, config)
    fields = config_fields(path, config)
    name = named_architecture(path, config)
    return _read_shape(evolve(fields, where=f"{fields.where}: architecture {name}"))


def _read_shape(fields: Fields) -> Shape:
    heads = fields.whole("num_attention_heads", most=_MOST_PARTS)
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"must divide the {heads} attention heads", kv_heads)
    hidden = fields.whole("hidden_size", least=heads)
    head_dim = fields.whole("head_dim", default=hidden // heads, most=_MOST_PARTS)
    if head_dim % 2:
        fields.refuse("head_dim", "must be even, since dimensions rotate in pairs", head_dim)
    return Shape(
        vocab_size=fields.whole("vocab_size"),
        num_layers=fields.whole("num_hidden_layers", most=_MOST_PARTS),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_usable_positions(fields),
    )


def _usable_positions(fields: Fields) -> int:
    """Tokens that a text may have: no more than a sliding window, within which it changes nothing.

    Layers that look back only so far would need masks and blocks of their own to gain long texts
    that the few models with a window were hardly trained on.
    """
    positions = fields.whole("max_position_embeddings")
    if not fields.flag("use_sliding_window", default=True):
        return positions
    return min(positions, fields.whole("sliding_window", default=positions))


def _family(path: Path, fields: Fields) -> _Family:
    name = named_architecture(path, fields.values)
    if (family := _FAMILIES.get(name)) is None:
        raise ModelUnsupported(
            f"{fields.where}: architecture {name} is not supported; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    for key, plain in _PLAIN.items():
        if (value := fields.values.get(key, plain)) != plain:
            raise ModelUnsupported(f"{fields.where}: {key} = {value!r:.100} is not supported")
    return family


def _rope(fields: Fields) -> Fields:
    """Rotary parameters under their newer name, or their older one, which may be null."""
    newer = fields.table("rope_parameters")
    return newer if newer.values else fields.table("rope_scaling")


def _rope_theta(fields: Fields) -> float:
    rope = _rope(fields)
    return (rope if rope.has("rope_theta") else fields).number("rope_theta", most=1e30)


def _rope_divisors(fields: Fields, head_dim: int) -> tuple[float, ...]:
    """By what each rotary frequency is divided, for texts longer than the model was made for."""
    rope = _rope(fields)
    if (part := rope.number("partial_rotary_factor", default=1.0)) != 1.0:
        raise ModelUnsupported(f"{rope.where}: partial_rotary_factor = {part} is not supported")
    key = "rope_type" if rope.has("rope_type") else "type"
    match kind := rope.string(key, default="default"):
        case "default":
            return ()
        case "llama3":
            return _llama3_divisors(rope, _rope_theta(fields), head_dim)
        case "divisors":  # as a GGUF file has them
            divisors = tuple(rope.numbers("divisors"))
            if len(divisors) != head_dim // 2 or min(divisors) <= 0:
                rope.refuse("divisors", f"must be {head_dim // 2} positive numbers", divisors)
            return divisors
        case _:
            raise ModelUnsupported(f"{rope.where}: rope scaling {kind!r} is not supported")


def _llama3_divisors(rope: Fields, theta: float, head_dim: int) -> tuple[float, ...]:
    """Long waves are slowed by `factor`, short ones stay, and those between are blended."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        rope.refuse("high_freq_factor", f"must be above low_freq_factor, {low:g}", high)
    positions = rope.whole("original_max_position_embeddings")
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (exponent / head_dim)
        turns = positions / wavelength
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)
