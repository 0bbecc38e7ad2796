"""TOML to `Config`: all errors of a file at once, in file order, each with its place.

The one code path for the command line, for embedding and for a reload. Reads the file and nothing
else; starts nothing.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import tomli

from dpkit.config.checks import BadValue
from dpkit.config.locate import locate
from dpkit.config.overrides import apply_override
from dpkit.config.rules import dotted
from dpkit.config.schema import Config
from dpkit.config.structure import structure
from dpkit.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from dpkit.config.rules import Path
    from dpkit.config.structure import Problem


_BOM = "\ufeff"  # the byte order mark that some editors put in front


def load_config(path: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> Config:
    """Read a config file.

    Args:
        path: the TOML file.
        overrides: ``"key.path=value"`` each; the last word over what the file says.

    Raises:
        ConfigError: with every problem as ``FILE:LINE:COL: key.path: message``.
    """
    filename = str(path)
    return parse_config(_read(filename), filename=filename, overrides=overrides)


def parse_config(text: str, *, filename: str = "<string>", overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, for text at hand; `filename` is what its errors begin with."""
    tables = _parse(text, filename)
    changes: list[tuple[Path, str]] = []
    refused: list[str] = []
    for override in overrides:
        flag = f"--set {override if override.isprintable() else repr(override)}"
        try:
            changes.append((apply_override(tables, override), flag))
        except BadValue as error:
            refused.append(f"{flag}: {error.problem}")
    config = structure(tables)
    if isinstance(config, Config) and not refused:
        return config
    problems = [] if isinstance(config, Config) else _placed(config, text, filename, changes)
    raise ConfigError([*problems, *refused])


def _read(filename: str) -> str:
    try:
        data = FilePath(filename).read_bytes()
    except FileNotFoundError:
        raise ConfigError([f"{filename}: no such file; name one, or write dpkit.toml"]) from None
    except OSError as error:
        raise ConfigError([f"{filename}: cannot be read: {error.strerror}"]) from None
    try:
        return data.decode().removeprefix(_BOM)
    except UnicodeDecodeError as error:
        before = data[: error.start].decode().removeprefix(_BOM)
        place = f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        message = f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8"
        raise ConfigError([f"{filename}:{place}: {message}"]) from None


def _parse(text: str, filename: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        # tomli says "Cannot overwrite", "Cannot declare ... twice": about a key it has seen before.
        hint = "; is it there twice?" if error.msg.startswith("Cannot") else ""
        problem = f"{filename}:{error.lineno}:{error.colno}: not valid TOML: {error.msg}{hint}"
    except RecursionError:
        problem = f"{filename}: not valid TOML: arrays or tables are nested too deeply"
    except ValueError:  # Python's limit of 4,300 digits; TOML's is 64 bits
        problem = f"{filename}: not valid TOML: an integer of thousands of digits"
    raise ConfigError([problem])


def _placed(
    problems: Sequence[Problem], text: str, filename: str, changes: Sequence[tuple[Path, str]]
) -> list[str]:
    """Render the problems: the file's in file order, then those of ``--set``."""
    spots = locate(text)
    in_file: list[tuple[tuple[int, int], str]] = []
    in_flags: list[str] = []
    for problem in problems:
        line = f"{dotted(problem.path)}: {problem.message}"
        flag = _flag(problem.path, spots, changes)
        if flag is None:
            spot = spots[_nearest(problem.path, spots)]
            in_file.append((spot, f"{filename}:{spot[0]}:{spot[1]}: {line}"))
        else:
            in_flags.append(f"{flag}: {line}")
    in_file.sort(key=lambda item: item[0])
    return [line for _, line in in_file] + in_flags


def _flag(
    path: Path, spots: Mapping[Path, tuple[int, int]], changes: Sequence[tuple[Path, str]]
) -> str | None:
    """The ``--set`` that made what stands at the path; None where the file did."""
    for changed, flag in reversed(changes):
        inside = path[: len(changed)] == changed
        made_on_the_way = changed[: len(path)] == path and path not in spots
        if inside or made_on_the_way:
            return flag
    return None


def _nearest(path: Path, spots: Mapping[Path, tuple[int, int]]) -> Path:
    """The path, or what holds it: a missing key is reported at its table."""
    while path not in spots:
        path = path[:-1]
    return path
