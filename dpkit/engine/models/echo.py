"""The model that says back what it was told. Deterministic, instant, needs no files.

For trying out configs and for tests: what a request must get is known from its prompt alone, so any
token lost, repeated or mixed up by batching, preemption or balancing shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dpkit.abc import Model
from dpkit.messages import ModelSpec, StepResult, TokenLogprob
from dpkit.text.bytes import EOS_TOKEN_ID, VOCAB_SIZE, ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.messages import Batch, BatchRow


def echo_token(row: BatchRow) -> int | None:
    """Token that `row` samples if the prompt is repeated without end."""
    if row.output_index is None:
        return None
    return row.prompt_token_ids[row.output_index % len(row.prompt_token_ids)]


def certain(batch: Batch, sampled: Sequence[int | None]) -> StepResult:
    """Result of a model that has no doubts: a token it has said or read has probability 1."""
    return StepResult(
        sampled=sampled,
        logprobs={
            index: _certain(token_id, row.sampling.logprobs)
            for index, (row, token_id) in enumerate(zip(batch.rows, sampled, strict=True))
            if token_id is not None and row.sampling.logprobs is not None
        },
        prompt_logprobs={
            index: [
                _certain(row.prompt_token_ids[place], row.sampling.prompt_logprobs)
                for place in row.scored
            ]
            for index, row in enumerate(batch.rows)
            if row.scored
        },
    )


def _certain(token_id: int, top: int | None) -> TokenLogprob:
    # Never more than one in `top`: the others' logarithm is none.
    likeliest = ((token_id, 0.0),) if top else ()
    return TokenLogprob(token_id=token_id, logprob=0.0, rank=1, top=likeliest)


class EchoModel(Model):
    """Output token i is prompt token i, then the end; with `ignore_eos` it starts over."""

    inline: ClassVar[bool] = True
    spec = ModelSpec(
        eos_token_ids=frozenset({EOS_TOKEN_ID}), vocab_size=VOCAB_SIZE, tells_logprobs=True
    )

    def tokenizer(self) -> ByteTokenizer:
        """Bytes."""
        return ByteTokenizer()

    def execute(self, batch: Batch, cache: Any) -> StepResult:  # noqa: ARG002 - it has none
        """Sample every row from its own prompt."""
        return certain(batch, [_echo_once(row) for row in batch.rows])


def _echo_once(row: BatchRow) -> int | None:
    said_all = row.output_index is not None and row.output_index >= len(row.prompt_token_ids)
    may_end = not row.sampling.ignore_eos and EOS_TOKEN_ID not in row.banned_token_ids
    return EOS_TOKEN_ID if said_all and may_end else echo_token(row)
