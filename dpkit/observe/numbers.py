"""One look at a cluster and its server: all numbers of one moment, in one pass without a wait.

What it gives is frozen: the text that is made of it, in turns with others, is of that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.names import EngineState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dpkit.nursery.standing import ClusterStatistics, EngineStatistics
    from dpkit.observe.tallies import HttpCounts, RequestCounts
    from dpkit.serve.front import State


@frozen(kw_only=True)
class ClusterNumbers:
    """Of a cluster."""

    model_name: str
    now: float
    """On Trio's clock."""
    statistics: ClusterStatistics
    requests: Mapping[str, RequestCounts]
    """Those that have ended, by rank as a label."""
    silent: int
    """Engines that never tell their load."""

    @property
    def engines(self) -> Iterator[EngineStatistics]:
        """All that are here, those that come or go included."""
        yield from self.statistics.engines
        yield from self.statistics.leaving

    @property
    def imbalance(self) -> int:
        """Requests on the ready engine that has most, less those on the one that has least."""
        loads = [
            each.core.running + each.core.waiting
            for each in self.statistics.engines
            if each.state is EngineState.READY
        ]
        return max(loads, default=0) - min(loads, default=0)

    @property
    def unreported(self) -> int:
        """Engines of whose work some client knows only what it has sent there."""
        clients = self.statistics.clients
        return len({engine for client in clients for engine in client.unreported})

    @property
    def inflight(self) -> Mapping[str, int]:
        """Unfinished requests by rank as a label, by the clients' books."""
        ranks = {each.engine: str(each.rank) for each in self.engines}
        held = dict.fromkeys(ranks.values(), 0)
        for client in self.statistics.clients:
            for engine, count in client.inflight.items():
                if (rank := ranks.get(engine)) is not None:
                    held[rank] += count
        return held


@frozen(kw_only=True)
class Numbers:
    """Of everything."""

    loop_lag_s: float
    server: State | None
    """None: nobody serves."""
    http: HttpCounts | None
    cluster: ClusterNumbers | None
    """None: it is not up yet."""
