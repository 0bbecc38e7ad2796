"""How much room is kept for what answers will grow by: more, once engines have run out of it.

Knows preemptions and ends only. Room that is kept makes requests wait, room that is wanting makes
engines compute some of them twice.
"""

from __future__ import annotations

from attrs import define, field

LEAST = 0.25
"""Of the predicted output. With none at all engines run over all the time, and p99 is trebled."""

MOST = 0.5
"""Where all requests are alike, half of an answer is what is there of it on average."""

MEMORY = 1000
"""Answers, after which a third of what a preemption has taught is left."""


@define(eq=False)
class GrowthReserve:
    """The share of predicted output for which room is kept."""

    _pressure: float = field(default=0.0, init=False)

    @property
    def share(self) -> float:
        """g, from `LEAST` to `MOST`."""
        return LEAST + (MOST - LEAST) * self._pressure

    def preempted(self) -> None:
        """An engine has run out of room."""
        self._pressure = 1.0

    def ended(self) -> None:
        """An answer came to its end."""
        self._pressure *= 1.0 - 1.0 / MEMORY
