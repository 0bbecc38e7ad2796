"""Reports of other engines' users about processes, tried on ours; F01 and G08: test_head_dies."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.errors import LaunchFailed
from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote
from dpkit.testing.processes import descendants, is_alive

if TYPE_CHECKING:
    from pathlib import Path

HERE = "launch_targets"


@pytest.mark.parametrize("victim", [0, 2, 3])
async def test_G06_the_death_of_any_worker_is_seen_at_once(victim: int) -> None:  # noqa: N802
    async with AsyncExitStack() as stack:
        zygote = await stack.enter_async_context(open_zygote(f"{HERE}:prepare", name="zygote"))
        workers = [
            await stack.enter_async_context(zygote.open_worker(f"{HERE}:serve", name=f"w{n}"))
            for n in range(4)
        ]
        os.kill(workers[victim].pid, signal.SIGKILL)
        assert await workers[victim].wait() == -signal.SIGKILL
        others = [worker for worker in workers if worker is not workers[victim]]
        assert [worker.status for worker in others] == [None] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_G07_nobody_holds_the_end_of_anothers_pipe_open(  # noqa: N802
    victim: int, tmp_path: Path, until: Any
) -> None:
    """Each dies while it still prepares; what would keep that from being seen is a stray copy."""
    errors: dict[int, LaunchFailed] = {}

    async def start(number: int) -> None:
        args = {"path": str(tmp_path / str(number))}
        try:
            async with (
                open_spawner(f"{HERE}:hang_with_child", args, name="spawner") as spawner,
                spawner.open_worker(f"{HERE}:serve", name=f"w{number}"),
            ):
                raise AssertionError
        except LaunchFailed as error:
            errors[number] = error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for number in range(3):
            before = descendants(os.getpid())
            nursery.start_soon(start, number)
            await until((tmp_path / str(number)).exists)
            if number == victim:
                _, worker, _ = sorted(descendants(os.getpid()) - before)
        os.kill(worker, signal.SIGKILL)
    assert set(errors) == {victim}
    assert "was killed by SIGKILL" in str(errors[victim])


async def test_F02_a_tree_of_any_depth_goes(tmp_path: Path, until: Any) -> None:  # noqa: N802
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        args = {"path": str(tmp_path / "deep"), "depth": 5}
        async with zygote.open_worker(f"{HERE}:nest", args, name="deep", grace=0) as worker:
            await until((tmp_path / "deep").exists)
            family = descendants(worker.pid)
            assert len(family) == 5
        assert not any(is_alive(pid) for pid in family)


async def test_F09_an_error_in_the_third_start_stops_the_first_two() -> None:  # noqa: N802
    workers: list[Any] = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - where it is raised is the point
        async with AsyncExitStack() as stack:
            zygote = await stack.enter_async_context(open_zygote(f"{HERE}:prepare", name="z"))
            for number in range(4):
                worker = zygote.open_worker(f"{HERE}:serve", name=f"w{number}")
                workers.append(await stack.enter_async_context(worker))
                assert 1 / (2 - number)
    assert [worker.status for worker in workers] == [-signal.SIGTERM] * 3
    assert not any(is_alive(worker.pid) for worker in workers)


def test_G10_workers_can_be_had_from_a_thread() -> None:  # noqa: N802
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGCHLD)}
    lines: list[str] = []

    async def main() -> None:
        async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
            async with zygote.open_worker(f"{HERE}:say", {"word": "there"}, name="w") as worker:
                await worker.wait()
            lines.extend(worker.last_lines)

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    thread.join()
    assert lines == ["there"]
    assert {each: signal.getsignal(each) for each in handlers} == handlers
