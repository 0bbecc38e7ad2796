"""What a transformer tells the scheduler of itself, by its config.json alone.

Plain data, so that `dpkit explain` can say what a model holds without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.messages import ModelSpec

if TYPE_CHECKING:
    from dpkit.engine.models.torch.architecture import Architecture

# A CPU's tokens per second stop rising at about this many sequences: from there on attention,
# which no batch shares, costs more than the weights.
_MAX_NUM_SEQS = 32

# On a CPU a longer prefill is no faster per token, and every decode of its step waits for it.
_MAX_NUM_BATCHED_TOKENS = 256

# 32 requests of 256 tokens, or one of SmolLM2's whole context: 377 MB of its KV in float32, which
# the kernel hands out as they are first written to.
_KV_TOKENS = 8192

_FLOAT32_BYTES = 4


def model_spec(
    architecture: Architecture,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    kv_item_bytes: int = _FLOAT32_BYTES,
) -> ModelSpec:
    """The spec of a model of this shape, whose KV cache has items of this many bytes."""
    per_layer = 2 * architecture.num_kv_heads * architecture.head_dim
    return ModelSpec(
        max_model_len=architecture.max_positions,
        eos_token_ids=eos_token_ids,
        vocab_size=architecture.vocab_size,
        tells_logprobs=True,
        kv_bytes_per_token=architecture.num_layers * per_layer * kv_item_bytes,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        kv_tokens=_KV_TOKENS,
    )
