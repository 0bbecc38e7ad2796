"""What one engine may hold and do at once: the config's word where given, else the model's own.

Knows numbers only; the config layer reads them from the file, the scheduler obeys them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen, validators

from dpkit.errors import ConfigError
from dpkit.messages import Room

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
    # Of a step's tokens, what long prompts may take while others have something to compute.
    long_prefill_share: float = field(default=1.0, validator=[validators.gt(0), validators.le(1)])
    max_model_len: int | None = field(default=None, validator=validators.optional(_positive))

    @property
    def kv_tokens(self) -> int:
        """Tokens that the block pool holds."""
        return self.num_blocks * self.block_size

    @property
    def room(self) -> Room:
        """What a policy is told of it."""
        return Room(
            tokens_per_step=self.max_num_batched_tokens,
            requests=self.max_num_seqs,
            kv_tokens=self.kv_tokens,
            has_prefix_cache=self.prefix_cache,
        )


class BadLimit(ConfigError):  # noqa: N818 - reads as what happened, like the others of the tree
    """A key of a config asks for what this model cannot do."""

    def __init__(self, key: tuple[str, ...], message: str, within: str) -> None:
        super().__init__([f"{within}.{'.'.join(key)}: {message}"])
        self.key = key
        self.message = message


def resolve_limits(
    spec: ModelSpec,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    memory: int | None = None,
    prefix_cache: bool = True,
    long_prefill_share: float = 1.0,
    within: str = "engines",
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
        long_prefill_share: Of a step's tokens, what long prompts may take while others wait.
        within: The table of a config that says so: errors name its keys.

    Raises:
        BadLimit: the pool would have no block, or `memory` is given for a model that holds none.
    """
    return EngineLimits(
        max_num_seqs=max_num_seqs or spec.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or spec.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks or _pool_size(spec, block_size, memory, within),
        prefix_cache=prefix_cache,
        long_prefill_share=long_prefill_share,
        max_model_len=spec.max_model_len,
    )


def _pool_size(spec: ModelSpec, block_size: int, memory: int | None, within: str) -> int:
    per_token = spec.kv_bytes_per_token
    if memory is None:
        tokens = spec.kv_tokens or DEFAULT_KV_TOKENS
        if tokens < block_size:
            problem = f"must be at most {tokens}, the model's KV cache in tokens; got {block_size}"
            raise BadLimit(("kv", "block_size"), problem, within)
        return tokens // block_size
    if per_token == 0:
        problem = "this model holds no KV cache in memory; give num_blocks instead"
        raise BadLimit(("kv", "memory"), problem, within)
    if (blocks := memory // per_token // block_size) == 0:
        least = f"{block_size * per_token:,} bytes, one block of {block_size} tokens"
        raise BadLimit(("kv", "memory"), f"must be at least {least}; got {memory:,} bytes", within)
    return blocks
