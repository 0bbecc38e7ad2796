"""A model that computes nothing and takes as long as the real one would: for simulation.

It says how long a step lasts on the preset's card and leaves the waiting to the busy loop, so on a
virtual clock an hour of serving takes seconds.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from dpkit.abc import Model
from dpkit.costmodel import PRESETS, Preset, StepCost, parse_preset
from dpkit.engine.models.echo import certain, echo_token
from dpkit.errors import ModelNotFound, ModelUnsupported
from dpkit.messages import ModelSpec, StepResult
from dpkit.text.bytes import ByteTokenizer

if TYPE_CHECKING:
    from dpkit.messages import Batch


class CostModel(Model):
    """Repeats the prompt up to `max_tokens`, at the speed of a preset."""

    inline: ClassVar[bool] = True

    def __init__(self, preset: str) -> None:
        """Look the preset up, or read the file that it is in, whose name ends in ``.toml``.

        Raises:
            ModelNotFound: there is none of this name; the message names those there are. Or the
                file cannot be read. ModelUnsupported: it holds no preset.
        """
        found = _read(preset) if preset.endswith(".toml") else _built_in(preset)
        self.cost = found.cost
        self.spec = ModelSpec(
            max_num_seqs=found.max_num_seqs,
            max_num_batched_tokens=found.max_num_batched_tokens,
            kv_tokens=found.kv_tokens,
            tells_logprobs=True,
        )

    def tokenizer(self) -> ByteTokenizer:
        """Bytes."""
        return ByteTokenizer()

    def execute(self, batch: Batch, cache: Any) -> StepResult:  # noqa: ARG002 - it has none
        """Sample by echo; the duration is the preset's."""
        sampled = [echo_token(row) for row in batch.rows]
        duration_s = step_seconds(self.cost, batch)
        if any(row.sampling.logprobs is not None or row.scored for row in batch.rows):
            return evolve(certain(batch, sampled), duration_s=duration_s)
        return StepResult(sampled=sampled, duration_s=duration_s)


def _built_in(preset: str) -> Preset:
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ModelNotFound(f"no cost preset {preset!r}; {hint}there are: {', '.join(PRESETS)}")
    return PRESETS[preset]


def _read(path: str) -> Preset:
    try:
        return parse_preset(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(
            f"cost preset {path!r} cannot be read: {error}; `dpkit fit` makes such a file"
        ) from error
    except ValueError as error:
        raise ModelUnsupported(f"cost preset {path!r}: {error}") from error


def step_seconds(cost: StepCost, batch: Batch) -> float:
    """How long `batch` lasts at these costs.

    A token attends to all before it, so a chunk's tokens have on average the context at its middle.
    """
    decodes = prefill_tokens = decode_context = 0
    prefill_context = 0.0
    for row in batch.rows:
        count = len(row.token_ids)
        if row.is_decode:
            decodes += 1
            decode_context += row.start + 1
        else:
            prefill_tokens += count
            prefill_context += count * (row.start + count / 2)
    return cost.seconds(
        decodes=decodes,
        prefill_tokens=prefill_tokens,
        decode_context=decode_context,
        prefill_context=prefill_context,
    )
