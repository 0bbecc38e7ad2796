"""Groups of processes that step together: their waves, and the loss of a rank at any moment."""

# ruff: noqa: N802 - tests carry the reports' names
from __future__ import annotations

import random
import signal
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.errors import ConfigError
from dpkit.names import EngineState
from dpkit.nursery.events import EventKind
from dpkit.testing.history import History
from tests.clusters import slot_of, told
from tests.processes.lab import group, kill, open_processes, sockets_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.gathering import Round

WAVES = """
[admission]
retry_budget = 1.0
[coordinator]
interval = "10ms"
wave_coordination = true
sync_interval = 4
"""
REQUESTS = 6

pytestmark = pytest.mark.timeout(60)  # torch is imported anew for each cluster


def ranks(
    count: int, *, strategy: str = "one_for_all", model: str = "Paced", more: str = ""
) -> str:
    soon = 'backoff = "1ms", backoff_max = "5ms", jitter = 0.0, intensity = 1000'
    return group(
        model=model,
        count=count,
        supervision=f'strategy = "{strategy}", {soon}{more}',
        process='start_timeout = "20s"',
    )


@asynccontextmanager
async def open_ranks(count: int, **options: str) -> AsyncIterator[Cluster]:
    async with open_processes(ranks(count, **options), settings=WAVES) as cluster:
        yield cluster


def round_of(cluster: Cluster) -> Round:
    """The present life of the group."""
    gathering = cluster._slots[0].gathering
    assert gathering is not None
    assert gathering.round is not None
    return gathering.round


def waves_of(cluster: Cluster) -> tuple[int, bool]:
    """The wave that the coordinator of the cluster speaks of, and whether it runs."""
    now = cluster.statistics().coordinator
    return now.current_wave, now.engines_running


@pytest.mark.parametrize("count", [2, 3])
async def test_I02_a_group_goes_through_wave_after_wave_from_any_rank_on(count: int) -> None:
    async with open_ranks(count) as cluster:
        for wave in range(3):
            # A request at any rank wakes all: alone it could not come by a vote.
            rank = (count - 1 - wave) % count
            answer = await cluster.client.complete("and so on", engine=f"e-{rank}")
            assert answer.text == "and so on"
            await wait_asleep(cluster, wave + 1)
            assert round_of(cluster).wave == wave + 1
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_prompts_that_wait_for_one_another_all_have_their_turn() -> None:
    settings = WAVES + '[balancer]\npolicy = "expected_ttft"\n'
    async with open_processes(ranks(3, model="echo"), settings=settings) as cluster:
        [flights] = cluster._flights
        assert flights.line.view.steps_together
        answers = []

        async def ask(number: int) -> None:
            prompt = [number] * 300  # more than is short
            answers.append(await cluster.client.complete(prompt, max_tokens=20, ignore_eos=True))

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(ask, number)
        assert [len(each.token_ids) for each in answers] == [20] * 60


async def test_I01_a_stamp_of_a_wave_that_is_over_wakes_sender_and_peers() -> None:
    async with open_ranks(2) as cluster:
        await cluster.client.complete("hello", engine="e-0")
        await wait_asleep(cluster, 1)
        for connection in round_of(cluster)._connections:
            connection.current_wave = 0
        with trio.fail_after(10):
            assert (await cluster.client.complete("hello", engine="e-1")).text == "hello"


async def test_a_new_life_of_the_group_begins_at_wave_0_at_other_addresses() -> None:
    async with open_ranks(2) as cluster:
        await cluster.client.complete("hello")
        await wait_asleep(cluster, 1)
        former, files = round_of(cluster), sockets_of(cluster)
        assert len(files) == 2 * 3 + 3, "and the coordinator's"
        kill(cluster, "e-1")
        await wait_whole(cluster, 1)
        assert len(sockets_of(cluster)) == len(files)
        assert not {*sockets_of(cluster)} & {*files}
        present = round_of(cluster)
        assert former.over.is_set()
        assert waves_of(cluster) == (present.wave, False) == (0, False)
        assert not {former.addresses.back_output} & {present.addresses.back_output}
        assert former.parallel_config != present.parallel_config
        assert (await cluster.client.complete("hello")).text == "hello"


async def wait_asleep(cluster: Cluster, wave: int) -> None:
    """Wait until all waves before that one have ended."""
    await until(lambda: waves_of(cluster) == (wave, False))


async def wait_whole(cluster: Cluster, epoch: int) -> None:
    """Wait until all ranks serve, in that life or a later one."""
    await until(lambda: is_whole(cluster, epoch))


