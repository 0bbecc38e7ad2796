"""Lives of engines: when they end and begin, who hears of it, and who may be picked meanwhile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.errors import ClusterFailed, ConfigError, EngineLost, Overloaded
from dpkit.messages import EngineId
from dpkit.names import Cause, EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH, HANG, FaultyModel
from dpkit.testing.idle import check_idle
from dpkit.testing.wrapper import named
from tests.clusters import told
from tests.nursery.lab import STEP_S, Lab, Timed, settle, when

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster


async def _provoke(cluster: Cluster, engine: str) -> None:
    """Give an engine the step in which it is to fail."""
    with pytest.raises(EngineLost):
        await cluster.client.complete("x", engine=engine)


# When the next life begins.


async def test_a_crashed_engine_comes_back_after_exactly_its_backoff(
    autojump_clock: object,
) -> None:
    lab = Lab(supervision='backoff = "1s", backoff_max = "3s", jitter = 0.0, intensity = 9')
    async with lab.open() as cluster:
        for number in range(4):
            lab.faulty[0].inject(CRASH)
            await _provoke(cluster, "e0-0")
            await trio.sleep(4)
            assert cluster.statistics().engines[0].engine == EngineId("e0-0", number + 1)
        assert lab.watched[0].births == [0, 1, 4 + 2, 8 + 3, 12 + 3], "1, 2, 3, and never above"
        assert lab.watched[1].births == [0]
        statistics = cluster.statistics().engines[0]
        assert (statistics.restarts, statistics.state) == (4, EngineState.READY)
        assert statistics.last_error == "InjectedCrash: injected: crash in step 3"


async def test_jitter_spreads_restarts_and_a_seed_repeats_them(autojump_clock: object) -> None:
    async def births(seed: int) -> list[float]:
        supervision = 'backoff = "1s", jitter = 0.5'
        lab = Lab(settings=f"cluster = {{ seed = {seed} }}", supervision=supervision)
        start = trio.current_time()
        async with lab.open() as cluster:
            for number in range(2):
                lab.faulty[number].inject(CRASH)
                await _provoke(cluster, f"e{number}-0")
            await trio.sleep(2)
        return [round(each.births[-1] - start, 6) for each in lab.watched]

    one = await births(1)
    assert one[0] != one[1]
    assert all(0.5 <= each <= 1.5 for each in one)
    assert await births(1) == one
    assert await births(2) != one


async def test_failures_further_apart_than_the_period_are_forgiven(
    autojump_clock: object,
) -> None:
    lab = Lab(supervision='backoff = "1s", jitter = 0.0, intensity = 1, period = "10s"')
    async with lab.open() as cluster:
        for _ in range(5):
            lab.faulty[0].inject(CRASH)
            await _provoke(cluster, "e0-0")
            await trio.sleep(10)
        assert cluster.statistics().engines[0].restarts == 5
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        await trio.sleep(2)
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        await settle()
        assert cluster.statistics().engines[0].state is EngineState.DOWN
        check_idle(cluster)


async def test_when_too_few_are_left_the_body_is_cancelled_with_the_first_cause(
    autojump_clock: object,
) -> None:
    lab = Lab(settings="cluster = { min_ready = 2 }", supervision='intensity = 1, backoff = "1s"')

    async def run() -> None:
        async with lab.open() as cluster:
            for _ in range(2):
                lab.faulty[1].inject(CRASH)
                await _provoke(cluster, "e1-0")
                await trio.sleep(3)

    with pytest.raises(ClusterFailed, match="engine e1-0 failed: InjectedCrash") as caught:
        await run()
    assert "in step 0" in str(caught.value.__cause__), "the first of the period"


# A group that lives and dies together.


async def test_one_for_all_ends_and_begins_all_lives_of_the_group_together(
    autojump_clock: object,
) -> None:
    model = FaultyModel(Timed())
    with named(model) as name:
        config = parse_config(f"""
            [[engines]]
            model = "{name}"
            count = 3
            supervision = {{ strategy = "one_for_all", backoff = "1s", jitter = 0.0 }}
        """)
        async with open_cluster(config) as cluster:
            texts = []

            async def ask() -> None:
                texts.append((await cluster.client.complete("hello")).text)

            async with trio.open_nursery() as nursery:
                model.inject(CRASH)
                for _ in range(6):
                    nursery.start_soon(ask)
            assert texts == ["hello"] * 6, "nothing was delivered yet, so all were placed anew"
            assert model.lives == 6
            assert [each.engine.epoch for each in cluster.statistics().engines] == [1, 1, 1]
            ready = told(cluster, EventKind.ENGINE_READY)[3:]
            assert {at for at, _ in when(ready)} == {1.0}
            check_idle(cluster)


async def test_one_for_all_tells_the_others_that_they_were_stopped(autojump_clock: object) -> None:
    model = FaultyModel(Timed())
    with named(model) as name:
        config = parse_config(f"""
            [[engines]]
            model = "{name}"
            count = 3
            supervision.strategy = "one_for_all"
        """)
        said = []
        async with open_cluster(config) as cluster, trio.open_nursery() as nursery:

            async def ask(engine: str) -> None:
                with pytest.raises(EngineLost) as caught:
                    await cluster.client.complete("hello", engine=engine)
                said.append(str(caught.value.__cause__))

            model.inject(CRASH)
            for number in range(3):
                nursery.start_soon(ask, f"engine-{number}")
    stopped = [each for each in said if re.fullmatch(r"engine engine-\d was stopped", each)]
    assert len(stopped) == 2, said


async def test_one_for_all_gives_all_up_together(autojump_clock: object) -> None:
    model = FaultyModel(Timed())
    with named(model) as name:
        config = parse_config(f"""
            [[engines]]
            model = "{name}"
            count = 2
            supervision = {{ strategy = "one_for_all", intensity = 0 }}
        """)

        async def run() -> None:
            async with open_cluster(config) as cluster:
                model.inject(CRASH)
                await cluster.client.complete("hello", engine="engine-1")

        with pytest.raises((EngineLost, ClusterFailed)) as caught:
            await run()
    assert "injected: crash in step 0" in str(caught.value)


# Who may be picked.


async def test_a_returning_engine_gets_one_request_until_that_delivers(
    autojump_clock: object,
) -> None:
    lab = Lab()
    async with lab.open() as cluster:
        client = cluster.client
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        await trio.sleep(1.5)  # it is back
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(client.complete, "hello")
            await trio.testing.wait_all_tasks_blocked()
            assert client.statistics().inflight == {EngineId("e0-0", 1): 1, EngineId("e1-0"): 7}
            await settle()  # the probe has its first token
            for _ in range(6):
                nursery.start_soon(client.complete, "hello")
            await trio.testing.wait_all_tasks_blocked()
            assert client.statistics().inflight == {EngineId("e0-0", 1): 7, EngineId("e1-0"): 7}


async def test_a_probe_that_is_left_gives_the_next_request_the_chance(
    autojump_clock: object,
) -> None:
    lab = Lab()
    async with lab.open() as cluster:
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        await trio.sleep(1.5)
        for _ in range(3):
            async with cluster.client.generate("hello", engine="e0-0", timeout=0.01) as probe:
                assert probe.engine == EngineId("e0-0", 1)
                async with cluster.client.generate("hello") as other:
                    assert other.engine.name == "e1-0"


async def test_a_resumed_request_is_as_good_a_probe_as_any(autojump_clock: object) -> None:
    """Else the engine would wait for ever for a first token that came long ago."""
    lab = Lab()
    async with lab.open() as cluster:
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        async with cluster.client.generate("abcdefghijklmnopqrstuvwxyz", resume=True) as stream:
            assert stream.engine.name == "e1-0"
            await trio.sleep(1.25)  # e0-0 is back, on probation
            lab.faulty[1].inject(CRASH)
            await trio.sleep(2 * STEP_S)
            assert stream.engine == EngineId("e0-0", 1)
            assert (await stream.read_all()).text == "abcdefghijklmnopqrstuvwxyz"
        async with cluster.client.generate("a", engine="e0-0"), cluster.client.generate("b") as on:
            assert on.engine.name in {"e0-0", "e1-0"}
        assert EngineId("e0-0", 1) in cluster._membership, "it may be picked again"
        await settle()
        check_idle(cluster)


async def test_an_engine_that_fails_again_and_again_is_ejected_for_a_while(
    autojump_clock: object,
) -> None:
    settings = 'balancer = { eject_after = 2, eject_for = "5s" }'
    lab = Lab(settings=settings, supervision='backoff = "100ms", jitter = 0.0')
    async with lab.open() as cluster:
        for _ in range(2):
            lab.faulty[0].inject(CRASH)
            await _provoke(cluster, "e0-0")
            await trio.sleep(0.5)
        assert cluster.statistics().engines[0].state is EngineState.READY
        picks = []
        for _ in range(8):
            picks.append((await cluster.client.complete("a")).engine.name)
            await trio.sleep(1 - 2 * STEP_S)
        assert picks == ["e1-0"] * 5 + picks[5:]
        assert "e0-0" in picks[5:], "it was ejected at 0.6 s, for five seconds"


async def test_pins_to_an_engine_that_is_away_wait_for_it_and_hold_nobody_up(
    autojump_clock: object,
) -> None:
    lab = Lab(settings='admission = { queue_timeout = "5s", max_queued = 3 }')
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        client = cluster.client
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        done: list[tuple[float, EngineId]] = []

        async def ask() -> None:
            completion = await client.complete("a", engine="e0-0")
            done.append((round(trio.current_time(), 6), completion.engine))

        for _ in range(3):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert client.statistics().queued == 3
        with pytest.raises(Overloaded, match="3 requests wait already"):
            await client.complete("a", engine="e0-0")
        assert (await client.complete("a")).engine.name == "e1-0", "whoever may go, goes"
        await trio.sleep(2)
        back = EngineId("e0-0", 1)
        assert done[0] == (1 + 2 * STEP_S, back), "the probe"
        assert {engine for _, engine in done} == {back}
        assert client.statistics().queued == 0


async def test_a_pin_that_waits_too_long_is_told_so(autojump_clock: object) -> None:
    lab = Lab(settings='admission = { queue_timeout = "500ms" }')
    async with lab.open() as cluster:
        lab.faulty[0].inject(CRASH)
        await _provoke(cluster, "e0-0")
        with pytest.raises(Overloaded, match=r"no engine had room for 0\.5 s"):
            await cluster.client.complete("a", engine="e0-0")
        assert trio.current_time() == 0.5
        assert cluster.client.statistics().causes[Cause.OVERLOADED] == 1
        assert cluster._flights[0].line._away.get("e0-0", {}) == {}


# What an engine is doing when its life ends.


@pytest.mark.parametrize("fault", [CRASH, HANG])
async def test_an_engine_lost_while_it_drains_is_not_started_again(
    autojump_clock: object, fault: Any
) -> None:
    lab = Lab([Timed()])
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        await cluster.scale("e0", 2)
        lab.faulty[0].plan = {2: fault}
        async with cluster.client.generate("hello", engine="e0-1") as stream:
            await trio.sleep(1.5 * STEP_S)
            nursery.start_soon(cluster.scale, "e0", 1)
            with pytest.raises(EngineLost):
                await stream.read_all()
        await trio.sleep(20)
        assert [each.engine.name for each in cluster.statistics().engines] == ["e0-0"]
        assert len(lab.watched[0].births) == 2
        check_idle(cluster)


async def test_a_life_lost_while_the_cluster_ends_delays_nothing(autojump_clock: object) -> None:
    lab = Lab([CostModel("h20-4b"), CostModel("h20-4b")])
    async with lab.open() as cluster:
        async with cluster.client.generate("hello", engine="e1-0") as stream:
            await stream.__anext__()
        lab.faulty[1].inject(CRASH)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 0.5
    check_idle(cluster)


async def test_epochs_go_on_when_a_name_comes_back(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        for epoch in range(3):
            await cluster.scale("e0", 2)
            completion = await cluster.client.complete("a", engine="e0-1")
            assert completion.engine == EngineId("e0-1", epoch)
            await cluster.scale("e0", 1)


@pytest.mark.parametrize("count", [0, -1, 1025])
async def test_a_count_that_cannot_be_changes_nothing(autojump_clock: object, count: int) -> None:
    async with Lab().open() as cluster:
        with pytest.raises(ConfigError, match=r"min_ready|must be between 1 and 1024"):
            await cluster.scale("e1", count)
        assert {each.state for each in cluster.statistics().engines} == {EngineState.READY}
        assert (await cluster.client.complete("a", engine="e1-0")).text == "a"
