"""A process that is stopped, or whose step never ends: seen, killed and replaced in time."""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import ClusterNotStarted, EngineLost, LaunchFailed
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.processes import is_alive
from tests.clusters import make_config, slot_of, told
from tests.processes.lab import SUPERVISION, group, kill, open_processes, pid_of, wait_back

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster

STEP_TIMEOUT_S = 0.4
LOOK_TWICE_S = 0.4
"""`step_timeout` if that is less than a second."""
BUSY_S = 0.5
"""What a machine that has other things to do may take longer, for a promise of a second."""

A_STEP, SILENCE = "a step has taken", "it has said nothing for"

QUICK = SUPERVISION.replace('"10s"', f'"{STEP_TIMEOUT_S}s"')


async def is_replaced(cluster: Cluster, name: str, since: float, pid: int) -> None:
    """Check that an engine was found out, killed and replaced, by the times of the events."""
    await wait_back(cluster, name, 1)
    stuck, lost = told(cluster, EventKind.ENGINE_STUCK, EventKind.ENGINE_LOST)
    assert stuck.engine == lost.engine is not None
    assert lost.engine.name == name
    assert 0 < lost.at - since < STEP_TIMEOUT_S + LOOK_TWICE_S + BUSY_S
    assert not is_alive(pid)
    ready = told(cluster, EventKind.ENGINE_READY, of=name)[-1]
    assert str(ready.engine) == f"{name}#1"


async def test_J12_a_stopped_process_is_ejected_at_its_step_timeout_and_replaced() -> None:
    async with open_processes(group(model="Paced", count=2, supervision=QUICK)) as cluster:
        async with trio.open_nursery() as nursery:
            stream = cluster.client.generate("abcdefghijklmnop", engine="e-0")
            nursery.start_soon(partial(cluster.client.complete, "that one serves", engine="e-1"))
            with pytest.raises(
                EngineLost,
                match=rf"is stuck: {SILENCE} more than 0\.4 s \(supervision.step_timeout",
            ):
                async with stream:
                    await stream.__anext__()
                    since, pid = trio.current_time(), kill(cluster, "e-0", signal.SIGSTOP)
                    await stream.read_all()
        assert stream.text
        await is_replaced(cluster, "e-0", since, pid)


async def test_E05_a_stopped_process_is_found_out_without_any_request() -> None:
    async with open_processes(group(count=2, supervision=QUICK)) as cluster:
        since, pid = trio.current_time(), kill(cluster, "e-1", signal.SIGSTOP)
        await is_replaced(cluster, "e-1", since, pid)


async def test_a_process_that_goes_on_in_time_is_left_alone() -> None:
    async with open_processes(group(supervision=QUICK)) as cluster:
        pid = kill(cluster, "e-0", signal.SIGSTOP)
        await trio.sleep(STEP_TIMEOUT_S / 2)
        kill(cluster, "e-0", signal.SIGCONT)
        assert (await cluster.client.complete("hello")).text == "hello"
        await trio.sleep(STEP_TIMEOUT_S + LOOK_TWICE_S)
        assert pid_of(cluster, "e-0") == pid
        assert not told(cluster, EventKind.ENGINE_LOST)


@pytest.mark.parametrize(
    ("model", "order", "delay"),
    [
        ("Obedient", "hang", A_STEP),
        ("Obedient", "gil", SILENCE),
        ("Inline", "hang", SILENCE),
        pytest.param("Obedient", "spin", A_STEP, marks=pytest.mark.slow),
    ],
)
async def test_E03_a_step_that_never_ends_costs_its_engine_only(
    model: str, order: str, delay: str
) -> None:
    async with open_processes(group(model=model, count=2, supervision=QUICK)) as cluster:
        pid = pid_of(cluster, "e-0")
        stream = cluster.client.generate(f"{order}: abcdefgh", engine="e-0")
        with pytest.raises(EngineLost, match=f"e-0 is stuck: {delay} more than"):
            async with stream:
                while len(stream.token_ids) < 2:
                    await stream.__anext__()
                since = trio.current_time()
                assert (await cluster.client.complete("hello")).text == "hello", "on the other one"
                await stream.read_all()
        await is_replaced(cluster, "e-0", since, pid)


async def test_a_step_that_takes_long_but_ends_is_left_alone() -> None:
    """Though its process says nothing meanwhile, not even that it lives."""
    async with open_processes(group(model="Ponderous", supervision=QUICK)) as cluster:
        assert (await cluster.client.complete("four")).text == "four"
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_allocating_for_ever_ends_at_the_start_timeout_and_is_tried_again() -> None:
    async with open_processes(
        group("good", model="HangsInAllocate"),  # with time to load, on a busy machine
        group(model="HangsInAllocate", process='start_timeout = "600ms"', more="kv.num_blocks = 7"),
    ) as cluster:
        [lost, *_] = told(cluster, EventKind.ENGINE_LOST, of="e-0")
        assert "was not ready within 0.6 s (engines.process.start_timeout)" in lost.detail
        assert slot_of(cluster, "e-0").restarts >= 1
        completion = await cluster.client.complete("hello", engine="e-0", max_tokens=9)
        assert completion.text == "hello"


async def test_G05_a_start_that_never_ends_fails_and_names_the_key_and_the_last_words() -> None:
    config = make_config(
        group("good", model="HangsAndSays"),
        group(
            model="HangsAndSays",
            supervision="intensity = 0",
            process='start_timeout = "600ms"',
            more="kv.num_blocks = 7",
        ),
        settings="cluster = { min_ready = 2 }",
    )
    with pytest.raises(
        ClusterNotStarted, match=r"start_timeout.*its last words: allocates / and waits"
    ) as e:
        async with open_cluster(config):
            pytest.fail("an engine that is not ready cannot serve")
    assert isinstance(e.value.__cause__, LaunchFailed)
