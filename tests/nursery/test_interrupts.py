"""Ctrl-C at every line: wherever it lands in a request's life, the books are right afterwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio
import trio.testing
from attrs import define, field

from dpkit._trio import seeded_scheduler
from dpkit.nursery import client, cluster, services, stream
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.idle import check_idle
from tests.nursery.interrupter import Interrupter

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config
    from dpkit.messages import EngineId

FILES = {module.__file__ for module in (client, cluster, services, stream)}


@define
class Outcome:
    """How a run with one interruption ended."""

    interrupter: Interrupter
    cluster: Cluster | None = None
    leaks: list[EngineId] = field(factory=list)
    body_done: bool = False
    interrupted: bool = False


def _run(config: Config, at: int) -> Outcome:
    outcome = Outcome(Interrupter(FILES, at))

    async def main() -> None:
        async with open_cluster(config) as opened:
            outcome.cluster = opened
            for _ in range(2):
                try:
                    async with opened.client.generate("hello", max_tokens=9) as reading:
                        await reading.__anext__()
                finally:  # now, not when the cluster ends what it finds
                    outcome.leaks += opened.client.statistics().inflight
            outcome.body_done = True

    before = sys.gettrace()
    sys.settrace(outcome.interrupter)
    try:
        with seeded_scheduler(0):
            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        sys.settrace(before)
    return outcome


def test_ctrl_c_at_any_line_leaves_nothing(make_config: Callable[..., Config]) -> None:
    config = make_config("cost:h20-4b", "kv.num_blocks=8")
    quiet = _run(config, at=0)
    assert not quiet.interrupted
    assert quiet.interrupter.seen > 200
    cut_short = 0
    for at in range(1, quiet.interrupter.seen + 1):
        outcome = _run(config, at)
        assert outcome.interrupter.seen == at
        assert outcome.interrupted, f"line event {at}: the signal was swallowed"
        if outcome.cluster is None:
            continue
        assert not outcome.leaks
        assert outcome.cluster.client.audit() == ()
        assert not outcome.cluster.client.statistics().inflight
        if outcome.body_done:  # it cut the shutdown short, and an engine's last step with it
            cut_short += 1
        else:
            check_idle(outcome.cluster)
    assert 0 < cut_short < quiet.interrupter.seen / 2
