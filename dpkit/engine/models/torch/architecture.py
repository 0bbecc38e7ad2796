"""What of a config.json the transformer needs; what it cannot compute is refused by name.

Plain data; knows neither torch nor files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ARCHITECTURES = ("LlamaForCausalLM",)

# Keys that change the computation, and the values under which they don't.
_PLAIN = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}


@frozen(kw_only=True)
class Architecture:
    """The shape of a Llama-family transformer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    max_positions: int
    tied: bool  # the output projection is the embedding


def read_architecture(path: Path, config: Mapping[str, Any]) -> Architecture:
    """Take what is needed from the `config` of the model at `path`.

    Raises:
        ModelUnsupported: it asks for something that isn't built, or lacks something.
    """
    _refuse_others(path, config)
    try:
        heads = config["num_attention_heads"]
        return Architecture(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_epsilon=config["rms_norm_eps"],
            rope_theta=_rope(config).get("rope_theta") or config["rope_theta"],
            max_positions=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ModelUnsupported(f"{path}: its config has no {error.args[0]!r}") from error


def _refuse_others(path: Path, config: Mapping[str, Any]) -> None:
    architecture = next(iter(config.get("architectures") or ()), "none named")
    if architecture not in _ARCHITECTURES:
        raise ModelUnsupported(
            f"{path}: architecture {architecture} is not supported; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    for key, supported in _PLAIN.items():
        if (value := config.get(key, supported[0])) not in supported:
            raise ModelUnsupported(f"{path}: {key} = {value!r} is not supported")
    rope = _rope(config)
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise ModelUnsupported(f"{path}: rope scaling {kind!r} is not supported")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters under their newer name, or their older one, which may be null."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope
