"""A model on disk, the same whichever format it came in: what Hugging Face's files would say.

Knows numpy and the shape of the data; knows nothing of torch, of tokenizers or of what runs the
model. The weights stay memory-mapped for as long as somebody holds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


class TensorSource(Protocol):
    """Named float32 tensors, read one at a time."""

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Every tensor's name and shape, in file order; reads no weights."""

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, widened to float32; a view of the file where it is float32 already.

        The array may be written to: the mapping is private to this process.
        """


@frozen(kw_only=True)
class Checkpoint:
    """One model: its configuration, its tokenizer and its weights."""

    path: Path
    config: Mapping[str, Any]  # as in config.json
    eos_token_ids: frozenset[int]
    tokenizer_json: str  # as in tokenizer.json
    chat_template: str | None  # jinja2 source
    special_tokens: Mapping[str, str]  # bos_token, eos_token…: what a chat template may name
    tensors: TensorSource


class NoWeights:
    """The `TensorSource` of a model whose weights are elsewhere."""

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """None."""
        return {}

    def read(self, name: str) -> NDArray[np.float32]:
        """There is nothing to read."""
        raise KeyError(name)
