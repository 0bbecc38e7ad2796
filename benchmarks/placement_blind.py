"""`expected_ttft` with wrong knowledge of caches: what it is worth to know, and to know rightly.

What a client knows of prefixes comes from what it sent itself. It may know less, as where others
send too, or where an engine does not say how large its cache is; and it may believe in what is
gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.balancer.books import Books
from dpkit.balancer.policies.expected_ttft import ExpectedTtft

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.balancer.books import Prospect
    from dpkit.messages import EngineId


class _NoHits(Books):
    def hits(self, prospect: Prospect) -> Mapping[EngineId, int]:  # noqa: ARG002 - nobody knows
        return {}


class _NothingLost(Books):
    def trim(self, engine: EngineId, kv_tokens: float) -> None:
        """Believe in a cache three times as large as it is."""
        super().trim(engine, 3.0 * kv_tokens)


@define(kw_only=True, eq=False)
class Blind(ExpectedTtft):
    """Knows of no prefix, wherever it is."""

    books: Books = field(factory=_NoHits)


@define(kw_only=True, eq=False)
class Credulous(ExpectedTtft):
    """Takes prefixes to be cached that were lost long ago."""

    books: Books = field(factory=_NothingLost)
