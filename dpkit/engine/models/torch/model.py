"""The real model: a checkpoint on disk behind `dpkit.abc.Model`.

Puts together what the neighbouring modules do: architecture, transformer, batch layout, sampler.
Stateless but for the weights, so all engines of a group share one object; what belongs to one
engine is the KV cache that `allocate` returns.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import torch

from dpkit.abc import Model
from dpkit.engine.models.torch.architecture import read_architecture
from dpkit.engine.models.torch.batch import build_tensors
from dpkit.engine.models.torch.result import make_result
from dpkit.engine.models.torch.spec import model_spec
from dpkit.engine.models.torch.transformer import Transformer
from dpkit.errors import ModelUnsupported
from dpkit.text.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

    from dpkit.checkpoint import Checkpoint
    from dpkit.messages import Batch, StepResult


class TorchModel(Model):
    """A Llama-family model in float32 on the CPU."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the weights; the file stays mapped.

        Raises:
            ModelUnsupported: an architecture, an option of it or a tensor type that isn't built.
        """
        architecture = read_architecture(checkpoint.path, checkpoint.config)
        # Half of the cores that this process may use: two engines is the usual least.
        self.threads_per_engine = max(1, len(os.sched_getaffinity(0)) // 2)
        self.spec = model_spec(architecture, eos_token_ids=checkpoint.eos_token_ids)
        self._checkpoint = checkpoint
        self._transformer = Transformer(architecture, _reader(checkpoint))

    def __repr__(self) -> str:
        return f"<TorchModel {self._checkpoint.path}>"

    def tokenizer(self) -> HfTokenizer:
        """The checkpoint's own."""
        return HfTokenizer(
            self._checkpoint.tokenizer_json,
            chat_template=self._checkpoint.chat_template,
            special_tokens=self._checkpoint.special_tokens,
        )

    def allocate(self, *, num_blocks: int, block_size: int) -> Tensor:
        """Make one engine's KV cache, and tell torch how many threads this engine may use.

        Zeros, because attention multiplies what it masks out by nothing, and garbage may be NaN.
        """
        torch.set_num_threads(self.threads_per_engine)  # of the calling thread, hence here
        of = self._transformer.architecture
        return torch.zeros(of.num_layers, 2, num_blocks, block_size, of.num_kv_heads, of.head_dim)

    @torch.inference_mode()
    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Compute one step and sample from it."""
        kv = cast("Tensor", cache)
        return make_result(batch, self._transformer(build_tensors(batch, kv.shape[3]), kv))


def _reader(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    """Read tensors by name; one that is not there is refused by its name."""
    shapes = checkpoint.tensors.shapes()

    def read(name: str) -> Tensor:
        if name not in shapes:
            raise ModelUnsupported(f"{checkpoint.path}: tensor {name!r} is missing")
        return torch.from_numpy(checkpoint.tensors.read(name))

    return read
