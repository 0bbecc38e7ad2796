"""How many requests may be placed again after losses: a lost engine is made good, a storm not fed.

The retry budgets of Envoy and Finagle: of all requests of the last ten seconds, at most a share may
be placed again. But a loss that finds the budget kept is made good in full, whatever it costs: one
engine of two holds half of all requests, and its end alone must drop none of them. So only what is
lost again and again within seconds ends for want of budget.

Sans-IO; owns the counts of one client, and knows nothing of what is placed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpkit.messages import EngineId

_log = logging.getLogger(__name__)

RECENT_S = 10
"""Seconds for which a request counts after its end, and a retry after its beginning: Finagle's."""

LEAST = 10
"""So many are allowed in that time in any case: a share of a few requests would be none."""

ONE_LOSS_S = 0.1
"""Engines that end within this are one loss: they restart together, or died of one cause."""


class RetryBudget:
    """What one client may place again."""

    def __init__(self) -> None:
        self.refused = 0
        """Requests that were not placed again for want of budget."""
        self._retries = _Recent()
        self._ended = _Recent()
        self._began = -math.inf  # the present loss
        self._lost: set[EngineId] = set()  # in it
        self._is_made_good = self._is_told = False

    def take(self, engine: EngineId, now: float, *, share: float, requests: int) -> bool:
        """Begin a retry, if there is budget for it.

        Args:
            engine: The life that a request was lost with.
            now: The time, in seconds.
            share: Of all requests, as many may be retries.
            requests: Under way, this one among them.
        """
        retries, everything = self._retries.count(now), requests + self._ended.count(now)
        is_kept = retries < max(LEAST, share * everything)
        if self._is_another_loss(engine, now):
            self._began, self._lost = now, set()
            self._is_made_good, self._is_told = is_kept, False
        self._lost.add(engine)
        if self._is_made_good or is_kept:
            self._retries.add(now)
            return True
        self.refused += 1
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "not all requests of engine %s are placed again: of %d requests in the last %d s, "
                "%d were already (admission.retry_budget)",
                engine,
                everything,
                RECENT_S,
                retries,
            )
        return False

    def ended(self, now: float) -> None:
        """A request has ended; it still counts for a while."""
        self._ended.add(now)

    def _is_another_loss(self, engine: EngineId, now: float) -> bool:
        """Whether this is not a part of the present loss: too late, or an engine lost twice."""
        again = any(lost.name == engine.name and lost != engine for lost in self._lost)
        return again or now >= self._began + ONE_LOSS_S


class _Recent:
    """How often something happened in the last `RECENT_S` seconds, to the second."""

    def __init__(self) -> None:
        self._seconds: Counter[int] = Counter()

    def add(self, now: float) -> None:
        self._seconds[int(now)] += 1
        self._forget(now)

    def count(self, now: float) -> int:
        self._forget(now)
        return self._seconds.total()

    def _forget(self, now: float) -> None:
        while self._seconds and (oldest := next(iter(self._seconds))) <= now - RECENT_S:
            del self._seconds[oldest]
