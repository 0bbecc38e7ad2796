"""Log-probabilities of tokens as the wire has them: arrays with a row a token, and back.

Column 0 is the token itself, the others are the likeliest ones, best first. The wire has 32-bit
floats. Knows nothing of requests and engines.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dpkit.errors import ModelFailed, WireError
from dpkit.messages import TokenLogprob
from dpkit.sampling import MOST_TOKENS
from dpkit.wire.structs import LogprobArrays, PromptLogprobArrays
from dpkit.wire.tensors import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.wire.tensors import Tensor


def arrays_of_output(told: Sequence[TokenLogprob]) -> LogprobArrays | None:
    """Arrays of what a model told of output tokens; None of nothing.

    Raises:
        ModelFailed: the model told what are no numbers.
    """
    return LogprobArrays(*_arrays(told, "<i4", "<f4")) if told else None


def arrays_of_prompt(told: Sequence[TokenLogprob]) -> PromptLogprobArrays | None:
    """Arrays of what a model told of prompt tokens; None of nothing.

    Raises:
        ModelFailed: the model told what are no numbers.
    """
    return PromptLogprobArrays(*_arrays(told, "int32", "float32")) if told else None


def _arrays(told: Sequence[TokenLogprob], whole: str, real: str) -> tuple[Tensor, Tensor, Tensor]:
    width = 1 + max(len(logprob.top) for logprob in told)
    cells = [cell for logprob in told for cell in _row(logprob, width)]
    shape = (len(told), width)
    try:
        token_ids, values = zip(*cells, strict=True)
        return (
            pack(whole, shape, token_ids),
            pack(real, shape, values),
            pack(whole, shape[:1], [logprob.rank for logprob in told]),
        )
    except (ValueError, TypeError) as error:
        raise ModelFailed(f"the model told logprobs that cannot be sent: {error}") from error


def _row(logprob: TokenLogprob, width: int) -> list[tuple[int, float]]:
    """One token's cells. A model that names fewer tokens for some than for others leaves gaps."""
    row = [(logprob.token_id, logprob.logprob), *logprob.top]
    return row + [_gap(logprob.token_id)] * (width - len(row))


def _gap(token_id: int) -> tuple[int, float]:
    """What fills a row: the token again, as impossible. Readers that go by token lose nothing."""
    return token_id, -math.inf


def told_by(arrays: LogprobArrays | PromptLogprobArrays, top: int) -> tuple[TokenLogprob, ...]:
    """What arrays say, a token a row, with at most `top` of the likeliest; -1: with all.

    Raises:
        WireError: they do not fit each other.
    """
    rows, *columns = arrays.token_ids.shape or (0,)
    if len(columns) != 1 or columns[0] < 1:
        raise WireError(f"logprobs have a row a token, not shape {arrays.token_ids.shape}")
    if arrays.logprobs.shape != arrays.token_ids.shape or arrays.ranks.shape != (rows,):
        raise WireError(f"logprobs of different shapes: {arrays!r:.200}")
    try:
        token_ids, ranks = _whole(arrays.token_ids), _whole(arrays.ranks)
        values = unpack(arrays.logprobs)
    except ValueError as error:
        raise WireError(f"cannot read logprobs: {error}") from error
    cells = list(zip(token_ids, values, strict=True))
    starts = range(0, len(cells), columns[0])
    width = columns[0] if top < 0 else min(1 + top, columns[0])
    return tuple(
        _token_logprob(cells[start : start + width], rank)
        for start, rank in zip(starts, ranks, strict=True)
    )


def _whole(tensor: Tensor) -> tuple[int, ...]:
    numbers = unpack(tensor)
    if "f" in tensor.dtype:
        raise ValueError(f"token ids and ranks are whole numbers, not {tensor.dtype}")
    if numbers and not (min(numbers) >= 0 and max(numbers) <= MOST_TOKENS):
        raise ValueError(f"token ids and ranks are 0 to {MOST_TOKENS}")
    return tuple(map(int, numbers))


def _token_logprob(row: list[tuple[int, float]], rank: int) -> TokenLogprob:
    (token_id, logprob), *top = row
    gap = _gap(token_id)
    while top and top[-1] == gap:
        top.pop()
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
