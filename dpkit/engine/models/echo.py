"""The model that says back what it was told. Deterministic, instant, needs no files.

For trying out configs and for tests: what a request must get is known from its prompt alone, so any
token lost, repeated or mixed up by batching, preemption or balancing shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dpkit.abc import Model
from dpkit.messages import ModelSpec, StepResult
from dpkit.text.bytes import EOS_TOKEN_ID, VOCAB_SIZE, ByteTokenizer

if TYPE_CHECKING:
    from dpkit.messages import Batch, BatchRow


def echo_token(row: BatchRow) -> int | None:
    """Token that `row` samples if the prompt is repeated without end."""
    if row.output_index is None:
        return None
    return row.prompt_token_ids[row.output_index % len(row.prompt_token_ids)]


class EchoModel(Model):
    """Output token i is prompt token i, then the end; with `ignore_eos` it starts over."""

    inline: ClassVar[bool] = True
    spec = ModelSpec(eos_token_ids=frozenset({EOS_TOKEN_ID}), vocab_size=VOCAB_SIZE)

    def tokenizer(self) -> ByteTokenizer:
        """Bytes."""
        return ByteTokenizer()

    def execute(self, batch: Batch, cache: Any) -> StepResult:  # noqa: ARG002 - it has none
        """Sample every row from its own prompt."""
        return StepResult(sampled=[_echo_once(row) for row in batch.rows])


def _echo_once(row: BatchRow) -> int | None:
    said_all = row.output_index == len(row.prompt_token_ids)
    return EOS_TOKEN_ID if said_all and not row.sampling.ignore_eos else echo_token(row)
