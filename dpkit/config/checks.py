"""What a single value must satisfy, and how a refusal reads.

The checks are attrs validators, so that a config built in Python is held to the same rules as a
file. Knows no TOML text and no positions: `dpkit.config.load` adds those.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from dpkit.errors import ConfigError
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized

    from attrs import Attribute

CLASS_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"

_TCP_ADDRESS = re.compile(r"tcp://(?P<host>\*|[\w.-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\*|\d{1,5})")
EVERY_HOST = {"*", "0.0.0.0", "[::]", "::"}  # noqa: S104 - compared with, not listened at
_LAST_MEETING_PORT = 2**16 - 5
_CLASS_PATH = re.compile(CLASS_PATH, re.ASCII)
_PLAIN_MODEL = re.compile(r"\w[\w.-]*", re.ASCII)
_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    dict: "a table",
    list: "an array",
}


class BadValue(ConfigError):  # noqa: N818 - reads as what happened, like the others of the tree
    """One value is wrong; `problem` says how, without the key, which `str()` puts in front."""

    def __init__(self, problem: str, *, key: str | None = None) -> None:
        super().__init__([problem if key is None else f"{key}: {problem}"])
        self.problem = problem


def describe(value: object) -> str:
    """A value in an error message: short, on one line, with its TOML type."""
    kind = _KINDS.get(type(value), "a date or time")
    if isinstance(value, bool):
        return f"{str(value).lower()} ({kind})"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, str | int | float):
        return f"{quote(value)} ({kind})"
    return kind


def quote(value: object) -> str:
    """`repr`, cut to a length that leaves an error message readable."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1]}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` with the nearest choice, case aside; empty when none is near."""
    by_folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean '{by_folded[near[0]]}'?" if near else ""


def one_of(choices: Iterable[str]) -> str:
    """``'a', 'b', 'c'``."""
    return ", ".join(f"'{choice}'" for choice in choices)


@frozen
class Between:
    """The value lies in the closed range; NaN lies in none."""

    low: float
    high: float
    show: Callable[[Any], str] = field(default=str, kw_only=True)

    def __call__(self, _instance: object, attribute: Attribute[Any], value: float) -> None:
        """Raise `BadValue` unless the value is within."""
        if not self.low <= value <= self.high:
            low, high = self.show(self.low), self.show(self.high)
            problem = f"must be between {low} and {high}, got {self.show(value)}"
            raise BadValue(problem, key=attribute.name)


@frozen
class MadeOf:
    """The whole text matches the pattern, which `words` explain."""

    pattern: str
    words: str

    def __call__(self, _instance: object, attribute: Attribute[Any], value: str) -> None:
        """Raise `BadValue` unless the whole value matches."""
        if re.fullmatch(self.pattern, value, re.ASCII) is None:
            raise BadValue(f"must be made of {self.words}, got {quote(value)}", key=attribute.name)


class Spelt(MadeOf):
    """The whole text is one of those that the pattern allows, which `words` list."""

    def __call__(self, _instance: object, attribute: Attribute[Any], value: str) -> None:
        """Raise `BadValue` unless the whole value matches."""
        if re.fullmatch(self.pattern, value, re.ASCII) is None:
            raise BadValue(f"must be {self.words}, got {quote(value)}", key=attribute.name)


def at_least_one_table(_instance: object, attribute: Attribute[Any], value: Sized) -> None:
    """An array of tables is not empty."""
    if not value:
        problem = f"at least one [[{attribute.name}]] table is needed"
        raise BadValue(problem, key=attribute.name)


def model_name(_instance: object, attribute: Attribute[Any], value: str) -> None:
    """``echo``, ``cost:PRESET``, a fetched model, a directory, a .gguf file or ``pkg.mod:Class``.

    Whether a fetched model is in the cache is asked at the start, not here: a file is no less right
    for being checked on another machine.
    """
    problem = _model_problem(value)
    if problem:
        raise BadValue(problem, key=attribute.name)


