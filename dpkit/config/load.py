"""TOML to `Config`: all errors of a config at once, each with its place.

The one code path for the command line, for embedding and for a reload: reads files, puts the layers
together, asks `structure` what is wrong, and says where. Starts nothing.
"""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.config.checks import BadValue
from dpkit.config.files import make_absolute, read_chain
from dpkit.config.layers import Layers
from dpkit.config.overrides import from_environment, from_flags
from dpkit.config.rules import dotted
from dpkit.config.schema import Config
from dpkit.config.structure import structure
from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dpkit.config.files import File
    from dpkit.config.layers import Source
    from dpkit.config.overrides import Override
    from dpkit.config.rules import Path


@frozen(kw_only=True)
class Loaded:
    """A config, and the layers that it was put together from."""

    config: Config
    layers: Layers


def load_config(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Read a config file, and the files that it extends.

    Args:
        path: the TOML file.
        overrides: ``"key.path=value"`` each; they win over the environment, and that over the file.
        environment: variables of which those called ``DPKIT__…`` are read; None: the process's.

    Raises:
        ConfigError: with every problem as ``FILE:LINE:COL: key.path: message``.
    """
    return load_layers(path, overrides=overrides, environment=environment).config


def parse_config(
    text: str,
    *,
    filename: str = "<string>",
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Like `load_config`, for text at hand.

    `filename` is what its errors begin with; relative paths start at its folder.
    """
    return _load(read_chain(filename, text), overrides, environment).config


def load_layers(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """Like `load_config`, and keeps where each value came from."""
    return _load(read_chain(str(path)), overrides, environment)


def _load(
    chain: Sequence[File], flags: Sequence[str], environment: Mapping[str, str] | None
) -> Loaded:
    layers = Layers(chain[0].source)
    for file in reversed(chain):
        layers.merge(file.tables, file.source)
    variables = from_environment(os.environ if environment is None else environment)
    overrides = [*variables, *from_flags(flags)]
    found = list(_apply(overrides, layers))
    make_absolute(layers.tables, FilePath())  # those of overrides; the files' are absolute already
    config = structure(layers.tables)
    if isinstance(config, Config) and not found:
        return Loaded(config=config, layers=layers)
    if not isinstance(config, Config):
        found += [(layers.source(p.path), p.path, p.message) for p in config]
    sources = [*(file.source for file in chain), *(override.source for override in overrides)]
    raise ConfigError(list(_rendered(found, sources)))


def _apply(overrides: Iterable[Override], layers: Layers) -> Iterable[tuple[Source, Path, str]]:
    """Lay the overrides on top, in order; yield what is wrong with them."""
    for override in overrides:
        try:
            layers.assign(override.names(), override.value(), override.source)
        except BadValue as error:
            yield override.source, (), error.problem


def _rendered(
    found: Iterable[tuple[Source, Path, str]], sources: Sequence[Source]
) -> Iterable[str]:
    """The problems source by source, the first file's first, and in file order."""
    rank = {source: number for number, source in enumerate(sources)}
    for source, path, message in sorted(found, key=lambda f: (rank[f[0]], f[0].spot(f[1]))):
        key = f"{dotted(path)}: " if path else ""
        yield f"{source.at(path)}: {key}{message}"