def is_whole(cluster: Cluster, epoch: int) -> bool:
    """Whether all ranks serve, in that life or a later one."""
    slots = cluster._slots
    return all(s.engine.epoch >= epoch and s.state is EngineState.READY for s in slots)


async def kill_again_and_again(
    times: int, seed: int, *, count: int = 3, resume: bool = True
) -> Counter[str]:
    """Kill one rank after the other, each at some step of a wave; returns how requests ended."""
    rng, history = random.Random(seed), History()
    async with open_ranks(count) as cluster:
        for number in range(times):
            epoch = slot_of(cluster, "e-0").engine.epoch

            async def ask(name: str, delay: float) -> None:
                await trio.sleep(delay)
                prompt = "and so on, to the end"
                await history.complete(cluster.client, prompt, request_id=name, resume=resume)

            async with trio.open_nursery() as nursery:
                for each in range(REQUESTS):
                    nursery.start_soon(ask, f"{number}-{each}", rng.uniform(0, 0.04))
                await trio.sleep(rng.uniform(0, 0.12))
                kill(cluster, f"e-{rng.randrange(count)}")
            with trio.fail_after(20):
                await wait_whole(cluster, epoch + 1)
        assert (await cluster.client.complete("hello")).text == "hello"
        await until(lambda: not waves_of(cluster)[1])
    history.check(cluster)
    assert {slot.restarts for slot in cluster._slots} == {times}
    return Counter(entry.outcomes[0] for entry in history.entries)


@pytest.mark.parametrize("count", [2, 3])
async def test_a_rank_is_killed_at_any_step_and_the_group_begins_anew(count: int) -> None:
    ends = await kill_again_and_again(6, seed=count, count=count)
    assert ends == {"stop": 6 * REQUESTS}


async def test_what_was_begun_without_leave_to_resume_ends_once_with_its_engine() -> None:
    ends = await kill_again_and_again(3, seed=3, resume=False)
    assert ends.keys() <= {"stop", "EngineLost"}
    assert ends.total() == 3 * REQUESTS


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rank_is_killed_a_hundred_times() -> None:
    ends = await kill_again_and_again(100, seed=100)
    assert ends == {"stop": 100 * REQUESTS}


async def test_I08_a_rank_that_hangs_ends_the_group_within_a_limit() -> None:
    async with open_ranks(2, model="Obedient", more=', step_timeout = "500ms"') as cluster:
        with trio.fail_after(10):
            answer = await cluster.client.complete("hello", engine="e-0")
            assert answer.text == "hello"
            stream = cluster.client.generate("hang:", engine="e-1", resume=False)
            async with stream:
                with pytest.raises(Exception, match="e-1 is stuck"):
                    async for _ in stream:
                        pass
            await wait_whole(cluster, 1)
            assert (await cluster.client.complete("hello", engine="e-1")).text == "hello"


async def test_a_group_is_not_scaled_and_waits_for_a_rank_that_stops_for_a_while() -> None:
    async with open_ranks(2) as cluster:
        with pytest.raises(ConfigError, match="depend on one another"):
            await cluster.scale("e", 3)
        kill(cluster, "e-1", signal.SIGSTOP)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert (await cluster.client.complete("hello", engine="e-0")).text == "hello"

            nursery.start_soon(ask)
            await trio.sleep(0.2)
            kill(cluster, "e-1", signal.SIGCONT)
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_a_group_that_has_work_ends_in_order() -> None:
    async with open_ranks(3) as cluster:
        stream = cluster.client.generate("and so on " * 20, engine="e-2")
        async with stream:
            async for _ in stream:
                break
        # Its rank has still to hear of that, and the others step along.
    assert not told(cluster, EventKind.ENGINE_LOST)


def test_engines_that_step_together_restart_together() -> None:
    lone = group(count=2, supervision='strategy = "one_for_one"')
    with pytest.raises(ConfigError, match="restart together"):
        parse_config(f"{WAVES}\n{lone}")
    with pytest.raises(ConfigError, match=r"have a single \[\[engines\]\] table"):
        parse_config(f"{WAVES}\n{ranks(2)}\n{group('more', count=2)}")
    config = parse_config(f"{WAVES}\n{group()}")
    assert not config.steps_together(config.engines[0])  # one alone is no group


# -- Going on without who was lost -----------------------------------------------------------------


def members(cluster: Cluster) -> set[str]:
    """The engines that serve."""
    return {s.name for s in cluster._slots if s.state is EngineState.READY}


