"""Ten minutes of requests, cancellations and lost engines: nothing grows.

``DPKIT_SOAK_S`` makes it shorter or longer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import DpkitError
from dpkit.testing.leaks import Belongings
from dpkit.testing.processes import descendants
from tests.clusters import is_idle, slot_of
from tests.processes.lab import group, kill, open_processes, wait_back
from tests.waiting import until

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster

SOAK_S = float(os.environ.get("DPKIT_SOAK_S", "600"))
WARM_UP = 0.2
"""Share of the time after which what is there is what there is to be."""
GROWTH_MIB = 8
"""What an allocator may keep to itself; a life that is kept, or a request, would come to more."""


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def counts() -> tuple[int, int, int, int]:
    """Tasks, threads of the kernel's count, descriptors, and processes below this one."""
    now = Belongings.now()
    threads = len(list(Path("/proc/self/task").iterdir()))
    return now.tasks, threads, len(now.descriptors), len(descendants(os.getpid()))


async def ask_for_ever(cluster: Cluster, number: int) -> None:
    """Ask, and leave every now and then, for as long as this is let."""
    rng = random.Random(number)
    while True:
        with trio.move_on_after(rng.uniform(0, 0.3)):
            try:
                await cluster.client.complete(f"{number} and so on", resume=bool(number % 2))
            except DpkitError:
                await trio.sleep(0.01)
        await trio.lowlevel.checkpoint()


async def use(cluster: Cluster, seconds: float, rng: random.Random) -> int:
    """Use it for so long, with an engine lost each second; returns how many were."""
    lost, ends_at = 0, trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(ask_for_ever, cluster, number)
        while trio.current_time() < ends_at:
            await trio.sleep(1)
            name = f"e-{rng.randrange(3)}"
            epoch = slot_of(cluster, name).engine.epoch
            kill(cluster, name)
            await wait_back(cluster, name, epoch + 1)
            lost += 1
        nursery.cancel_scope.cancel()
    await until(lambda: is_idle(cluster))
    return lost


@pytest.mark.slow
async def test_ten_minutes_of_losses_and_cancellations_leave_nothing_more_than_one() -> None:
    rng = random.Random(8)
    async with open_processes(group(model="Paced", count=3)) as cluster:
        await use(cluster, SOAK_S * WARM_UP, rng)
        memory, before = resident_mib(), counts()
        assert await use(cluster, SOAK_S * (1 - WARM_UP), rng) > SOAK_S / 4
        await until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))
        assert resident_mib() - memory < GROWTH_MIB
