"""Engines that serve and never tell their load: balancing by loads is blind to them.

An engine that joined may have its statistics turned off. One that is idle has nothing to tell, so
only those count that have served.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dpkit.messages import EngineId

_log = logging.getLogger(__name__)

GRACE_S = 10.0
"""Loads come within a step; a step is seconds at most."""


class Silence:
    """Who serves without a word.

    Args:
        tells_load: Whether a life has told its load so far.
    """

    def __init__(self, tells_load: Callable[[EngineId], bool]) -> None:
        self._tells_load = tells_load
        self._heard: set[EngineId] = set()
        self._served_at: dict[EngineId, float] = {}  # first, of those not heard
        self._told: set[EngineId] = set()

    def on_served(self, engine: EngineId, now: float) -> None:
        """A request has ended on a life."""
        if engine in self._heard:
            return
        if self._tells_load(engine):
            self._heard.add(engine)
            self._served_at.pop(engine, None)
        elif now - self._served_at.setdefault(engine, now) > GRACE_S and engine not in self._told:
            self._told.add(engine)
            _log.warning(
                "engine %s has served for %g s and never told its load: it is balanced by our own "
                "requests alone; its statistics may be turned off",
                engine,
                GRACE_S,
            )

    def count(self, serving: Collection[EngineId], now: float) -> int:
        """How many of these are silent; others are forgotten."""
        self._heard.intersection_update(serving)
        self._told.intersection_update(serving)
        self._served_at = {
            engine: since for engine, since in self._served_at.items() if engine in serving
        }
        return sum(
            now - since > GRACE_S and not self._tells_load(engine)
            for engine, since in self._served_at.items()
        )
