"""How a conformance suite says which rule was broken.

Knows nothing of the contracts themselves.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpkit.errors import DpkitError
from dpkit.testing.runs import in_a_line, leaf_of

if TYPE_CHECKING:
    from collections.abc import Iterator


_SHOWN = 300
"""Characters of what was seen; a text that never ends is better cut."""


class Nonconforming(DpkitError):  # noqa: N818 - reads as what is
    """What was checked breaks a rule of its contract; `rule` names it."""

    def __init__(self, what: str, rule: str, how: str) -> None:
        super().__init__(f"{what} breaks the rule {rule!r}: {how[:_SHOWN]}")
        self.rule = rule


class Subject:
    """What is being checked, by the name that errors use."""

    def __init__(self, name: str) -> None:
        self.name = name

    def demand(self, rule: str, holds: object, how: str) -> None:
        """Go on if the rule holds.

        Raises:
            Nonconforming: it does not; `how` says what was seen.
        """
        if not holds:
            raise Nonconforming(self.name, rule, how)

    @contextmanager
    def must(self, rule: str) -> Iterator[None]:
        """Turn whatever the block raises into a breach of this rule."""
        try:
            yield
        except Exception as error:
            leaf = leaf_of(error)
            if isinstance(leaf, Nonconforming):
                raise leaf from None
            raise Nonconforming(self.name, rule, in_a_line(leaf)) from error
