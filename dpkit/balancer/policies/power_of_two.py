"""`power_of_two`: the less loaded of two engines drawn at random.

As cheap with a thousand engines as with two, and clients that see the same old snapshot do not all
run to the same engine, as each draws its own pair. The price: two or three requests above the mean
on the fullest engine.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import Policy

if TYPE_CHECKING:
    from dpkit.abc import EngineLoad, LoadView
    from dpkit.messages import GenerateRequest


@define(kw_only=True, eq=False)
class PowerOfTwo(Policy):
    """Of two drawn engines the one with the lower `in-flight + others`; of equals the lower own."""

    rng: random.Random = field(factory=random.Random)

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - counts decide
        """Draw two different engines and compare them; a lone engine is its own pair."""
        loads = view.loads
        if len(loads) == 1:
            return 0
        first, second = self.rng.sample(range(len(loads)), 2)
        return first if _weight(loads[first]) <= _weight(loads[second]) else second

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float:  # noqa: ARG002
        """The number that `pick` compares."""
        return _weight(view.load(index))[0]


def _weight(load: EngineLoad) -> tuple[int, int]:
    """Own requests exactly, with every pick since the snapshot, and others as of the snapshot."""
    return load.inflight + load.others, load.inflight
