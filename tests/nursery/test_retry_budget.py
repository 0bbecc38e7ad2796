"""Row 17's retry budget: a storm of losses under overload is not fed, one loss is made good."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest
import trio
import trio.testing
from attrs import frozen

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.errors import DpkitError, EngineLost
from dpkit.names import Cause
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.nursery.events import CAPACITY as EVENTS
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH, HANG, Fault, FaultyModel
from dpkit.testing.history import History
from dpkit.testing.idle import check_idle
from dpkit.testing.wrapper import ModelOfEach, named
from tests.clusters import told
from tests.nursery.lab import Lab, Timed

ENGINES = 4
SECONDS = 20
CAPACITY = ENGINES * 8
"""Requests a second: each engine runs four at once, of half a second each."""

DIES = 0.2
"""How likely a step fails: engines live for half a second, of which a request needs all."""


@frozen(kw_only=True)
class Storm:
    """What came of a minute in which engines died again and again."""

    outcomes: Counter[str]
    goodput: int
    started: int
    retried: int
    refused: int
    losses: int


def storm(load: float, *, retries: int = 1, budget: float = 0.2) -> Storm:
    """Offer a share of what sound engines could do."""

    async def main() -> Storm:
        settings = (
            "admission = { max_inflight = 64, max_queued = 64, "
            f"retries = {retries}, retry_budget = {budget} }}"
        )
        lab = Lab(
            [Timed()] * ENGINES,
            settings=settings,
            supervision='intensity = 1000, backoff = "200ms", backoff_max = "200ms"',
            scheduler="max_num_seqs = 4",
            blocks=400,
        )
        rng = random.Random(1)
        for faulty in lab.faulty:
            faulty.plan = {step: CRASH for step in range(2000) if rng.random() < DIES}
        outcomes: Counter[str] = Counter()
        goodput = 0
        async with lab.open() as cluster:

            async def ask() -> None:
                nonlocal goodput
                try:
                    await cluster.client.complete("abcd", max_tokens=5)
                except DpkitError as error:
                    outcomes[type(error).__name__] += 1
                else:
                    outcomes["done"] += 1
                    goodput += trio.current_time() < SECONDS

            async with trio.open_nursery() as nursery:
                while trio.current_time() < SECONDS:
                    nursery.start_soon(ask)
                    await trio.sleep(1 / (CAPACITY * load))
        check_idle(cluster)
        client = cluster.client.statistics()
        refused = told(cluster, EventKind.RETRY_REFUSED)
        assert len(refused) == client.retries_refused or len(cluster.events) == EVENTS
        return Storm(
            outcomes=outcomes,
            goodput=goodput,
            started=client.started,
            retried=client.retried,
            refused=client.retries_refused,
            losses=sum(each.restarts for each in cluster.statistics().engines),
        )

    with seeded_scheduler(1):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Two hundred tracebacks take longer to write than the storm that they are of."""
    caplog.set_level(logging.CRITICAL, logger="dpkit")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("retries", [1, 100])
def test_row_17_a_storm_of_losses_under_overload_is_not_fed(retries: int) -> None:
    found = {load: storm(load, retries=retries) for load in (1.5, 2.0, 4.0)}
    for load, each in found.items():
        assert each.losses > SECONDS, "engines died again and again"
        assert each.retried < 0.3 * each.started, f"a fifth, and what one loss costs: {load}"
        assert each.refused > each.started / 5, "loudly"
        assert each.outcomes.keys() <= {"done", "EngineLost", "Overloaded"}
        assert each.goodput > 0.8 * found[1.5].goodput, "overload costs no goodput"
    print(found)


@pytest.mark.usefixtures("quiet")
def test_row_17_the_budget_is_what_bounds_the_storm() -> None:
    fed = storm(1.5, retries=100, budget=1.0)
    assert fed.retried > 0.8 * fed.started
    assert storm(1.5, retries=100).goodput >= fed.goodput


async def _ask_all(history: History, cluster: Cluster, count: int) -> Counter[str]:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(history.complete, cluster.client, "abc")
    return Counter(entry.outcomes[0] for entry in history.entries)


@pytest.mark.parametrize("fault", [CRASH, HANG], ids=str)
async def test_row_1_one_loss_of_half_of_all_is_made_good_whatever_the_budget(
    autojump_clock: object, fault: Fault
) -> None:
    lab = Lab(settings="admission = { retry_budget = 0.0 }")
    lab.faulty[0].plan = {0: fault}
    async with lab.open() as cluster:
        outcomes = await _ask_all(lab.history, cluster, 100)
        statistics = cluster.client.statistics()
        assert (statistics.retried, statistics.retries_refused) == (50, 0)
    assert outcomes == {"stop": 100}
    lab.history.check(cluster)


async def test_row_1_a_group_that_restarts_together_is_one_loss(autojump_clock: object) -> None:
    history = History()
    models = {64: FaultyModel(Timed(), {1: CRASH}), 65: Timed()}
    with named(history.model(ModelOfEach(models))) as model:
        config = parse_config(f"""
            cluster = {{ seed = 1 }}
            admission = {{ retry_budget = 0.0 }}
            [[engines]]
            name = "team"
            model = "{model}"
            count = 3
            kv.num_blocks = 64
            supervision = {{ strategy = "one_for_all" }}
            [[engines]]
            name = "other"
            model = "{model}"
            kv.num_blocks = 65
        """)
        async with open_cluster(config) as cluster:
            assert await _ask_all(history, cluster, 100) == {"stop": 100}
            assert cluster.client.statistics().retried == 75, "of three engines"
    history.check(cluster)


async def test_row_17_what_is_not_placed_again_is_told_why(autojump_clock: object) -> None:
    lab = Lab(settings="admission = { retries = 2, retry_budget = 0.0 }")
    lab.faulty[0].plan = {0: CRASH}
    lab.faulty[1].plan = {1: CRASH}  # a step later, when it has those of the other as well
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(99):
                nursery.start_soon(lab.history.complete, cluster.client, "abc")
            await trio.testing.wait_all_tasks_blocked()
            async with cluster.client.generate("abc", request_id="r") as stream:
                with pytest.raises(EngineLost) as caught:
                    await stream.read_all()
        statistics = cluster.client.statistics()
        refused = told(cluster, EventKind.RETRY_REFUSED)
        assert statistics.retries_refused == len(refused) > 0
        assert str(refused[-1]) == "retry refused r e1-0"
        assert statistics.causes[Cause.ENGINE_LOST] == 100
    assert caught.value.request_id == "r"
    assert str(caught.value) == (
        "engine e1-0 was lost while it held request r: InjectedCrash: injected: crash in step 1; "
        "it is not placed again, since too many requests are, after earlier losses "
        "(admission.retry_budget); try again later"
    )
    lab.history.check(cluster)
