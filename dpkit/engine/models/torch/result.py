"""From a step's scores to its result: the tokens, and logprobs for those who ask for them.

The one place that knows in which order `TensorBatch.sampled` asks for scores: first one for each
row that samples, then one for each prompt token that is to be scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dpkit.engine.models.torch.adjust import adjust
from dpkit.engine.models.torch.logprobs import describe
from dpkit.engine.models.torch.sampler import Draw, sample
from dpkit.messages import StepResult, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from dpkit.messages import Batch, BatchRow


def make_result(batch: Batch, scores: Tensor) -> StepResult:
    """Sample and describe; `scores` is overwritten.

    Args:
        batch: What was computed.
        scores: [rows that sample + prompt tokens to be scored, vocabulary].
    """
    sampling = {i: row for i, row in enumerate(batch.rows) if row.output_index is not None}
    prompts = _describe_prompts(batch, scores[len(sampling) :])
    tokens, logprobs = _sample(scores[: len(sampling)], sampling)
    return StepResult(
        sampled=[tokens.get(index) for index in range(len(batch.rows))],
        logprobs=logprobs,
        prompt_logprobs=prompts,
    )


def _sample(
    scores: Tensor, rows: dict[int, BatchRow]
) -> tuple[dict[int, int], dict[int, TokenLogprob]]:
    """A token for each of `rows` (by their index in the batch), and what is told of it."""
    asked = {
        index: place
        for place, (index, row) in enumerate(rows.items())
        if row.sampling.logprobs is not None
    }
    own = scores[[*asked.values()]].log_softmax(-1) if asked else None  # `adjust` overwrites them
    adjust(scores, [*rows.values()])
    draws = [Draw(row.sampling, row.output_index or 0) for row in rows.values()]
    tokens = dict(zip(rows, sample(scores, draws), strict=True))
    if own is None:
        return tokens, {}
    counts = [rows[index].sampling.logprobs or 0 for index in asked]
    told = describe(own, [tokens[index] for index in asked], counts)
    return tokens, dict(zip(asked, told, strict=True))


def _describe_prompts(batch: Batch, scores: Tensor) -> dict[int, list[TokenLogprob]]:
    if not len(scores):
        return {}
    told: dict[int, list[TokenLogprob]] = {}
    pieces = torch.split(scores, [len(row.scored) for row in batch.rows])
    for index, (row, piece) in enumerate(zip(batch.rows, pieces, strict=True)):
        if row.scored:
            token_ids = row.prompt_token_ids[row.scored.start : row.scored.stop]
            counts = [row.sampling.prompt_logprobs or 0] * len(token_ids)
            told[index] = describe(piece.log_softmax(-1), token_ids, counts)
    return told
