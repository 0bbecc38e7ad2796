"""Log-probabilities for those who ask: of the model's own scores, before anything changes them.

One log_softmax over the asking rows. Knows nothing of batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dpkit.messages import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def describe(
    logprobs: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    """Say of each row of `logprobs` [rows, vocabulary] how likely its token was.

    Args:
        logprobs: Logarithms of shares.
        token_ids: The token of each row.
        counts: How many of the likeliest to name for each row.
    """
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None])
    ranks: list[int] = (1 + (logprobs > chosen).sum(-1)).tolist()
    best, best_ids = logprobs.topk(min(max(counts), logprobs.shape[-1]))
    rows = zip(
        token_ids,
        chosen[:, 0].tolist(),
        ranks,
        best_ids.tolist(),
        best.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top=tuple(zip(ids[:count], values[:count], strict=True)),
        )
        for token_id, logprob, rank, ids, values, count in rows
    ]
