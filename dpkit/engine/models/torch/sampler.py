"""From scores to tokens: greedy, temperature, top-k, min-p, top-p.

The randomness of a token is a pure function of (seed, output index, token id). Nothing is
remembered between steps, so batch mates, chunking, preemption and another engine cannot change
what a seeded request says. Each candidate runs its own race: what a filter takes away changes
nothing for those who stay, and a rounding error in a score changes the winner only where two were
that close (one uniform number, looked up in the running sum of shares, would be moved by every
error before it).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from dpkit.engine.models.torch.noise import gumbel, stream_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dpkit.messages import SamplingParams

# Below this, the share of the best token is one for all that float32 can tell.
_GREEDY_BELOW = 1e-5

# Candidates looked at first where only the best are kept: nearly always they hold all that is. To
# sort a whole row of 49,152 costs as much as the model's work for it.
_WIDTH = 256


@frozen
class Draw:
    """How one row's token is chosen."""

    sampling: SamplingParams
    output_index: int

    @property
    def is_greedy(self) -> bool:
        """The best one, whatever the seed."""
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def is_narrow(self) -> bool:
        """Only some of the best are candidates."""
        return self.is_bounded or self.sampling.top_p < 1.0

    @property
    def is_bounded(self) -> bool:
        """A candidate is told by its score alone, not by the share of those before it."""
        return self.sampling.top_k > 0 or self.sampling.min_p > 0.0

    @property
    def key(self) -> int:
        """Names this draw's stream of noise."""
        return stream_at(self.sampling.seed or 0, self.output_index)


def sample(scores: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose a token for each row of `scores` [rows, vocabulary]."""
    tokens = scores.argmax(dim=-1)
    random = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    if random:
        temperatures = _column([draws[row].sampling.temperature for row in random])
        tokens[random] = _draw(scores[random] / temperatures, [draws[row] for row in random])
    chosen: list[int] = tokens.tolist()
    return chosen


def _draw(values: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token for each row of tempered scores."""
    tokens = torch.empty(len(draws), dtype=torch.int64)
    narrow = [row for row, draw in enumerate(draws) if draw.is_narrow]
    wide = [row for row, draw in enumerate(draws) if not draw.is_narrow]
    if narrow:
        kept, candidates, complete = _narrow(values[narrow], [draws[row] for row in narrow])
        winners = _race(kept, candidates, [draws[row] for row in narrow])
        tokens[narrow] = candidates.gather(1, winners[:, None])[:, 0]
        unsure = [row for row, sure in zip(narrow, complete, strict=True) if not sure]
        if unsure:
            values[unsure] = _filter(values[unsure], [draws[row] for row in unsure])
            wide += unsure
    if wide:
        vocabulary = torch.arange(values.shape[-1])[None]
        tokens[wide] = _race(values[wide], vocabulary, [draws[row] for row in wide])
    return tokens


def _race(values: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Index of each row's winner: the Gumbel-max trick, which is sampling from the softmax."""
    keys = torch.tensor([draw.key for draw in draws])[:, None]
    return (values + gumbel(keys, tokens)).argmax(dim=-1)


def _narrow(values: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor, list[bool]]:
    """The best of each row, what is filtered out at -inf; their tokens; whether that is all."""
    best, tokens = values.topk(min(_WIDTH, values.shape[-1]))
    bound, least = _least_kept(best, values.logsumexp(-1, keepdim=True), draws)
    # Shares are of what the bound leaves: as long as that may go on, they are not known.
    is_bounded = torch.tensor([draw.is_bounded for draw in draws])[:, None]
    complete: list[bool] = (best[:, -1:] < torch.where(is_bounded, bound, least))[:, 0].tolist()
    return best.masked_fill(best < least, -torch.inf), tokens, complete


def _filter(values: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Whole rows with what is filtered out at -inf."""
    # numpy's vectorised sort takes a quarter of the time of torch's, which carries indices along.
    ranked = torch.from_numpy(-np.sort(-values.numpy(), axis=-1))
    _, least = _least_kept(ranked, values.logsumexp(-1, keepdim=True), draws)
    return values.masked_fill(values < least, -torch.inf)


def _least_kept(ranked: Tensor, log_mass: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The lowest values that top-k and min-p keep, and that top-p keeps too, each [rows, 1].

    Top-k and min-p first; of what they leave, top-p keeps as few as hold that share. Equals of the
    lowest are kept with it, so nothing depends on the order of equals. Where `ranked` (descending)
    ends before an answer does, the answer is its last value or less.
    """
    width = ranked.shape[-1]
    top_k = _column([draw.sampling.top_k or sys.maxsize for draw in draws])
    top_p = _column([draw.sampling.top_p for draw in draws])
    min_p = _column([draw.sampling.min_p for draw in draws])
    kth = ranked.gather(1, top_k.clamp(max=width) - 1)
    bound = torch.maximum(kth, ranked[:, :1] + min_p.log())
    left = ranked.masked_fill(ranked < bound, -torch.inf)
    is_bounded = (top_k < sys.maxsize) | (min_p > 0.0)
    log_mass = torch.where(is_bounded, left.logsumexp(-1, keepdim=True), log_mass)
    reached = (left - log_mass).exp().cumsum(-1)
    needed = 1 + (reached < top_p).sum(-1, keepdim=True)
    pth = ranked.gather(1, needed.clamp(max=width) - 1)
    # A share of 1 keeps all, rounding or not.
    return bound, torch.where(top_p < 1.0, torch.maximum(bound, pth), bound)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers)[:, None]