async def test_E06_a_group_goes_on_without_the_rank_that_was_lost() -> None:
    async with open_ranks(4, strategy="all_but_one") as cluster:
        answer = cluster.client.generate("and so on, to the end", resume=True)
        async with answer:
            async for _ in answer:
                break
            kill(cluster, "e-1")
            await until(lambda: members(cluster) == {"e-0", "e-2", "e-3"})
            async for _ in answer:
                pass
        assert answer.text == "and so on, to the end"
        assert round_of(cluster).ranks == (0, 2, 3)
        down = slot_of(cluster, "e-1").statistics()
        assert down.state is EngineState.DOWN
        assert "was killed by SIGKILL" in str(down.last_error)
        assert len(told(cluster, EventKind.ENGINE_DOWN)) == 1
        for rank in (0, 2, 3):
            answer_ = await cluster.client.complete("hello", engine=f"e-{rank}")
            assert answer_.text == "hello"


async def test_the_last_rank_goes_on_alone() -> None:
    async with open_ranks(2, strategy="all_but_one") as cluster:
        kill(cluster, "e-0")
        await until(lambda: members(cluster) == {"e-1"} and round_of(cluster).ranks == (1,))
        assert (await cluster.client.complete("hello")).text == "hello"
        kill(cluster, "e-1")  # nobody would be left: both try again
        await until(lambda: members(cluster) == {"e-0", "e-1"})
        assert (await cluster.client.complete("hello", engine="e-0")).text == "hello"


async def test_who_was_lost_long_ago_comes_back_at_the_next_loss() -> None:
    async with open_ranks(3, strategy="all_but_one", more=', period = "1s"') as cluster:
        kill(cluster, "e-0")
        await wait_anew(cluster, {"e-1", "e-2"}, 1)
        await trio.sleep(1.0)
        kill(cluster, "e-2")
        await until(lambda: members(cluster) == {"e-0", "e-1"})
        assert (await cluster.client.complete("hello", engine="e-0")).text == "hello"


async def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it() -> None:
    waves = WAVES + 'vote_timeout = "500ms"\n'
    async with open_processes(ranks(3, strategy="all_but_one"), settings=waves) as cluster:
        kill(cluster, "e-1", signal.SIGSTOP)
        assert (await cluster.client.complete("hello", resume=True)).text == "hello"
        assert members(cluster) == {"e-0", "e-2"}


async def wait_anew(cluster: Cluster, names: set[str], epoch: int) -> None:
    """Wait until these engines serve, all in that life or a later one, and no others."""

    def serve() -> bool:
        lives = [slot_of(cluster, name).engine for name in names]
        return members(cluster) == names and all(life.epoch >= epoch for life in lives)

    await until(serve)


async def kill_and_go_on(rounds: int, seed: int) -> Counter[str]:
    """Have groups of three shrink to one and be whole again, under load; how requests ended."""
    rng, history = random.Random(seed), History()
    settings = WAVES.replace("retry_budget = 1.0", "retry_budget = 1.0\nretries = 3")
    engines = ranks(3, strategy="all_but_one")
    async with open_processes(engines, settings=settings) as cluster:
        for number in range(rounds):

            async def ask(name: str, delay: float) -> None:
                await trio.sleep(delay)
                prompt = "and so on, to the end"
                await history.complete(cluster.client, prompt, request_id=name, resume=True)

            left = ["e-0", "e-1", "e-2"]
            while left:
                victim = left.pop(rng.randrange(len(left)))
                then = left or ["e-0", "e-1", "e-2"]  # nobody would be left: all try again
                epoch = slot_of(cluster, victim).engine.epoch
                async with trio.open_nursery() as nursery:
                    for each in range(REQUESTS):
                        name = f"{number}-{len(left)}-{each}"
                        nursery.start_soon(ask, name, rng.uniform(0, 0.04))
                    await trio.sleep(rng.uniform(0, 0.12))
                    kill(cluster, victim)
                await wait_anew(cluster, {*then}, epoch + 1)
        assert (await cluster.client.complete("hello")).text == "hello"
    history.check(cluster)
    return Counter(entry.outcomes[0] for entry in history.entries)


async def test_E06_a_group_shrinks_at_any_step_down_to_one_and_is_whole_again() -> None:
    ends = await kill_and_go_on(2, seed=6)
    assert ends == {"stop": 2 * 3 * REQUESTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_E06_a_group_shrinks_a_hundred_times() -> None:
    ends = await kill_and_go_on(34, seed=34)
    assert ends == {"stop": 34 * 3 * REQUESTS}
