"""`round_robin`: each engine in turn, whatever its load.

The baseline that any other policy must beat, and the one whose choices need no stats at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import Policy
from dpkit.balancer.policies.lowest import scan_start

if TYPE_CHECKING:
    from dpkit.abc import LoadView
    from dpkit.messages import GenerateRequest


@define(eq=False)
class RoundRobin(Policy):
    """Engine after engine by index; clients begin spread over the engines."""

    _next: int | None = field(default=None, init=False)

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - turns decide
        """The engine whose turn it is."""
        return scan_start(view) if self._next is None else self._next

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Pass the turn on; a pinned request takes no turn."""
        if request.engine is None:
            self._next = (index + 1) % len(view.engines)

    def on_engines(self, view: LoadView) -> None:
        """The turn stays where it was, within the engines there are now."""
        if self._next is not None and view.loads:
            self._next %= len(view.loads)
