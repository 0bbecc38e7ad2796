"""The coordinator's task: stats from the fan-in go into the rules, snapshots go to every client.

What is sent and when is decided by `dpkit.balancer.coordinator`; this module only has a clock and a
channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.balancer.coordinator import CoordinatorRules
    from dpkit.messages import Snapshot
    from dpkit.nursery.fanin import StatsFanIn


async def run_coordinator(
    rules: CoordinatorRules, fanin: StatsFanIn, tell: Callable[[Snapshot], None]
) -> None:
    """Serve until cancelled.

    Args:
        rules: Owned by this task from now on.
        fanin: Where engines publish; this task is its one receiver.
        tell: Hands a snapshot to every client; synchronous.
    """
    while True:
        # What is there already is read before publishing, so that no snapshot is older than known.
        for stats in fanin.receive_nowait():
            rules.on_stats(trio.current_time(), stats)
        if wait := rules.due(trio.current_time()):
            with trio.move_on_after(wait):
                await fanin.wait_pending()
        else:
            tell(rules.publish(trio.current_time()))
