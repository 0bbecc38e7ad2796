"""Whether clients, engines and coordinator agree on who holds what: each book against the next.

Looks only, synchronously, at any moment: what is under way between two books (a request or an abort
in an inbox, stats that the coordinator has not read) is reckoned with. Walks through all requests
and blocks, so it is for tests and for when something looks wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dpkit.balancer.coordinator import CoordinatorRules
    from dpkit.messages import EngineId
    from dpkit.nursery.fanin import StatsFanIn
    from dpkit.nursery.flights import Flights
    from dpkit.nursery.life import Life


def audit_engine(life: Life, clients: Iterable[Flights]) -> Iterator[str]:
    """One life against the ledgers, and its own books against each other."""
    return life.audit({name for flights in clients for name in flights.placed_on(life.engine)})


def audit_coordinator(
    rules: CoordinatorRules, fanin: StatsFanIn, engine: EngineId, rank: int
) -> Iterator[str]:
    """What the coordinator says of one life against what has come of its stats."""
    if (stats := fanin.newest_read(engine)) is not None:
        heard, said = (stats.waiting, stats.running, stats.kv_cache_usage), rules.load(rank)
        if heard != said:
            yield f"{engine} told the coordinator {heard}, which says {said}"
