"""From a config's `model` to a path: a directory, a `.gguf` file, or a name that was fetched.

Knows the user's cache and the names that can be fetched; reads no model.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from dpkit.checkpoint.catalogue import FETCHABLE
from dpkit.errors import ModelNotFound

_BUILT_IN = "echo"
"""The model that has no files: not found here, but what a mistyped name may have meant."""


def cache_folder() -> Path:
    """Where fetched models live: `$DPKIT_CACHE`, or dpkit's folder in the user's cache."""
    if own := os.environ.get("DPKIT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "dpkit"


def fetched_path(name: str) -> Path:
    """The directory in the cache that `dpkit fetch NAME` fills."""
    return cache_folder() / "models" / name


def locate(name: str) -> Path:
    """Find the files of `model = NAME`.

    A name with a path separator, or ending in `.gguf`, is a path. Any other is a fetched model, or
    a directory here: the fetched one wins, so that a folder in the way cannot change what runs.

    Raises:
        ModelNotFound: nothing is there; the message says what to type to get it.
    """
    path = Path(name).expanduser()
    if os.sep in name or path.suffix == ".gguf":
        if not path.exists():
            raise ModelNotFound(f"no model at {path}; {_how_to_get(path.stem)}")
        return path
    if name.strip(".") and (fetched := fetched_path(name)).is_dir():
        return fetched
    if path.is_dir():
        return path
    if name in FETCHABLE:
        raise ModelNotFound(f"model {name!r} is not in {cache_folder()}; {_how_to_get(name)}")
    raise ModelNotFound(
        f"no model {name!r}: neither a directory, nor a .gguf file, nor a name that can be "
        f"fetched ({', '.join(FETCHABLE)}); {_how_to_get(name)}"
    )


def closest(name: str) -> str | None:
    """The fetchable name that `name` was probably meant to be."""
    matches = difflib.get_close_matches(name.lower(), FETCHABLE, n=1, cutoff=0.5)
    return matches[0] if matches else None


def _how_to_get(name: str) -> str:
    if name in FETCHABLE:
        return f"`dpkit fetch {name}` gets it"
    if (meant := closest(name)) is not None:
        return f"did you mean {meant!r}? `dpkit fetch {meant}` gets it"
    if difflib.get_close_matches(name.lower(), [_BUILT_IN]):
        return f"did you mean {_BUILT_IN!r}?"
    return f"`dpkit fetch {next(iter(FETCHABLE))}` gets the demo model"
