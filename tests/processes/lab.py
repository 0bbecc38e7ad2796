"""Clusters whose engines live in processes, and what tests ask of them.

Real processes know no virtual clock: what a test waits for, it waits for by looking again and
again (`tests.waiting.until`).
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.remote import RemoteLife
from dpkit.testing.idle import check_idle
from tests.clusters import is_idle, make_config, slot_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.nursery.cluster import Cluster

SUPERVISION = (
    'backoff = "1ms", backoff_max = "5ms", jitter = 0.0, intensity = 1000, step_timeout = "10s"'
)
MODELS = "tests.processes.models"


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


@asynccontextmanager
async def open_processes(
    *groups: str, settings: str = "", clients: int = 1
) -> AsyncIterator[Cluster]:
    """Open a cluster; when its block ends well, it must be idle, its processes gone."""
    lives: list[RemoteLife] = []
    async with open_cluster(make_config(*groups, settings=settings), clients=clients) as cluster:
        yield cluster
        await until(lambda: is_idle(cluster) and not _holds_any(cluster))
        check_idle(cluster)
        lives = [life_of(cluster, slot.name) for slot in cluster._slots]
    for life in lives:
        assert life.pid is None or not os.path.exists(f"/proc/{life.pid}")  # noqa: ASYNC240, PTH110
    assert cluster.audit() == ()


def _holds_any(cluster: Cluster) -> bool:
    """Whether an engine has said last that a block is in use."""
    now = cluster.statistics()
    return any(each.core.free_blocks != each.core.num_blocks for each in now.engines)


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


def sockets_of(cluster: Cluster) -> list[Path]:
    """Files in the folders of sockets."""
    folders = [Path(host._folder) for host in cluster._launchers._hosts.values()]
    return [path for folder in folders for path in folder.iterdir()]


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
