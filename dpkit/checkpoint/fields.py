"""What a model's files say, asked for by key, type and range; all else is refused by its name.

Files come from anywhere, and whole or damaged ones are read by the same code: nothing of them is
used that was not asked for here. Knows neither formats nor what the keys mean.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import frozen

from dpkit.errors import ModelUnsupported
from dpkit.sampling import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LARGEST = 2**31 - 1  # of what is counted in a model; far from what would be slow to look at


@frozen
class Fields:
    """One table of a file.

    Every method takes the key's value, or `default` where the file has none or null, and raises
    `ModelUnsupported` with file and key if it is not what was asked for.
    """

    where: str  # the file, as errors name it
    values: Mapping[str, Any]
    within: str = ""  # the key of this table in the file

    def has(self, key: str) -> bool:
        """Whether there is something."""
        return self.values.get(key) is not None

    def whole(
        self, key: str, *, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int:
        """A whole number within bounds."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"must be a whole number from {least} to {most}", value)
        return value

    def number(
        self, key: str, *, default: float | None = None, least: float = 0.0, most: float = 1e9
    ) -> float:
        """A number above `least` and no larger than `most`."""
        value = self._get(key, default)
        if type(value) not in {int, float} or not least < value <= most:
            self.refuse(key, f"must be a number above {least:g} and up to {most:g}", value)
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false", value)
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "must be a string", value)
        return value

    def strings(self, key: str, *, default: Sequence[str] | None = None) -> Sequence[str]:
        """A list of strings."""
        found: Sequence[str] = self._list(key, default, {str}, "strings")
        return found

    def numbers(self, key: str) -> Sequence[float]:
        """A list of finite numbers."""
        found: Sequence[float] = self._list(key, None, {int, float}, "numbers")
        if not all(map(_is_finite, found)):
            self.refuse(key, "must be a list of finite numbers", found)
        return found

    def wholes(self, key: str) -> Sequence[int]:
        """A list of whole numbers."""
        found: Sequence[int] = self._list(key, None, {int}, "whole numbers")
        return found

    def table(self, key: str) -> Fields:
        """A table in this one; an empty one where there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "must be an object", value)
        return Fields(self.where, value, self._name(key))

    def token_id(self, key: str, *, vocabulary: int, default: int | None = None) -> int:
        """One of so many tokens."""
        return self.whole(key, default=default, least=0, most=vocabulary - 1)

    def refuse(self, key: str, expected: str, value: object) -> NoReturn:
        """Say that a key's value is not what is expected of it."""
        where = f"{self.where}: {self._name(key)!r}"
        raise ModelUnsupported(f"{where} {expected}, not {shown(value)}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelUnsupported(f"{self.where}: {self._name(key)!r} is missing")
        return value

    def _list(self, key: str, default: Any, kinds: set[type], noun: str) -> Any:
        value = self._get(key, default)
        if not (isinstance(value, list | tuple) and kinds.issuperset(map(type, value))):
            self.refuse(key, f"must be a list of {noun}", value)
        return value

    def _name(self, key: str) -> str:
        return f"{self.within}.{key}" if self.within else key


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number that no float holds
        return False


def read_text(path: Path) -> str:
    """A file of a model directory.

    Raises:
        ModelUnsupported: it is missing, no file, unreadable or no UTF-8.
    """
    if not path.exists():
        raise ModelUnsupported(
            f"{path} is missing; a model directory needs config.json, tokenizer.json and "
            "*.safetensors"
        )
    check_is_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelUnsupported(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelUnsupported(f"{path}: not UTF-8 text; fetch it again") from error


def check_is_file(path: Path) -> None:
    """Make sure that reading it ends: a pipe would wait for a writer.

    Raises:
        ModelUnsupported: it is none.
    """
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "no file"
        raise ModelUnsupported(f"{path}: a file is expected, and this is {kind}")


def parse_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ModelUnsupported: it is anything else.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelUnsupported(f"{where}: not valid JSON: {error}") from error
    except RecursionError:  # the chain of thousands of frames helps nobody
        raise ModelUnsupported(f"{where}: not valid JSON: nested too deeply") from None
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{where}: a JSON object is expected")
    return content
