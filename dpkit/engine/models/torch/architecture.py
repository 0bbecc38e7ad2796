"""What of a config.json the transformer needs; what it cannot compute is refused by name.

Plain data; knows neither torch nor files. Four families are one transformer: they differ in which
projections have a bias, and in whether each head of queries and keys is normalised.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

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


def named_architecture(config: Mapping[str, Any]) -> str:
    """The class that the config says it is for."""
    name: str = next(iter(config.get("architectures") or ()), "none named")
    return name


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether `read_architecture` knows the architecture; it may still refuse an option of it."""
    return named_architecture(config) in _FAMILIES


def read_architecture(path: Path, config: Mapping[str, Any]) -> Architecture:
    """Take what is needed from the `config` of the model at `path`.

    Raises:
        ModelUnsupported: it asks for something that isn't built, or lacks something.
    """
    family = _family(path, config)
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        more = [names for key, names in _BIASES.items() if config.get(key)]
        return Architecture(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            norm_epsilon=config["rms_norm_eps"],
            rope_theta=_rope(config).get("rope_theta") or config["rope_theta"],
            rope_divisors=_rope_divisors(path, config, head_dim),
            max_positions=usable_positions(config),
            biases=frozenset(family.biases).union(*more),
            head_norms=family.head_norms,
            tied=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ModelUnsupported(f"{path}: its config has no {error.args[0]!r}") from error


def read_shape(path: Path, config: Mapping[str, Any]) -> Shape:
    """As much of any architecture, ours or not, as its config says in the usual words.

    Raises:
        ModelUnsupported: it is ours and asks for something that isn't built, or it lacks something.
    """
    if is_ours(config):
        return read_architecture(path, config)
    try:
        heads = config["num_attention_heads"]
        return Shape(
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_positions=usable_positions(config),
        )
    except KeyError as error:
        raise ModelUnsupported(
            f"{path}: architecture {named_architecture(config)}: its config has no "
            f"{error.args[0]!r}"
        ) from error


def usable_positions(config: Mapping[str, Any]) -> int:
    """Tokens that a text may have: no more than a sliding window, within which it changes nothing.

    Layers that look back only so far would need masks and blocks of their own to gain long texts
    that the few models with a window were hardly trained on.
    """
    positions: int = config["max_position_embeddings"]
    window: int | None = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return positions
    return min(positions, window)


def _family(path: Path, config: Mapping[str, Any]) -> _Family:
    name = named_architecture(config)
    if (family := _FAMILIES.get(name)) is None:
        raise ModelUnsupported(
            f"{path}: architecture {name} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    for key, plain in _PLAIN.items():
        if (value := config.get(key, plain)) != plain:
            raise ModelUnsupported(f"{path}: {key} = {value!r} is not supported")
    return family


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters under their newer name, or their older one, which may be null."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope


def _rope_divisors(path: Path, config: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """By what each rotary frequency is divided, for texts longer than the model was made for."""
    rope = _rope(config)
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelUnsupported(f"{path}: partial_rotary_factor = {part} is not supported")
    match kind := rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return ()
        case "llama3":
            theta = rope.get("rope_theta") or config["rope_theta"]
            return _llama3_divisors(rope, theta, head_dim)
        case "divisors":  # as a GGUF file has them
            return tuple(rope["divisors"])
        case _:
            raise ModelUnsupported(f"{path}: rope scaling {kind!r} is not supported")


def _llama3_divisors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Long waves are slowed by `factor`, short ones stay, and those between are blended."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (exponent / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)
