"""Whether clients, engines and coordinator agree on who holds what: each book against the next.

Looks only, synchronously, at any moment: what is under way between two books (a request or an abort
in an inbox, stats that the coordinator has not read) is reckoned with. Walks through all requests
and blocks, so it is for tests and for when something looks wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dpkit.balancer.coordinator import CoordinatorRules
    from dpkit.messages import EngineId
    from dpkit.nursery.busyloop import BusyLoop
    from dpkit.nursery.fanin import StatsFanIn
    from dpkit.nursery.flights import Flights


def audit_engine(loop: BusyLoop, clients: Iterable[Flights]) -> Iterator[str]:
    """One life against the ledgers, and its loop against its scheduler and blocks."""
    charged = {request_id for flights in clients for request_id in flights.placed_on(loop.engine)}
    held = loop.held()
    yield from (f"{name} is charged to {loop.engine}, which lost it" for name in charged - held)
    yield from (f"{name} is on {loop.engine}, charged to nobody" for name in held - charged)
    try:
        loop.core.check()
    except InternalError as error:
        yield f"engine {loop.engine}: {error}"
    scheduled = sum(loop.core.get_request_counts())
    if scheduled != loop.drained:
        yield f"{loop.engine} took {loop.drained} requests, its scheduler has {scheduled}"
    if loop.published is not None and loop.published != scheduled:
        yield f"{loop.engine} published {loop.published} requests, its scheduler has {scheduled}"


def audit_coordinator(
    rules: CoordinatorRules, fanin: StatsFanIn, engine: EngineId, rank: int
) -> Iterator[str]:
    """What the coordinator says of one life against what has come of its stats."""
    if (stats := fanin.newest_read(engine)) is not None:
        heard, said = (stats.waiting, stats.running, stats.kv_cache_usage), rules.load(rank)
        if heard != said:
            yield f"{engine} told the coordinator {heard}, which says {said}"
