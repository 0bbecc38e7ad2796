"""`random`: any engine, each as likely as the others, whatever its load.

A baseline: what balancing comes to when nobody knows anything. Of N requests on N engines one
engine gets several and a third of the engines none.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import Policy

if TYPE_CHECKING:
    from dpkit.abc import LoadView
    from dpkit.messages import GenerateRequest


@define(kw_only=True, eq=False)
class Random(Policy):
    """Draws an engine for every request."""

    rng: random.Random = field(factory=random.Random)

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002 - chance decides
        """The engine that is drawn."""
        return self.rng.randrange(len(view.loads))
