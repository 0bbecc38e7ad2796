"""Model files on disk: where they are, how they are read, where the demo model comes from.

A leaf package: numpy and the standard library, no torch, no tokenizers. `locate` turns a config's
`model` into a path, `read_checkpoint` reads what is there; `dpkit.checkpoint.fetch` puts the demo
model there. Importing this package costs nothing: the readers come with their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.checkpoint.locate import cache_folder as cache_folder
from dpkit.checkpoint.locate import locate as locate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from dpkit.checkpoint.checkpoint import Checkpoint as Checkpoint


def read_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read the model in a `.gguf` file or in a Hugging Face directory; weights stay on disk.

    Without `weights`, a directory need have none: whoever has them is elsewhere.

    Raises:
        ModelUnsupported: a file is missing, damaged or of a kind that cannot be read; says which.
    """
    if path.is_dir():
        from dpkit.checkpoint.hf import read_directory  # noqa: PLC0415 - numpy only when needed

        return read_directory(path, weights=weights)
    from dpkit.checkpoint.gguf_hf import read_gguf  # noqa: PLC0415

    return read_gguf(path)


def read_model_config(path: Path) -> Mapping[str, Any]:
    """What the model's config.json says, or would say of a `.gguf` file; of a directory no more.

    Raises:
        ModelUnsupported: a file is missing, damaged or of a kind that cannot be read; says which.
    """
    if path.is_dir():
        from dpkit.checkpoint.hf import read_config  # noqa: PLC0415 - numpy only when needed

        return read_config(path)
    return read_checkpoint(path).config
