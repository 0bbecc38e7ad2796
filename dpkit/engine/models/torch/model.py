"""The real model: a checkpoint on disk behind `dpkit.abc.Model`.

Puts together what the neighbouring modules do: architecture, transformer, batch layout, sampler.
Stateless but for the weights, so all engines of a group share one object; what belongs to one
engine is the KV cache that `allocate` returns.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch

from dpkit.abc import Model
from dpkit.engine.models.torch.architecture import (
    is_ours,
    named_architecture,
    read_architecture,
)
from dpkit.engine.models.torch.attention import choose_backend
from dpkit.engine.models.torch.attention.base import CacheKind
from dpkit.engine.models.torch.batch import build_tensors
from dpkit.engine.models.torch.face import tokenizer_of
from dpkit.engine.models.torch.hf import HfTransformer
from dpkit.engine.models.torch.precision import resolve_dtype
from dpkit.engine.models.torch.result import make_result
from dpkit.engine.models.torch.spec import model_spec
from dpkit.engine.models.torch.transformer import Transformer
from dpkit.engine.models.torch.weights import Weights
from dpkit.errors import ModelUnsupported, OutOfMemory
from dpkit.names import Dtype, Quant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from torch import Tensor

    from dpkit.checkpoint import Checkpoint
    from dpkit.messages import Batch, StepResult
    from dpkit.text.hf import HfTokenizer


_TORCH_DTYPES: Mapping[Dtype, torch.dtype] = MappingProxyType(
    {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
)


class TorchModel(Model):
    """A model of real weights, one engine after the other asking the same object."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: Dtype = Dtype.AUTO,
        quant: Quant = Quant.NONE,
        device: str = "cpu",
        attention: str = "auto",
    ) -> None:
        """Read the weights; what is float32 and stays so is mapped, not copied.

        Raises:
            ModelUnsupported: an architecture, an option of it or a tensor type that isn't built.
        """
        dtype = resolve_dtype(dtype, quant, device)
        self._checkpoint = checkpoint
        self._attention = attention
        self._transformer = _load(checkpoint, dtype, quant, _device(device))
        self.spec = model_spec(
            self._transformer.architecture, eos_token_ids=checkpoint.eos_token_ids, dtype=dtype
        )

    def __repr__(self) -> str:
        return f"<TorchModel {self._checkpoint.path}>"

    def tokenizer(self) -> HfTokenizer:
        """The checkpoint's own.

        Raises:
            ModelUnsupported: it is damaged, or its chat template is.
        """
        return tokenizer_of(self._checkpoint)

    def allocate(self, *, num_blocks: int, block_size: int) -> Tensor:
        """Make one engine's KV cache, and tell torch how many threads this engine may use.

        Zeros, because attention multiplies what it masks out by nothing, and garbage may be NaN.

        Raises:
            ModelUnsupported: the attention backend that was asked for cannot serve this cache.
            OutOfMemory: the device cannot hold it.
        """
        torch.set_num_threads(self.threads_per_engine)  # of the calling thread, hence here
        model, of = self._transformer, self._transformer.architecture
        kind = CacheKind(block_size=block_size, dtype=model.dtype, device=model.device)
        choose_backend(kind, self._attention)  # or refuse, before the memory is taken
        shape = (of.num_layers, 2, num_blocks, block_size, of.num_kv_heads, of.head_dim)
        size = prod(shape) * kind.dtype.itemsize
        doing = f"a KV cache of {size / 2**30:,.2f} GiB"
        # The kernel promises more than it has, and ends the process when it is asked to keep that.
        if kind.device.type == "cpu" and size > (held := _physical_memory()):
            raise OutOfMemory(f"{doing} does not fit into this machine's {held / 2**30:,.2f} GiB")
        try:
            return torch.zeros(shape, dtype=kind.dtype, device=kind.device)
        except RuntimeError as error:  # with a word of its own per device
            raise OutOfMemory(f"{doing} does not fit into what is free") from error

    @torch.inference_mode()
    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Compute one step and sample from it: scores come to the host in float32.

        Raises:
            OutOfMemory: the step is too large for what is free on the device.
        """
        kv = cast("Tensor", cache)
        kind = CacheKind.of(kv)
        with _memory_for(batch):
            step = build_tensors(batch, kind, choose_backend(kind, self._attention))
            scores = self._transformer(step, kv)
            return make_result(batch, scores.to("cpu", torch.float32))


@contextmanager
def _memory_for(batch: Batch) -> Iterator[None]:
    """Say in dpkit's words that a step is too large: torch has one way of saying so per device."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise OutOfMemory(
                f"a step of {batch.num_tokens} tokens needs more memory than is free: {error}"
            ) from error
        raise


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise ModelUnsupported(f"device {name!r} cannot be used here: {error}") from error


def _load(
    checkpoint: Checkpoint, dtype: Dtype, quant: Quant, device: torch.device
) -> Transformer | HfTransformer:
    """Our own transformer, or for an architecture that it does not know, another's."""
    torch_dtype = _TORCH_DTYPES[dtype]
    if is_ours(checkpoint.path, checkpoint.config):
        weights = Weights(checkpoint, dtype=torch_dtype, device=device)
        architecture = read_architecture(checkpoint.path, checkpoint.config)
        transformer = Transformer(architecture, weights, quant)
        weights.finish()
        return transformer
    if quant is not Quant.NONE:
        raise ModelUnsupported(
            f"{checkpoint.path}: quant = {quant.value!r} is for dpkit's own architectures, not for "
            f"{named_architecture(checkpoint.path, checkpoint.config)}"
        )
    return HfTransformer(checkpoint, torch_dtype, device)
