"""What a client must know of a model that others serve: its tokens, and which of them end a text.

Any architecture will do, and no weights need be here: whoever serves it has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.checkpoint import locate, read_checkpoint
from dpkit.checkpoint.fields import Fields
from dpkit.engine.models.torch.face import tokenizer_of
from dpkit.messages import ModelSpec

if TYPE_CHECKING:
    from dpkit.text.hf import HfTokenizer

_TEXT = "text_config"  # where models that see or hear as well say what concerns their text


class ServedFace:
    """Implements `dpkit.abc.ModelFace`. How long a text may be, the engines say.

    Args:
        name: Of a fetched model, or a path to a directory or a `.gguf` file.

    Raises:
        ModelNotFound, ModelUnsupported: it is not here, or its files are damaged.
    """

    def __init__(self, name: str) -> None:
        self._checkpoint = read_checkpoint(locate(name), weights=False)
        config = Fields(str(self._checkpoint.path), self._checkpoint.config)
        text = config if config.has("vocab_size") else config.table(_TEXT)
        self.spec = ModelSpec(
            eos_token_ids=self._checkpoint.eos_token_ids,
            vocab_size=text.whole("vocab_size"),
            tells_logprobs=True,
        )

    def tokenizer(self) -> HfTokenizer:
        """The checkpoint's own.

        Raises:
            ModelUnsupported: it is damaged, or its chat template is.
        """
        return tokenizer_of(self._checkpoint)
