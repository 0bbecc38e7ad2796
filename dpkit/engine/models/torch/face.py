"""What is known of a model of real weights without its weights, and without importing torch.

For whoever talks to engines that compute in other processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.checkpoint import locate, read_checkpoint
from dpkit.engine.models.torch.architecture import read_shape
from dpkit.engine.models.torch.precision import resolve_dtype
from dpkit.engine.models.torch.spec import model_spec
from dpkit.text.hf import HfTokenizer

if TYPE_CHECKING:
    from dpkit.checkpoint import Checkpoint
    from dpkit.names import Dtype, Quant


class TorchFace:
    """Implements `dpkit.abc.ModelFace`.

    Raises:
        ModelNotFound, ModelUnsupported: as loading the model would, but for its weights.
    """

    def __init__(self, name: str, *, dtype: Dtype, quant: Quant, device: str = "cpu") -> None:
        self._checkpoint = read_checkpoint(locate(name))
        self.spec = model_spec(
            read_shape(self._checkpoint.path, self._checkpoint.config),
            eos_token_ids=self._checkpoint.eos_token_ids,
            dtype=resolve_dtype(dtype, quant, device),
        )

    def tokenizer(self) -> HfTokenizer:
        """The checkpoint's own.

        Raises:
            ModelUnsupported: it is damaged, or its chat template is.
        """
        return tokenizer_of(self._checkpoint)


def tokenizer_of(checkpoint: Checkpoint) -> HfTokenizer:
    """Make the tokenizer that a checkpoint brings.

    Raises:
        ModelUnsupported: it is damaged, or its chat template is.
    """
    return HfTokenizer(
        checkpoint.tokenizer_json,
        where=str(checkpoint.path),
        chat_template=checkpoint.chat_template,
        special_tokens=checkpoint.special_tokens,
    )
