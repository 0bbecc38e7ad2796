"""What one engine may hold and do at once: the config's word where given, else the model's own.

Knows numbers only; the config layer reads them from the file, the scheduler obeys them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen, validators

from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from dpkit.messages import ModelSpec

DEFAULT_KV_TOKENS = 65_536  # for a model that says nothing: 64 requests of 1,024 tokens

_positive = validators.ge(1)


@frozen(kw_only=True)
class EngineLimits:
    """Bounds of one engine's scheduler and block pool."""

    max_num_seqs: int = field(validator=_positive)  # requests running at once
    max_num_batched_tokens: int = field(validator=_positive)  # tokens of one step
    block_size: int = field(validator=_positive)  # tokens of one KV block
    num_blocks: int = field(validator=_positive)
    prefix_cache: bool = True
    max_model_len: int | None = field(default=None, validator=validators.optional(_positive))

    @property
    def kv_tokens(self) -> int:
        """Tokens that the block pool holds."""
        return self.num_blocks * self.block_size


def resolve_limits(
    spec: ModelSpec,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    memory: int | None = None,
    prefix_cache: bool = True,
) -> EngineLimits:
    """Fill in what the config leaves out.

    Args:
        spec: The model's own defaults.
        max_num_seqs: Requests running at once; None: the model's default.
        max_num_batched_tokens: Tokens of one step; None: the model's default.
        block_size: Tokens of one KV block.
        num_blocks: Size of the pool in blocks.
        memory: Size of the pool in bytes, when `num_blocks` is None.
        prefix_cache: Whether requests may share blocks of equal prefixes.

    Raises:
        ConfigError: the pool would have no block, or `memory` is given for a model that holds none.
    """
    return EngineLimits(
        max_num_seqs=max_num_seqs or spec.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or spec.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks or _pool_size(spec, block_size, memory),
        prefix_cache=prefix_cache,
        max_model_len=spec.max_model_len,
    )


def _pool_size(spec: ModelSpec, block_size: int, memory: int | None) -> int:
    if memory is None:
        tokens = spec.kv_tokens or DEFAULT_KV_TOKENS
        pool = f"the model's {tokens} tokens of KV"
    elif spec.kv_bytes_per_token == 0:
        raise ConfigError(
            ["kv.memory: this model holds no KV cache in memory; give kv.num_blocks instead"]
        )
    else:
        tokens = memory // spec.kv_bytes_per_token
        pool = f"kv.memory of {memory} bytes ({spec.kv_bytes_per_token} a token)"
    if tokens < block_size:
        raise ConfigError(
            [f"kv.block_size: {pool} holds no block of {block_size} tokens; make it larger"]
        )
    return tokens // block_size