def policy_name(_instance: object, attribute: Attribute[Any], value: str) -> None:
    """A built-in policy or ``pkg.mod:Class``."""
    if value in list(PolicyName) or _CLASS_PATH.fullmatch(value):
        return
    problem = f"expected one of {one_of(PolicyName)} or 'pkg.mod:Class', got {quote(value)}"
    raise BadValue(problem + did_you_mean(value, PolicyName), key=attribute.name)


def tcp_address(_instance: object, attribute: Attribute[Any], value: str) -> None:
    """``tcp://HOST:PORT``, to listen at; a ``*`` is every host, or a port that is picked."""
    match = _TCP_ADDRESS.fullmatch(value)
    if match is None or (match["port"] != "*" and not 0 < int(match["port"]) < 2**16):
        problem = f"expected an address such as 'tcp://10.0.0.1:29550', got {quote(value)}"
        raise BadValue(problem, key=attribute.name)


def host_and_port(address: str) -> tuple[str, str]:
    """Take apart what `tcp_address` lets through."""
    match = _TCP_ADDRESS.fullmatch(address)
    return ("", "") if match is None else (match["host"], match["port"])


def rendezvous(_instance: object, attribute: Attribute[Any], value: str) -> None:
    """``HOST:PORT`` of another host, where others listen, at the four ports after it as well."""
    host, port = meeting_point(value)
    if host in EVERY_HOST or not 0 < port <= _LAST_MEETING_PORT:
        problem = f"expected HOST:PORT, such as '10.0.0.2:29560', got {quote(value)}"
        raise BadValue(problem, key=attribute.name)


def meeting_point(value: str) -> tuple[str, int]:
    """Take apart what `rendezvous` lets through: a host as sockets know it, and a port."""
    host, port = host_and_port(f"tcp://{value}")
    return (host.strip("[]"), int(port)) if port.isdecimal() else ("*", 0)


def writable_path(_instance: object, attribute: Attribute[Any], value: str) -> None:
    """A file that may be made or grow: its folder is there. Nothing is written."""
    try:
        path = Path(value).expanduser()
        if path.is_dir():
            problem = "is a directory; name a file in it"
        elif path.parent.is_dir():
            return
        else:
            problem = "lies in a directory that does not exist"
    except (OSError, RuntimeError) as error:
        problem = f"cannot be looked up: {getattr(error, 'strerror', error)}"
    raise BadValue(f"{value!r} {problem}", key=attribute.name)


def is_path(model: str) -> bool:
    """Whether a model is named by where its files are."""
    return model.startswith((".", "~")) or "/" in model or model.endswith(".gguf")


def _model_problem(value: str) -> str | None:
    if value.startswith("cost:"):
        return _preset_problem(value.removeprefix("cost:"))
    if is_path(value):
        return _path_problem(value)
    if _PLAIN_MODEL.fullmatch(value) or _CLASS_PATH.fullmatch(value):
        return None
    forms = "'echo', 'cost:PRESET', the name of a fetched model, a directory, a .gguf file"
    return f"expected {forms} or 'pkg.mod:Class', got {quote(value)}"


def _preset_problem(preset: str) -> str | None:
    # Imported when a file asks for it: most files name no preset.
    from dpkit.costmodel import PRESETS  # noqa: PLC0415

    if preset in PRESETS:
        return None
    return f"unknown cost preset {quote(preset)}; known: {', '.join(PRESETS)}" + did_you_mean(
        preset, PRESETS
    )


def _path_problem(value: str) -> str | None:
    try:
        path = Path(value).expanduser()
        if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
            return None
        problem = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
    except (OSError, RuntimeError) as error:  # no permission, a name too long, no such user
        return f"{value!r} cannot be looked up: {getattr(error, 'strerror', error)}"
    return f"{value!r} {problem}"
