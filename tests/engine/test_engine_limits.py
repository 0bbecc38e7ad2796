"""The config's word where given, else the model's own."""

from __future__ import annotations

from typing import Any

import pytest

from dpkit.engine.limits import DEFAULT_KV_TOKENS, EngineLimits, resolve_limits
from dpkit.errors import ConfigError
from dpkit.messages import ModelSpec

SPEC = ModelSpec(
    max_model_len=512,
    kv_bytes_per_token=100,
    max_num_seqs=7,
    max_num_batched_tokens=70,
    kv_tokens=1000,
)


def test_the_model_supplies_what_the_config_leaves_out() -> None:
    assert resolve_limits(SPEC) == EngineLimits(
        max_num_seqs=7,
        max_num_batched_tokens=70,
        block_size=16,
        num_blocks=62,
        prefix_cache=True,
        max_model_len=512,
    )
    assert resolve_limits(SPEC).kv_tokens == 62 * 16
    assert resolve_limits(ModelSpec()).kv_tokens == DEFAULT_KV_TOKENS


def test_the_config_has_the_last_word() -> None:
    limits = resolve_limits(
        SPEC,
        max_num_seqs=2,
        max_num_batched_tokens=20,
        block_size=8,
        num_blocks=5,
        prefix_cache=False,
    )
    assert limits == EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=20,
        block_size=8,
        num_blocks=5,
        prefix_cache=False,
        max_model_len=512,
    )
    assert resolve_limits(SPEC, memory=16 * 100 * 3 + 99).num_blocks == 3


@pytest.mark.parametrize(
    ("spec", "kv", "message"),
    [
        (
            SPEC,
            {"memory": 1599},
            "kv.memory: must be at least 1,600 bytes, one block of 16 tokens; got 1,599 bytes",
        ),
        (
            SPEC,
            {"block_size": 1001},
            "kv.block_size: must be at most 1000, the model's KV cache in tokens; got 1001",
        ),
        (
            ModelSpec(),
            {"memory": 10**9},
            "kv.memory: this model holds no KV cache in memory; give num_blocks instead",
        ),
    ],
)
def test_a_pool_of_nothing_is_a_config_error(
    spec: ModelSpec, kv: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_limits(spec, **kv, within="engines.smol")
    assert caught.value.problems == (f"engines.smol.{message}",)
