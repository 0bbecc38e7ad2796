"""One terminal event for each request, and the same one wherever it is told.

Part of `dpkit.testing.history`: compares what readers saw with the cluster's event log and with the
clients' statistics.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from dpkit.names import Cause
from dpkit.nursery.events import CAPACITY, EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.events import Event
    from dpkit.testing.history import Entry

CAUSES: dict[str, frozenset[Cause]] = {
    "stop": frozenset({Cause.STOP}),
    "length": frozenset({Cause.LENGTH}),
    "EngineLost": frozenset({Cause.ENGINE_LOST}),
    "DeadlineExceeded": frozenset({Cause.DEADLINE}),
    "Overloaded": frozenset({Cause.OVERLOADED}),
    "Draining": frozenset({Cause.DRAIN}),
    "ClusterClosed": frozenset({Cause.SHUTDOWN}),
    "RequestRejected": frozenset({Cause.REFUSED}),
}
"""What the event log may say of a request that ended so for its reader. A reader that left may do
so at any time, so of it any cause may be told."""


def disagreements(cluster: Cluster, entries: Sequence[Entry]) -> Iterator[str]:
    """Every request of which readers, event log and statistics tell different things."""
    events: defaultdict[str, list[Event]] = defaultdict(list)
    for event in cluster.events:
        if event.kind is EventKind.REQUEST_ENDED and event.request_id is not None:
            events[event.request_id].append(event)
    ring_is_whole = len(cluster.events) < CAPACITY
    ids = Counter(entry.request_id for entry in entries)
    for entry in entries:
        if ring_is_whole and ids[entry.request_id] == 1:
            yield from _of_entry(entry, events[entry.request_id])
    yield from _of_statistics(cluster, sum(map(len, events.values())) if ring_is_whole else None)


def _of_entry(entry: Entry, events: Sequence[Event]) -> Iterator[str]:
    told = [event.cause for event in events if event.cause is not None]
    if len(told) > 1 or (entry.tokens and not told):
        yield f"P1: {entry.request_id} has {len(told)} terminal events: {', '.join(told)}"
    for outcome in entry.outcomes:
        expected = CAUSES.get(outcome)
        if told and expected is not None and not expected.issuperset(told):
            yield f"P1: {entry.request_id} ended by {outcome}, the event log says {told[0]}"


def _of_statistics(cluster: Cluster, ended: int | None) -> Iterator[str]:
    counted = sum(sum(client.causes.values()) for client in cluster.statistics().clients)
    if ended is not None and counted != ended:
        yield f"P1: {counted} requests ended by the statistics, {ended} by the event log"
