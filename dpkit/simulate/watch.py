"""Looks at all engines of a run at regular moments: how even their load is, and who queues in vain.

Reads counts only and changes nothing, so that a watched run is the same as one that is not.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

import trio
from attrs import define, field

from dpkit.nursery.busyloop import BusyLoop

if TYPE_CHECKING:
    from dpkit.engine.core import EngineCore
    from dpkit.nursery.cluster import Cluster

KEPT = 5
"""Looks of which one is kept for plots."""

EVERY_S = 0.1
"""Seconds between two looks: a few steps."""


class Moment(NamedTuple):
    """The least and the greatest share of KV in use, of all engines, at one moment of a run."""

    at_s: float
    """Since the run began."""
    kv_least: float
    kv_most: float


@define
class Watch:
    """What was seen in all looks."""

    looks: int = 0
    queue_while_room: int = 0
    """Looks at which a request waited on one engine while another had room for one at once."""
    kv_cv_sum: float = 0.0
    kv_looks: int = 0
    moments: list[Moment] = field(factory=list)
    """One in `KEPT` looks."""

    async def run(self, cluster: Cluster) -> None:
        """Look until cancelled."""
        began = trio.current_time()
        while True:
            await trio.sleep(EVERY_S)
            self.look(cores_of(cluster), trio.current_time() - began)

    def look(self, cores: list[EngineCore], at_s: float) -> None:
        """Take in one moment."""
        usage = [core.get_kv_cache_usage() for core in cores]
        mean = sum(usage) / len(usage) if usage else 0.0
        if mean > 0.0:
            self.kv_looks += 1
            self.kv_cv_sum += statistics.pstdev(usage) / mean
        queues = any(core.get_request_counts()[1] for core in cores)
        if queues and any(map(_has_room, cores)):
            self.queue_while_room += 1
        if self.looks % KEPT == 0 and usage:
            self.moments.append(Moment(at_s, min(usage), max(usage)))
        self.looks += 1

    @property
    def kv_cv(self) -> float:
        """Standard deviation of the engines' KV usage over its mean, on average."""
        return self.kv_cv_sum / self.kv_looks if self.kv_looks else 0.0

    @property
    def queue_share(self) -> float:
        """Share of looks in which somebody waited in vain."""
        return self.queue_while_room / self.looks if self.looks else 0.0


def cores_of(cluster: Cluster) -> list[EngineCore]:
    """The engines that live now, to look into."""
    lives = (slot.life for slot in cluster._slots)  # noqa: SLF001 - no face tells as much so cheaply
    return [
        life.core
        for life in lives
        if isinstance(life, BusyLoop) and life.ready.is_set() and life.cause is None
    ]


def _has_room(core: EngineCore) -> bool:
    """Whether a request that came now would be in the next step, in the place it deserves."""
    running, waiting = core.get_request_counts()
    return (
        not waiting
        and running < core.limits.max_num_seqs
        and core.get_kv_cache_usage() < _NEARLY_FULL
        and not core.report(0.0, core.work).unprefilled_tokens
    )


_NEARLY_FULL = 0.9
"""Share of KV in use from which on an engine has no room worth the name."""
