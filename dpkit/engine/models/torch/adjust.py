"""Scores changed for single tokens: what was said or read before, what is favoured, what is banned.

In vLLM's order: ban, bias, repetition, then frequency and presence; all before temperature. Only
the tokens concerned are touched, so a request pays for its own text, and one without any of this
pays nothing. Knows nothing of how a token is then chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.messages import BatchRow
    from dpkit.sampling import SamplingParams


def adjust(scores: Tensor, rows: Sequence[BatchRow]) -> None:
    """Change `scores` [rows, vocabulary] in place, as each row's request wants it."""
    for row_scores, row in zip(scores, rows, strict=True):
        sampling = row.sampling
        if row.banned_token_ids:
            row_scores[[*row.banned_token_ids]] = -torch.inf
        if sampling.logit_bias:
            _add_bias(row_scores, sampling)
        if sampling.repetition_penalty != 1.0:
            _penalise_repetition(row_scores, row)
        if sampling.frequency_penalty or sampling.presence_penalty:
            _penalise_presence(row_scores, row)


def _add_bias(scores: Tensor, sampling: SamplingParams) -> None:
    token_ids, biases = zip(*sampling.logit_bias, strict=True)
    scores.index_add_(0, torch.tensor(token_ids), torch.tensor(biases, dtype=scores.dtype))


def _penalise_repetition(scores: Tensor, row: BatchRow) -> None:
    """Towards less likely whatever the sign: a positive score is divided, a negative multiplied."""
    seen = torch.from_numpy(np.unique([*row.prompt_token_ids, *row.output_token_ids]))
    penalty = row.sampling.repetition_penalty
    before = scores[seen]
    scores[seen] = torch.where(before > 0.0, before / penalty, before * penalty)


def _penalise_presence(scores: Tensor, row: BatchRow) -> None:
    said, counts = np.unique(np.asarray(row.output_token_ids, np.int64), return_counts=True)
    of_each = torch.from_numpy(counts) * row.sampling.frequency_penalty
    scores[torch.from_numpy(said)] -= of_each + row.sampling.presence_penalty
