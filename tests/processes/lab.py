"""Clusters whose engines live in processes, and what tests ask of them.

Real processes know no virtual clock: what a test waits for, it waits for by looking again and
again (`until`), within a limit that is no promise.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from dpkit.config.load import parse_config
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.remote import RemoteLife
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.events import Event, EventKind
    from dpkit.nursery.slot import EngineSlot

SUPERVISION = (
    'backoff = "1ms", backoff_max = "5ms", jitter = 0.0, intensity = 1000, step_timeout = "10s"'
)
MODELS = "tests.processes.models"
LIMIT_S = 15.0


def group(
    name: str = "e",
    *,
    model: str = "echo",
    count: int = 1,
    supervision: str = SUPERVISION,
    process: str = "",
    more: str = "",
) -> str:
    """One ``[[engines]]`` table; a model without a colon and with a capital is one of ours."""
    model = f"{MODELS}:{model}" if model[0].isupper() else model
    return f"""
        [[engines]]
        name = "{name}"
        kind = "process"
        model = "{model}"
        count = {count}
        supervision = {{ {supervision} }}
        process = {{ {process} }}
        {more}
    """


def make_config(*groups: str, settings: str = "") -> Config:
    """A config of these groups; all that may be random is not."""
    return parse_config("\n".join([settings, *groups]), overrides=["cluster.seed=1"])


@asynccontextmanager
async def open_processes(
    *groups: str, settings: str = "", clients: int = 1
) -> AsyncIterator[Cluster]:
    """Open a cluster; when its block ends well, it must be idle, its processes gone."""
    lives: list[RemoteLife] = []
    async with open_cluster(make_config(*groups, settings=settings), clients=clients) as cluster:
        yield cluster
        await until(lambda: is_idle(cluster))
        check_idle(cluster)
        lives = [life_of(cluster, slot.name) for slot in cluster._slots]
    for life in lives:
        assert life.pid is None or not os.path.exists(f"/proc/{life.pid}")  # noqa: ASYNC240, PTH110
    assert cluster.audit() == ()


def is_idle(cluster: Cluster) -> bool:
    """Whether every engine that serves has said that it has nothing to do, and the books agree."""
    now = cluster.statistics()
    busy = any(each.core.running or each.core.waiting for each in now.engines)
    held = any(each.core.free_blocks != each.core.num_blocks for each in now.engines)
    return not (busy or held or cluster.audit())


async def until(holds: Callable[[], object], *, limit: float = LIMIT_S) -> None:
    """Wait until something is so."""
    with trio.fail_after(limit):
        while not holds():  # noqa: ASYNC110 - other processes set no events
            await trio.sleep(0.002)


def slot_of(cluster: Cluster, name: str) -> EngineSlot:
    """The place of an engine."""
    return next(slot for slot in cluster._slots if slot.name == name)


def life_of(cluster: Cluster, name: str) -> RemoteLife:
    """Its present life."""
    life = slot_of(cluster, name).life
    assert isinstance(life, RemoteLife)
    return life


def pid_of(cluster: Cluster, name: str) -> int:
    """Its process."""
    pid = life_of(cluster, name).pid
    assert pid is not None
    return pid


def kill(cluster: Cluster, name: str, signum: int = signal.SIGKILL) -> int:
    """Signal the process of an engine that serves; returns its number."""
    pid = pid_of(cluster, name)
    os.kill(pid, signum)
    return pid


def state_of(cluster: Cluster, name: str) -> EngineState:
    """Whether it serves."""
    return slot_of(cluster, name).state


async def wait_back(cluster: Cluster, name: str, epoch: int) -> None:
    """Wait until a life of an engine serves."""

    def serves() -> bool:
        return slot_of(cluster, name).engine.epoch >= epoch and is_ready(cluster, name)

    await until(serves)


async def wait_down(cluster: Cluster, name: str) -> None:
    """Wait until an engine has been given up."""
    await until(lambda: state_of(cluster, name) is EngineState.DOWN)


def is_ready(cluster: Cluster, name: str) -> bool:
    """Whether an engine serves."""
    return state_of(cluster, name) is EngineState.READY


def told(cluster: Cluster, *kinds: EventKind, of: str | None = None) -> list[Event]:
    """The events of these kinds (of an engine), oldest first."""

    def events() -> Iterator[Event]:
        for event in cluster.events:
            about = None if event.engine is None else event.engine.name
            if event.kind in kinds and of in {None, about}:
                yield event

    return list(events())
