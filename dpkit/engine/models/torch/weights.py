"""A checkpoint's tensors, read by name, each of the shape that its config promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dpkit.errors import ModelUnsupported

if TYPE_CHECKING:
    from torch import Tensor

    from dpkit.checkpoint import Checkpoint


class Weights:
    """Reads one tensor at a time, so that the model is never in memory twice."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._path = checkpoint.path
        self._tensors = checkpoint.tensors
        self._shapes = {name: tuple(s) for name, s in checkpoint.tensors.shapes().items()}
        self._unread = set(self._shapes)
        self._as = (device or torch.device("cpu"), dtype)

    def read(self, name: str, *shape: int) -> Tensor:
        """One tensor; of the file itself where it is float32 there and here.

        Raises:
            ModelUnsupported: it is missing or has another shape.
        """
        if (found := self._shapes.get(name)) is None:
            raise ModelUnsupported(f"{self._path}: tensor {name!r} is missing")
        if found != shape:
            raise ModelUnsupported(
                f"{self._path}: tensor {name!r} is {found}, but the config means {shape}"
            )
        self._unread.discard(name)
        return torch.from_numpy(self._tensors.read(name)).to(*self._as)

    def finish(self) -> None:
        """Make sure that nothing was left out.

        Other tensors may stay: some files have a head that the config says is not used.

        Raises:
            ModelUnsupported: the file has a bias that the config doesn't name.
        """
        if biases := sorted(name for name in self._unread if name.endswith(".bias")):
            raise ModelUnsupported(
                f"{self._path}: there is a tensor {biases[0]!r}, which its config does not name"
            )
