"""Check that a cluster with nothing to do holds nothing: the promise behind every clean-up path.

Works on a running cluster and on one that was left. A running engine learns of an abort at its next
step, so let it take one before asking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.standing import ClusterStatistics


def check_idle(cluster: Cluster, *, bad_stats: bool = False) -> None:
    """Check that nothing is in flight, waits or runs, that all blocks are free, and books agree.

    Args:
        cluster: One that has nothing to do, running or left.
        bad_stats: Stats were doubled or reordered on purpose, so that stale ones are no fault.

    Raises:
        InternalError: something is left; the message lists all of it.
    """
    if problems := [*cluster.audit(), *_leftovers(cluster.statistics(), bad_stats)]:
        raise InternalError(f"the cluster is not idle: {'; '.join(problems)}")


def _leftovers(now: ClusterStatistics, bad_stats: bool) -> Iterator[str]:
    for client in now.clients:
        if client.queued:
            yield f"{client.queued} requests wait for a place"
        for engine, inflight in client.inflight.items():
            yield f"{inflight} requests are in flight on {engine}"
    for each in now.engines:
        if each.core.running or each.core.waiting:
            yield f"{each.engine} runs {each.core.running} and has {each.core.waiting} waiting"
        if each.core.free_blocks != each.core.num_blocks:
            held = each.core.num_blocks - each.core.free_blocks
            yield f"{each.engine} holds {held} of {each.core.num_blocks} blocks"
    if now.coordinator.unknown_engines:
        yield f"the coordinator heard {now.coordinator.unknown_engines} times of unknown engines"
    if now.fanin.stale and not bad_stats:
        yield f"engines published {now.fanin.stale} counts out of order"
