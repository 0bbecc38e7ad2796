"""Whoever submits is cancelled at any step, models fail at any call, Ctrl-C comes at any line.

The same books as for streams must be right afterwards.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.errors import DpkitError
from dpkit.nursery import client, submission
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.failing import fail_sweep, pair_sweep
from dpkit.testing.history import LEFT, Entry, History
from dpkit.testing.idle import check_idle
from dpkit.testing.points import STEP, Points
from dpkit.testing.sweep import sweep
from dpkit.testing.wrapper import named
from tests.nursery.interrupter import Interrupter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.config.schema import Config
    from dpkit.messages import EngineOutput
    from dpkit.nursery.client import Client
    from dpkit.testing.mark import Mark

SEEDS = range(int(os.environ.get("DPKIT_TEST_SEEDS", "5")))

PROMPT = "abcdefghi"
TOKENS = 4
READERS = 4

Outcome = tuple[History, Cluster]


async def _serve(history: History, client: Client, **options: Any) -> Entry:
    """What a server does for a request: its task only waits for the end, the sink does the rest."""
    ended = trio.Event()

    def sink(output: EngineOutput) -> None:
        entry.delivered(output.token_ids)
        if output.finish_reason is not None:
            error = type(output.error).__name__ if output.error else str(output.finish_reason)
            entry.ended(error)
            ended.set()

    entry = history.ask(options["request_id"])
    try:
        submitted = client.submit(PROMPT, max_tokens=TOKENS, sink=sink, **options)
    except DpkitError as error:
        entry.ended(type(error).__name__)
        return entry
    try:
        entry.admitted()
        await ended.wait()
    finally:
        submitted.close()
        if not ended.is_set():
            entry.ended(LEFT)
    return entry


def _config(model: str, settings: str = "") -> Config:
    """Two engines with little room, so that requests wait here and there."""
    return parse_config(
        f"""
        cluster.seed = 1
        {settings}
        admission.max_inflight = 3
        [[engines]]
        model = "{model}"
        count = 2
        kv = {{ block_size = 4, num_blocks = 6 }}
        scheduler = {{ max_num_seqs = 3, max_num_batched_tokens = 5 }}
        """
    )


def _scenario_of(*, resume: bool) -> Callable[[Points], Awaitable[Outcome]]:
    """Servers of which the first is the target."""

    async def scenario(points: Points) -> Outcome:
        history = History(resumes=resume)

        async def serve(number: int) -> None:
            await _serve(history, cluster.clients[number % 2], request_id=f"r{number}")

        async def serve_as_target() -> None:
            with points.target():
                await serve(0)

        with named(points.model(history.model(CostModel("h20-4b")))) as model:
            config = _config(model, f"admission.resume = {str(resume).lower()}")
            async with open_cluster(config, clients=2) as cluster, trio.open_nursery() as nursery:
                nursery.start_soon(serve_as_target)
                for number in range(1, READERS):
                    nursery.start_soon(serve, number)
        return history, cluster

    return scenario


def _check(result: Outcome) -> list[Entry]:
    history, cluster = result
    history.check(cluster)
    return history.entries


def test_whoever_submits_and_is_cancelled_at_any_step_leaves_nothing() -> None:
    outcomes: set[str] = set()

    async def scenario(mark: Mark) -> Outcome:
        history = History()

        async def target() -> None:
            with mark.target():
                await _serve(history, cluster.client, request_id="target", engine="engine-0")
            assert cluster.client._ledger.holder("target") is None, "the target is in flight"

        async def neighbour(number: int) -> None:
            await _serve(history, cluster.client, request_id=f"neighbour-{number}")

        with named(history.model(CostModel("h20-4b"))) as model:
            async with open_cluster(_config(model)) as cluster, trio.open_nursery() as nursery:
                nursery.start_soon(target)
                for number in range(3):
                    nursery.start_soon(neighbour, number)
        return history, cluster

    def check(result: Outcome) -> None:
        for entry in _check(result):
            outcomes.update(entry.outcomes)
            if entry.request_id != "target":
                assert entry.tokens == list(PROMPT[:TOKENS].encode())

    done = sweep(scenario, seeds=SEEDS, check=check)
    assert done.runs >= len(SEEDS) * 3
    assert outcomes == {"length", LEFT}


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_that_fails_at_any_call_is_told_to_sinks_once(*, resume: bool) -> None:
    outcomes: set[str] = set()

    def check(result: Outcome) -> None:
        outcomes.update(entry.outcomes[0] for entry in _check(result))

    done = fail_sweep(_scenario_of(resume=resume), seeds=SEEDS, check=check)
    assert done.runs > len(SEEDS) * 10
    assert outcomes == ({"length"} if resume else {"length", "EngineLost"})


def test_a_submission_that_is_left_while_the_model_fails_leaves_nothing() -> None:
    outcomes: set[str] = set()

    def check(result: Outcome) -> None:
        outcomes.update(entry.outcomes[0] for entry in _check(result))

    seeds = SEEDS[:3]
    pair_sweep(_scenario_of(resume=True), seeds=seeds, check=check, kind=STEP, sample=40)
    assert {"length", LEFT} <= outcomes


FILES = {module.__file__ for module in (client, submission)}


def _interrupted(config: Config, at: int) -> tuple[int, bool, Cluster | None, bool]:
    """Line events, whether Ctrl-C came out, the cluster, and whether its body was done by then."""
    interrupter = Interrupter(FILES, at)
    clusters: list[Cluster] = []
    interrupted = done = False

    async def main() -> None:
        nonlocal done
        async with open_cluster(config) as cluster:
            clusters.append(cluster)
            cluster.client.submit("hello", max_tokens=2, sink=lambda _: None)
            left = cluster.client.submit("hello", max_tokens=9, sink=lambda _: None)
            await trio.sleep(0.05)
            left.close()
            done = True

    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        with seeded_scheduler(0):
            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(before)
    return interrupter.seen, interrupted, clusters[0] if clusters else None, done


def test_ctrl_c_at_any_line_leaves_nothing(make_config: Callable[..., Config]) -> None:
    config = make_config("cost:h20-4b", "kv.num_blocks=8")
    lines, interrupted, _, _ = _interrupted(config, at=0)
    assert not interrupted
    assert lines > 50
    for at in range(1, lines + 1):
        _, interrupted, cluster, done = _interrupted(config, at)
        assert interrupted, f"line event {at}: the signal was swallowed"
        if cluster is None:
            continue
        assert cluster.client.audit() == ()
        assert not cluster.client.statistics().inflight
        if not done:  # else it cut the shutdown short, and an engine's last step with it
            check_idle(cluster)
