"""Engine death, supervision, health (class E of the reports): those that need one process."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dpkit.engine.models.cost import CostModel
from dpkit.errors import ClusterFailed, EngineLost
from dpkit.messages import EngineId
from dpkit.names import EngineState
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH, HANG
from dpkit.testing.idle import check_idle
from tests.clusters import told
from tests.nursery.lab import STEP_S, Lab, Timed, settle, when

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster


def _states(cluster: Cluster) -> list[EngineState]:
    return [each.state for each in cluster.statistics().engines]


READY = EngineState.READY


async def test_E01_one_engine_dies_and_the_others_do_not_notice(autojump_clock: object) -> None:
    lab = Lab([Timed()] * 3)
    lab.faulty[1].plan = {3: CRASH}
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:
            for number in range(9):
                nursery.start_soon(lab.history.complete, cluster.client, f"{number}bcdef")
            await trio.sleep(3.5 * STEP_S)
            assert _states(cluster)[::2] == [READY, READY]
            assert "crash" in str(cluster.statistics().engines[1].last_error)
        ends = [entry.outcomes[0] for entry in lab.history.entries]
        assert sorted(ends) == ["EngineLost"] * 3 + ["stop"] * 6
        assert trio.current_time() == pytest.approx(7 * STEP_S), "not a step later than without"
        lab.history.check(cluster)


async def test_E02_the_host_gets_an_event_and_no_exception(autojump_clock: object) -> None:
    lab = Lab()
    lab.faulty[0].plan = {0: CRASH}
    async with trio.open_nursery() as host:
        host_went_on = trio.Event()

        @host.start_soon
        async def rollout() -> None:
            async with lab.open() as cluster:
                assert (await cluster.client.complete("hello")).text == "hello"
                [lost] = told(cluster, EventKind.ENGINE_LOST)
                assert "injected: crash" in lost.detail
            host_went_on.set()

    assert host_went_on.is_set()


async def test_E02_unless_the_config_says_that_every_engine_is_needed(
    autojump_clock: object,
) -> None:
    lab = Lab(settings="cluster = { min_ready = 2 }", supervision="intensity = 0")
    lab.faulty[0].plan = {0: CRASH}

    async def run() -> None:
        async with lab.open() as cluster:
            await cluster.client.complete("hello")
            await trio.sleep_forever()

    with pytest.raises(ClusterFailed):
        await run()


async def test_E03_a_step_that_never_ends_is_seen_though_the_engine_lives(
    autojump_clock: object,
) -> None:
    lab = Lab(supervision='step_timeout = "3s", backoff = "10s", jitter = 0.0')
    lab.faulty[0].plan = {0: HANG}
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(lab.history.complete, cluster.client, "hello")
        await trio.sleep(4.01)
        assert _states(cluster)[0] is not READY
        assert when(told(cluster, EventKind.ENGINE_STUCK)) == [(4, "e0-0")]
        assert "a step has taken more than 3 s" in str(cluster.statistics().engines[0].last_error)
    assert [entry.outcomes for entry in lab.history.entries] == [["stop"]] * 2


async def test_E04_who_dies_right_after_it_was_ready_is_not_called_ready(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()], supervision='intensity = 2, backoff = "1s", jitter = 0.0')
    lab.faulty[0].always = CRASH
    causes: list[str | None] = []

    async def run() -> None:
        async with lab.open() as cluster:
            with pytest.raises(EngineLost, match="injected: crash in step 1"):
                await cluster.client.complete("hello")  # and once more, a second later
            causes.append(cluster.statistics().engines[0].last_error)
            assert _states(cluster) != [READY]
            await cluster.client.complete("hello", timeout=60)

    with pytest.raises(ClusterFailed) as caught:
        await run()
    assert causes == ["InjectedCrash: injected: crash in step 1"]
    assert "in step 0" in str(caught.value.__cause__), "the first exception is the one that is kept"


async def test_E07_an_exception_in_a_step_leaves_nobody_waiting(autojump_clock: object) -> None:
    lab = Lab([Timed()] * 3, settings='admission = { queue_timeout = "2s" }')
    lab.faulty[2].always = CRASH
    async with lab.open() as cluster:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(lab.history.complete, cluster.client, f"{number:05}")
        assert {entry.outcomes[0] for entry in lab.history.entries} == {"stop"}
        lab.history.check(cluster)


@pytest.mark.parametrize(
    ("supervision", "min_ready", "survives", "restarts"),
    [
        ("intensity = 3", 1, True, 1),  # restart
        ("intensity = 0", 1, True, 0),  # go on without it
        ("intensity = 0", 2, False, 0),  # stop
    ],
)
async def test_E08_degraded_is_told_at_once_and_every_policy_works(
    autojump_clock: object, supervision: str, min_ready: int, survives: bool, restarts: int
) -> None:
    lab = Lab(
        settings=f"cluster = {{ min_ready = {min_ready} }}",
        supervision=f'backoff = "1s", jitter = 0.0, {supervision}',
    )
    seen: list[object] = []

    async def run() -> None:
        async with lab.open() as cluster:
            lab.faulty[0].inject(CRASH)
            with pytest.raises(EngineLost), trio.CancelScope(shield=True):
                await cluster.client.complete("hello", engine="e0-0")
            await trio.testing.wait_all_tasks_blocked()
            seen.append(_states(cluster)[0])
            assert trio.current_time() == 0
            await trio.sleep(5)
            seen.append(cluster.statistics().engines[0].restarts)
            assert (await cluster.client.complete("hello")).text == "hello"

    if survives:
        await run()
        assert seen[0] is not READY
        assert seen[1] == restarts
    else:
        with pytest.raises(ClusterFailed):
            await run()


async def test_E09_cancelled_clients_never_cost_an_engine_its_state(
    autojump_clock: object,
) -> None:
    lab = Lab()
    async with lab.open() as cluster:
        for number in range(100):
            with trio.move_on_after(STEP_S * (0.25 + number % 7 / 2)):
                await cluster.client.complete("abcdefghijkl", max_tokens=50, ignore_eos=True)
            assert _states(cluster) == [READY, READY]
        await settle()
        check_idle(cluster)
        assert [each.restarts for each in cluster.statistics().engines] == [0, 0]


async def test_E10_every_engine_comes_back_every_time_within_its_intensity(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()] * 3, supervision='intensity = 3, backoff = "1s", jitter = 0.0')
    async with lab.open() as cluster:
        for kill in range(1, 4):
            for number in range(3):
                lab.faulty[number].inject(CRASH)
                with pytest.raises(EngineLost):
                    await cluster.client.complete("hello", engine=f"e{number}-0")
            await trio.sleep(2.0**kill)
            engines = cluster.statistics().engines
            assert [each.engine for each in engines] == [
                EngineId(f"e{number}-0", kill) for number in range(3)
            ]
            assert _states(cluster) == [READY] * 3
        for each in lab.watched:
            waits = [after - before for before, after in itertools.pairwise(each.births)]
            assert waits[0] == 1


async def test_E13_a_spike_makes_no_engine_look_dead(autojump_clock: object) -> None:
    lab = Lab(
        [CostModel("h20-4b")] * 2,
        supervision='step_timeout = "2s"',
        blocks=4096,
        settings="admission = { max_queued = 4000 }",
    )
    async with lab.open() as cluster:
        async with trio.open_nursery() as nursery:
            for number in range(2000):
                nursery.start_soon(
                    lambda number: cluster.client.complete([number] * 50, max_tokens=8), number
                )
            await trio.sleep(2.5)
            assert sum(each.core.waiting for each in cluster.statistics().engines) > 0
            assert _states(cluster) == [READY, READY]
        assert trio.current_time() > 3
        assert not told(cluster, EventKind.ENGINE_STUCK, EventKind.ENGINE_LOST)
        check_idle(cluster)
