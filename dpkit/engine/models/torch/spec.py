"""What a transformer tells the scheduler of itself, by its config.json alone.

Plain data, so that `dpkit explain` can say what a model holds without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.engine.models.torch.precision import ITEM_BYTES
from dpkit.messages import ModelSpec
from dpkit.names import Dtype

if TYPE_CHECKING:
    from dpkit.engine.models.torch.architecture import Shape

# A CPU's tokens per second stop rising at about this many sequences: from there on attention,
# which no batch shares, costs more than the weights.
_MAX_NUM_SEQS = 32

# On a CPU a longer prefill is no faster per token, and every decode of its step waits for it.
_MAX_NUM_BATCHED_TOKENS = 256

# 32 requests of 256 tokens, or one of SmolLM2's whole context: 377 MB of its KV in float32, which
# the kernel hands out as they are first written to.
_KV_TOKENS = 8192


def model_spec(
    shape: Shape,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    dtype: Dtype = Dtype.FLOAT32,
) -> ModelSpec:
    """The spec of a model of this shape that computes, and keeps its KV cache, in `dtype`."""
    per_layer = 2 * shape.num_kv_heads * shape.head_dim
    return ModelSpec(
        max_model_len=shape.max_positions,
        eos_token_ids=eos_token_ids,
        vocab_size=shape.vocab_size,
        tells_logprobs=True,
        kv_bytes_per_token=shape.num_layers * per_layer * ITEM_BYTES[dtype],
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        kv_tokens=_KV_TOKENS,
    )
