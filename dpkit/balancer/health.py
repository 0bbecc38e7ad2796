"""Which engines may be picked, judged by what became of their requests: ejection and probes.

Arithmetic only: every call that needs it says what time it is, in seconds of any one clock. Knows
nothing of views, tasks or how a loss is noticed. A verdict is on an engine's name, so it outlives a
life; what is said of an earlier life no longer counts.

An engine that lost its life, or failed, so many times in a row is *ejected*: left out for a while
that grows with each ejection. One that returns from a loss or an ejection is on *probation*: it
gets one request, the *probe*, and is back for good when that gives its first token. So a broken
engine costs one request each time it comes back, and not a batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from attrs import define, frozen

if TYPE_CHECKING:
    from dpkit.messages import EngineId


class Ejection(Protocol):
    """When an engine is left out, and for how long; docs/balancing.md has the reasons."""

    @property
    def eject_after(self) -> int:
        """Losses or failures in a row."""

    @property
    def eject_for(self) -> float:
        """Seconds of the first ejection; the n-th lasts n times as long."""

    @property
    def eject_max(self) -> float:
        """Seconds of the longest ejection; as much time without one forgives one."""

    @property
    def eject_max_share(self) -> float:
        """Share of the engines that may be ejected at once."""


@frozen(kw_only=True)
class HealthStatistics:
    """All engines at one moment, and what happened since the start."""

    serving: int
    """Engines that may be picked without limit."""
    on_probation: int
    ejected: int
    """Engines that are left out for a while, whether a life of theirs waits for it or not."""
    ejections: int
    """Times that an engine was ejected."""
    spared: int
    """Times that an engine was not, as too many others were."""
    probes: int
    """Probes sent."""


@define(eq=False)
class _Record:
    """One engine, whichever life it is in."""

    life: EngineId | None = None
    failures: int = 0  # in a row
    ejections: int = 0  # those not forgiven
    ejected_until: float = -math.inf
    on_probation: bool = False
    probing: bool = False


class Health:
    """The verdict on every engine of a cluster, for all its clients."""

    def __init__(self, rules: Ejection) -> None:
        self.rules = rules
        self._records: dict[str, _Record] = {}
        self._ejections = self._spared = self._probes = 0

    def __repr__(self) -> str:
        serving = sum(record.life is not None for record in self._records.values())
        return f"<Health: {serving} of {len(self._records)} engines alive>"

    # What happens. Calls that return a bool say whether `may_pick` may now answer differently.

    def on_ready(self, engine: EngineId, now: float) -> None:  # noqa: ARG002 - all events have one
        """A life begins to serve: on probation if the engine has failed and not recovered."""
        record = self._records.setdefault(engine.name, _Record())
        record.life = engine
        record.on_probation = record.failures > 0
        record.probing = False

    def on_lost(self, engine: EngineId, now: float) -> bool:
        """A life ended by an error."""
        if (record := self._record(engine)) is None:
            return False
        record.life = None
        self._fail(record, now)
        return True

    def on_failure(self, engine: EngineId, now: float) -> bool:
        """A request failed by the fault of an engine that goes on living."""
        if (record := self._record(engine)) is None:
            return False
        self._fail(record, now)
        return True

    def on_left(self, engine: EngineId) -> bool:
        """A life ended as it was asked to: nothing is held against the engine."""
        if self._record(engine) is None:
            return False
        del self._records[engine.name]
        return True

    def forget(self, name: str) -> None:
        """An engine will not come back, after whatever happened."""
        self._records.pop(name, None)

    def on_placed(self, engine: EngineId) -> bool:
        """A request was placed there; on probation, it is the probe."""
        record = self._record(engine)
        if record is None or not record.on_probation or record.probing:
            return False
        record.probing = True
        self._probes += 1
        return True

    def on_success(self, engine: EngineId) -> bool:
        """A request gave its first token there: the engine is well."""
        if (record := self._record(engine)) is None:
            return False
        recovered = record.on_probation
        record.failures = 0
        record.on_probation = record.probing = False
        return recovered

    def on_inconclusive(self, engine: EngineId) -> bool:
        """A request ended there before its first token, by no fault of the engine.

        If it was the probe, the next request is.
        """
        record = self._record(engine)
        if record is None or not record.probing:
            return False
        record.probing = False
        return True

    # What follows.

    def may_pick(self, engine: EngineId, now: float) -> bool:
        """Whether a request may be placed on this life now."""
        record = self._record(engine)
        return record is not None and not record.probing and now >= record.ejected_until

    def ejected_until(self, name: str, now: float) -> float | None:
        """When the ejection of an engine ends; None: it is not ejected."""
        record = self._records.get(name)
        return None if record is None or record.ejected_until <= now else record.ejected_until

    def next_change(self, now: float) -> float | None:
        """When a life that is ejected may be picked again; None: there is none such."""
        waiting = [
            record.ejected_until
            for record in self._records.values()
            if record.life is not None and record.ejected_until > now
        ]
        return min(waiting, default=None)

    def statistics(self, now: float) -> HealthStatistics:
        """All engines now, and counts since the start."""
        ejected = self._ejected(now)
        alive = [
            record
            for record in self._records.values()
            if record.life is not None and record.ejected_until <= now
        ]
        on_probation = sum(record.on_probation for record in alive)
        return HealthStatistics(
            serving=len(alive) - on_probation,
            on_probation=on_probation,
            ejected=ejected,
            ejections=self._ejections,
            spared=self._spared,
            probes=self._probes,
        )

    def _record(self, engine: EngineId) -> _Record | None:
        """The record of a life that goes on; late words of an earlier one find none."""
        record = self._records.get(engine.name)
        return record if record is not None and record.life == engine else None

    def _ejected(self, now: float) -> int:
        return sum(record.ejected_until > now for record in self._records.values())

    def _fail(self, record: _Record, now: float) -> None:
        record.probing = False
        record.failures += 1
        if record.failures < self.rules.eject_after or record.ejected_until > now:
            return
        if self._ejected(now) + 1 > self.rules.eject_max_share * len(self._records):
            self._spared += 1
            return
        self._forgive(record, now)
        record.ejections += 1
        record.ejected_until = now + min(
            self.rules.eject_max, self.rules.eject_for * record.ejections
        )
        record.on_probation = True
        self._ejections += 1

    def _forgive(self, record: _Record, now: float) -> None:
        if record.ejections:
            spells = int((now - record.ejected_until) // self.rules.eject_max)
            record.ejections = max(0, record.ejections - spells)
