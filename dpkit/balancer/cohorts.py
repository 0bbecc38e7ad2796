"""Prompts that begin together, for engines that step together: each step waits for the slowest.

A prompt that one rank computes while the others only write answers keeps all of them waiting, and
what others compute beside it costs nothing. So prompts wait for company before they begin, for a
few steps: until most of the ranks have one that could. Whoever is done by the time that the longest
of those under way is, or is short, goes at once. Decides on what another pass would send; knows
nothing of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from dpkit.abc import LoadView, Pass
    from dpkit.balancer.ttft import Standing

COMPANY = 0.75
"""Share of the ranks that are to have a prompt before one begins."""

PATIENCE = 16
"""Steps that a prompt waits for company."""

CALM = 8
"""Requests a rank: with fewer under way it is not worth a wait, as few are held up."""

SHORT = 0.125
"""Of so large a share of a step's tokens a prompt is short: it makes the step hardly longer."""


@define(eq=False)
class Cohort:
    """The prompts that could begin, and wait for company."""

    ready: int = 0
    """Engines that had one at the last pass."""
    since: int | None = None
    """Steps that the engines had made when there was the first one."""

    def has_company(self, standings: Sequence[Standing], view: LoadView) -> bool:
        """Whether they are to begin now; opens a pass, which counts them anew."""
        ready, self.ready = self.ready, 0
        steps = 0
        for load in view.loads:
            if load.report is None:  # it does not tell of its steps, which are what is waited for
                return True
            steps = max(steps, load.report.steps)
        if ready and self.since is None:
            self.since = steps
        has_waited = self.since is not None and not 0 <= steps - self.since < PATIENCE
        is_calm = sum(each.requests for each in standings) < CALM * len(standings)
        enough = max(1, ready) >= COMPANY * len(standings)
        if is_calm or enough or has_waited:
            self.since = None
            return True
        return False


class CohortPass:
    """One look at all that wait, which sends those that have company; implements `Pass`.

    Args:
        to: Says where each may begin.
        standings: Of the engines, with what `to` has decided so far.
        view: Of the engines.
        cohort: Kept from pass to pass.
    """

    def __init__(
        self, to: Pass, standings: Sequence[Standing], view: LoadView, cohort: Cohort
    ) -> None:
        self._to = to
        self._standings = standings
        self._cohort = cohort
        self._ready: set[int] = set()
        self._begins = cohort.has_company(standings, view)
        self._longest = max(
            (max(each.prefill, SHORT * each.room.tokens_per_step) for each in standings),
            default=0.0,
        )
        """Tokens that some rank computes in any case."""

    @property
    def is_over(self) -> bool:
        """No engine takes any more."""
        return self._to.is_over

    def offer(self, prospect: Any, index: int | None = None) -> int | None:
        """Where to send a request now; None: it is held, for its engine or for company."""
        found = self._to.offer(prospect, index)
        if found is None or self._begins or self._standings[found].prefill <= self._longest:
            return found
        self._ready.add(found)
        self._cohort.ready = len(self._ready)
        return None
