"""Real weights in torch: the only place that imports it, and only when a model is loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dpkit.checkpoint import locate, read_checkpoint
from dpkit.errors import ModelUnsupported
from dpkit.imports import INSTALL_TORCH
from dpkit.names import Dtype, Quant

if TYPE_CHECKING:
    from dpkit.engine.models.torch.model import TorchModel


def load_torch_model(
    name: str,
    *,
    dtype: Dtype | str = Dtype.AUTO,
    quant: Quant | str = Quant.NONE,
    device: str = "cpu",
    attention: str = "auto",
) -> TorchModel:
    """Load a directory, a `.gguf` file or a fetched model.

    Args:
        name: which.
        dtype: what it computes in, KV cache included; float32 weights are mapped, not copied.
        quant: how its weights are kept.
        device: as torch calls it; docs/models.md says what was tried on a GPU.
        attention: a backend by its name, of `dpkit.engine.models.torch.attention`.

    Raises:
        ModelNotFound: nothing is there; the message says what to type.
        ModelUnsupported: it is there but cannot be run, or torch is not installed.
    """
    path = locate(name)
    # Read when torch is first imported: threads that spin while they wait for one another make two
    # engines on shared cores ten times slower than ones that sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from dpkit.engine.models.torch.model import TorchModel  # noqa: PLC0415 - 1.5 s of CPU
    except ModuleNotFoundError as error:
        raise ModelUnsupported(f"model {name!r} needs {error.name}; {INSTALL_TORCH}") from error
    return TorchModel(
        read_checkpoint(path),
        dtype=Dtype(dtype),
        quant=Quant(quant),
        device=device,
        attention=attention,
    )
