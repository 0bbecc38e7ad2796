"""TOML files to plain tables: the file itself and the chain of those that it extends.

Reads files and nothing else. A file that cannot be read or is no TOML ends the reading at once:
what it would have said is not known, so nothing more can be said of the rest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tomli
from attrs import frozen

from dpkit.config.checks import describe, is_path, quote
from dpkit.config.layers import Source
from dpkit.config.schema import EXTENDS
from dpkit.errors import ConfigError

_DEFAULT = "dpkit.toml"  # what commands read that are given no name
_BOM = "\ufeff"  # the byte order mark that some editors put in front


@frozen(kw_only=True)
class File:
    """One file of a chain, its paths made absolute."""

    filename: str
    source: Source
    tables: dict[str, Any]
    base: str | None  # the file that it extends


def read_chain(filename: str, text: str | None = None) -> list[File]:
    """The file, its base, the base of that, and so on; `text` stands for what the file holds.

    Raises:
        ConfigError: a file that cannot be read or is no TOML, or a chain that bites its tail.
    """
    chain = [_file(filename, _read(filename) if text is None else text)]
    seen = [_identity(filename)]
    while (base := chain[-1].base) is not None:
        at = f"{chain[-1].source.at((EXTENDS,))}: {EXTENDS}: "
        text = _read(base, said_at=at)
        if _identity(base) in seen:
            names = [file.filename for file in chain[seen.index(_identity(base)) :]]
            circle = " -> ".join(map(repr, [*names, base]))
            raise ConfigError([f"{at}a circle: {circle}; one of them must extend nothing"])
        chain.append(_file(base, text))
        seen.append(_identity(base))
    return chain


def make_absolute(tables: dict[str, Any], folder: Path) -> None:
    """Make relative paths start at `folder`, in place; looks nothing up."""
    groups = tables.get("engines")
    for group in groups if isinstance(groups, list) else ():
        model = group.get("model") if isinstance(group, dict) else None
        if not isinstance(model, str):
            continue
        if not model.startswith("cost:"):
            group["model"] = _absolute(model, folder) if is_path(model) else model
        elif model.endswith(".toml"):
            group["model"] = f"cost:{_absolute(model.removeprefix('cost:'), folder)}"
    log = tables.get("log")
    if isinstance(log, dict):
        for key in ("events", "steps"):
            if isinstance(path := log.get(key), str):
                log[key] = _absolute(path, folder)
    server = tables.get("server")
    if isinstance(server, dict):
        for key in ("listen", "admin_listen"):
            kind, _, path = str(server.get(key)).partition(":")
            if kind == "unix" and path:
                server[key] = f"unix:{_absolute(path, folder)}"


def _absolute(path: str, folder: Path) -> str:
    return path if path.startswith(("/", "~")) else str(folder.absolute() / path)


def _file(filename: str, text: str) -> File:
    source = Source(filename, text=text)
    tables = _parse(text, filename)
    base = tables.pop(EXTENDS, None)
    if not isinstance(base, str | None):
        problem = f"expected the path of a TOML file, got {describe(base)}"
        raise ConfigError([f"{source.at((EXTENDS,))}: {EXTENDS}: {problem}"])
    folder = Path(filename).parent
    make_absolute(tables, folder)
    located = None if base is None else str(folder / Path(base))
    return File(filename=filename, source=source, tables=tables, base=located)


def _identity(filename: str) -> str:
    return os.path.realpath(filename)


def _read(filename: str, *, said_at: str = "") -> str:
    """A file's text; `said_at` is where its name was read, when that was not the command line."""
    name = quote(filename) if said_at else filename
    try:
        data = Path(filename).read_bytes()
    except FileNotFoundError:
        hint = "; name one, or write dpkit.toml" if filename == _DEFAULT else ""
        raise ConfigError([f"{said_at}{name}: no such file{hint}"]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", error)
        raise ConfigError([f"{said_at}{name}: cannot be read: {reason}"]) from None
    return _decode(data, filename)


def _decode(data: bytes, filename: str) -> str:
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
