"""Clusters of processes are drained, scaled, changed and embedded like any other."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.errors import (
    ClusterFailed,
    Draining,
    EngineLost,
    ModelUnsupported,
    ScalingFailed,
)
from dpkit.names import Cause, EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import kill_coordinator
from dpkit.testing.processes import descendants, is_alive
from tests.clusters import make_config, slot_of, told
from tests.processes.lab import (
    SUPERVISION,
    group,
    kill,
    life_of,
    open_processes,
    pid_of,
    state_of,
    wait_back,
)
from tests.waiting import until

if TYPE_CHECKING:
    import outcome

    from dpkit.nursery.cluster import Cluster

NO_RESTART = SUPERVISION.replace("intensity = 1000", "intensity = 0")


async def echo(cluster: Cluster, prompt: str, **options: Any) -> None:
    """Ask for an echo, and get it."""
    assert (await cluster.client.complete(prompt, **options)).text == prompt


async def test_drain_lets_processes_finish_and_admits_nothing_new() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(echo, cluster, f"{number} to the end, all of it")
            await until(lambda: sum(cluster.client.statistics().inflight.values()) == 8)
            await cluster.drain()
        with pytest.raises(Draining):
            await cluster.client.complete("late")
        assert cluster.client.statistics().causes == {Cause.STOP: 8}


async def test_drain_aborts_at_its_deadline_what_processes_still_do() -> None:
    async with open_processes(group(model="Paced")) as cluster:
        async with cluster.client.generate("endless", ignore_eos=True, max_tokens=9999) as stream:
            await stream.__anext__()
            await cluster.drain(trio.current_time() + 0.05)
            with pytest.raises(Draining):
                await stream.read_all()
        assert cluster.client.statistics().causes == {Cause.DRAIN: 1}


async def test_F04_F05_scaling_down_loses_no_answer_and_ends_the_process() -> None:
    async with open_processes(group(model="Paced", count=1)) as cluster:
        await cluster.scale("e", 2)
        pid = pid_of(cluster, "e-1")
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(partial(echo, cluster, f"{number} whole", engine="e-1"))
            engine = slot_of(cluster, "e-1").engine
            await until(lambda: cluster.client.statistics().inflight.get(engine) == 10)
            await cluster.scale("e", 1)
        assert not is_alive(pid)
        assert [slot.name for slot in cluster._slots] == ["e-0"]
        assert cluster.client.statistics().causes == {Cause.STOP: 10}


async def test_at_its_deadline_a_leaving_process_is_killed_and_its_requests_go_elsewhere() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        pid = pid_of(cluster, "e-1")
        async with cluster.client.generate("endless", engine="e-1", max_tokens=9999) as stream:
            kill(cluster, "e-1", signal.SIGSTOP)
            await cluster.scale("e", 1, deadline=trio.current_time() + 0.1)
            with pytest.raises(EngineLost, match="was retired"):
                await stream.read_all()
        await until(lambda: not is_alive(pid))


async def test_a_model_is_replaced_whole_and_its_launcher_is_let_go() -> None:
    async with open_processes(group(model="echo", count=2)) as cluster:
        before, pids = cluster.config, descendants(os.getpid())
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(echo, cluster, f"{number} undisturbed")
            await cluster.apply(
                evolve(before, engines=[evolve(before.engines[0], model="cost:h100-8b")])
            )
        completion = await cluster.client.complete("ab", max_tokens=4)
        assert completion.text == "abab", "as cost models answer"
        await until(lambda: not any(is_alive(pid) for pid in pids))
        assert len(cluster._launchers._hosts) == 1
        await cluster.apply(before)
        assert (await cluster.client.complete("ab", max_tokens=4)).text == "ab"


SPAWN = 'start = "spawn"'


@pytest.mark.parametrize(
    ("process", "changed", "error"),
    [
        ("", {"more": "kv.num_blocks = 7"}, ScalingFailed),
        ("", {"process": 'start_timeout = "1ms"'}, ScalingFailed),
        ("", {"process": SPAWN}, ScalingFailed),  # has to be loaded anew, and cannot be
        (SPAWN, {}, ModelUnsupported),  # likewise, for all engines at once
    ],
)
async def test_a_change_that_fails_changes_nothing(
    process: str, changed: dict[str, Any], error: type[Exception]
) -> None:
    async with open_processes(group(model="Choosy", process=process)) as cluster:
        before, pids = cluster.config, descendants(os.getpid())
        config = make_config(group(model="Choosy", supervision=NO_RESTART, **changed))
        with pytest.raises(error):
            await cluster.apply(config)
        assert cluster.config == before
        await until(lambda: descendants(os.getpid()) == pids)
        await echo(cluster, "all is as before")
        assert len(cluster._launchers._hosts) == 1


async def test_engines_that_depend_on_one_another_end_and_begin_together() -> None:
    supervision = f'strategy = "one_for_all", {SUPERVISION}'
    async with open_processes(group(model="Paced", count=3, supervision=supervision)) as cluster:
        pids = [pid_of(cluster, f"e-{n}") for n in range(3)]
        kill(cluster, "e-1")
        for number in range(3):
            await wait_back(cluster, f"e-{number}", 1)
        assert not any(is_alive(pid) for pid in pids)
        await echo(cluster, "together again")


async def test_below_min_ready_the_cluster_fails_with_the_first_cause() -> None:
    config = make_config(
        group(count=2, supervision=NO_RESTART), settings="cluster = { min_ready = 2 }"
    )

    async def run() -> None:
        async with open_cluster(config) as cluster:
            kill(cluster, "e-0")
            await trio.sleep_forever()

    with pytest.raises(ClusterFailed, match=r"e-0 .* was killed by SIGKILL"):
        await run()


@pytest.mark.parametrize("policy", ["kv_pressure", "expected_ttft"])
async def test_two_clients_share_processes_and_not_their_outputs(policy: str) -> None:
    few = "scheduler.max_num_seqs = 4"  # so that some wait, at the arbiter if there is one
    async with open_processes(
        group(model="Paced", count=2, more=few),
        settings=f'balancer.policy = "{policy}"',
        clients=2,
    ) as cluster:
        async with trio.open_nursery() as nursery:
            for index, client in enumerate(cluster.clients):

                async def ask(number: int, index: int = index, client: Any = client) -> None:
                    text = f"{number} for {index}"
                    name = f"same-{number}"
                    completion = await client.complete(text, request_id=name, resume=True)
                    assert completion.text == text

                for number in range(10):
                    nursery.start_soon(ask, number)
            await trio.sleep(0.03)
            kill(cluster, "e-0")
            kill_coordinator(cluster)
        await wait_back(cluster, "e-0", 1)


def test_G10_a_cluster_of_processes_runs_in_any_thread_and_touches_no_signal() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    texts: list[str] = []

    async def run() -> None:
        async with open_processes(group(count=2)) as cluster:
            await echo(cluster, "hello")
            kill(cluster, "e-0")
            await wait_back(cluster, "e-0", 1)
            texts.append((await cluster.client.complete("hello")).text)
            assert {number: signal.getsignal(number) for number in before} == before

    thread = threading.Thread(target=trio.run, args=[run])
    thread.start()
    thread.join()
    assert texts == ["hello"]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_thread_that_ends_takes_no_process_of_another_cluster_along() -> None:
    """The kernel ties a child to the thread that started it."""

    async def run() -> None:
        async with open_processes(group()) as cluster:
            pid = pid_of(cluster, "e-0")
            await trio.to_thread.run_sync(lambda: trio.run(_open_and_close))
            assert pid_of(cluster, "e-0") == pid
            await echo(cluster, "hello")

    async def _open_and_close() -> None:
        async with open_processes(group()) as cluster:
            await echo(cluster, "hello")

    trio.run(run)


def test_a_cluster_of_processes_is_a_guest_of_asyncio() -> None:
    async def guest() -> str:
        async with open_processes(group(count=2)) as cluster:
            kill(cluster, "e-0")
            await wait_back(cluster, "e-0", 1)
            return (await cluster.client.complete("hello")).text

    async def host() -> str:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[outcome.Outcome[str]] = loop.create_future()
        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        return (await ended).unwrap()

    assert asyncio.run(host()) == "hello"


async def test_a_scale_that_is_cancelled_leaves_no_process() -> None:
    async with open_processes(group(model="Choosy", count=1)) as cluster:
        pids = descendants(os.getpid())
        with trio.move_on_after(0.005):
            await cluster.scale("e", 3)
        await until(lambda: descendants(os.getpid()) == pids)
        assert len(cluster._slots) in {1, 3}
        await echo(cluster, "hello")


async def test_the_head_may_be_busy_for_longer_than_a_step_may_take() -> None:
    """A program that blocks its loop must not make its engines look hung."""
    supervision = SUPERVISION.replace('"10s"', '"200ms"')
    async with open_processes(group(model="Paced", count=2, supervision=supervision)) as cluster:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(echo, cluster, f"{number} some words that take a while")
            for _ in range(3):
                await trio.sleep(0.01)
                time.sleep(0.45)  # noqa: ASYNC251 - that is the point
        assert not told(cluster, EventKind.ENGINE_STUCK, EventKind.ENGINE_LOST)
        assert state_of(cluster, "e-0") is EngineState.READY
        assert life_of(cluster, "e-0").engine.epoch == 0
