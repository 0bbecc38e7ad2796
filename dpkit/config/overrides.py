"""``--set key.path=value`` and ``DPKIT__KEY__PATH=value``: one key each, and its new value.

The value is a TOML value; a bare word that is none is a string, so that no shell quoting is needed
(``--set balancer.policy=inflight``). Knows no tables: `dpkit.config.layers` finds the place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomli
from attrs import frozen

from dpkit.config.checks import BadValue, quote
from dpkit.config.layers import Source, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PREFIX = "DPKIT__"


@frozen(kw_only=True)
class Override:
    """A change to one key, not yet taken apart: a mistake in it is told with all others."""

    source: Source
    key: str
    text: str
    separator: str
    example: str

    def names(self) -> list[str]:
        """The parts of the key.

        Raises:
            BadValue: there are none, or one is empty.
        """
        names = [name.strip() for name in self.key.split(self.separator)]
        if all(names):
            return names
        raise BadValue(f"expected {self.example}")

    def value(self) -> Any:
        """What the text means: a TOML value, or the text itself.

        Raises:
            BadValue: it begins like a string, an array or a table and is none.
        """
        text = self.text.strip()
        try:
            parsed = tomli.loads(f"value = {text}")
        except (ValueError, RecursionError):
            if text.startswith(('"', "'", "[", "{")):
                raise BadValue(f"{quote(text)} is not a TOML value") from None
            return text
        return parsed["value"] if len(parsed) == 1 else text


def from_flags(flags: Iterable[str]) -> Iterator[Override]:
    """The changes that ``--set`` makes, in the order given."""
    for flag in flags:
        key, equals, text = flag.partition("=")
        yield Override(
            source=Source(f"--set {printable(flag)}"),
            key=key if equals else "",
            text=text,
            separator=".",
            example="KEY.PATH=VALUE, for example coordinator.interval=50ms",
        )


def from_environment(environment: Mapping[str, str]) -> Iterator[Override]:
    """The changes that ``DPKIT__`` variables make: whole tables before the keys in them.

    Their case does not matter, and keys are lower case; ``DPKIT_CACHE``, with one underscore, is
    not one of them.
    """
    names = [name for name in environment if name.upper().startswith(_PREFIX)]
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        yield Override(
            source=Source(f"${name}"),
            key=name[len(_PREFIX) :].lower(),
            text=environment[name],
            separator="__",
            example="DPKIT__KEY__PATH=VALUE, for example DPKIT__COORDINATOR__INTERVAL=50ms",
        )
