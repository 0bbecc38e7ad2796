"""Whatever is killed, and however: nothing of it is left, and its owner knows."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.launch import tether
from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote
from dpkit.testing.processes import descendants, is_alive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.abc import Launcher, Worker

HERE = "launch_targets"
NUMBERS = itertools.count()


@pytest.fixture(params=["zygote", "spawner"])
def opener(request: pytest.FixtureRequest) -> Any:
    return {"zygote": open_zygote, "spawner": open_spawner}[request.param]


@asynccontextmanager
async def open_family(
    launcher: Launcher, folder: Path, *, grace: float = 5.0
) -> AsyncIterator[tuple[Worker, int, set[int]]]:
    """A worker with a child in another session; it, its keeper, and all of them."""
    path = folder / f"family-{next(NUMBERS)}"
    args = {"path": str(path)}
    async with launcher.open_worker(f"{HERE}:serve_with_child", args, name="w", grace=grace) as it:
        while not await trio.Path(path).exists():  # noqa: ASYNC110 - by another process
            await trio.sleep(0.005)
        (keeper,) = {pid for pid in descendants(os.getpid()) if it.pid in _children(pid)}
        family = descendants(keeper)
        assert len(family) == 2
        yield it, keeper, family | {keeper}


def _children(pid: int) -> set[int]:
    """Zombies too."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if is_alive(pid)}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP])
async def test_a_killed_worker_is_told_by_its_signal_and_leaves_nothing(
    opener: Any, tmp_path: Path, signum: signal.Signals
) -> None:
    async with opener(f"{HERE}:prepare", name="launcher") as launcher:
        async with open_family(launcher, tmp_path) as (worker, _, family):
            os.kill(worker.pid, signum)
            assert await worker.wait() == -signum
            assert str(worker.status) == f"was killed by {signum.name}"
        assert not alive(family)


async def test_a_stopped_worker_can_be_killed(opener: Any, tmp_path: Path, until: Any) -> None:
    async with opener(f"{HERE}:prepare", name="launcher") as launcher:
        async with open_family(launcher, tmp_path, grace=0.05) as (worker, _, family):
            os.kill(worker.pid, signal.SIGSTOP)
            await until(lambda: ") T " in Path(f"/proc/{worker.pid}/stat").read_text())
        assert worker.status == -signal.SIGKILL
        assert not alive(family)


async def test_killing_takes_its_children_too(opener: Any, tmp_path: Path, until: Any) -> None:
    async with (
        opener(f"{HERE}:prepare", name="launcher") as launcher,
        open_family(launcher, tmp_path) as (worker, _, family),
    ):
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL
        await until(lambda: not alive(family))


async def test_a_killed_keeper_takes_its_worker_along(opener: Any, tmp_path: Path) -> None:
    async with opener(f"{HERE}:prepare", name="launcher") as launcher:
        async with open_family(launcher, tmp_path) as (worker, keeper, family):
            os.kill(keeper, signal.SIGKILL)
            assert await worker.wait() == -signal.SIGKILL
        assert not alive({worker.pid, keeper})
    (child,) = family - {worker.pid, keeper}
    if opener is open_zygote:
        assert not is_alive(child), "the zygote's keeper took care of it"
    else:
        os.kill(child, signal.SIGKILL)  # as the page says: there is nobody left to do it


async def test_a_keeper_that_is_told_to_end_does(opener: Any, tmp_path: Path) -> None:
    async with opener(f"{HERE}:prepare", name="launcher") as launcher:
        async with open_family(launcher, tmp_path) as (worker, keeper, family):
            os.kill(keeper, signal.SIGTERM)
            assert await worker.wait() == -signal.SIGKILL
        assert not alive(family)


async def test_a_keeper_that_was_stopped_is_killed_when_its_time_is_up(
    opener: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tether, "KILL_WITHIN", 0.05)
    async with opener(f"{HERE}:prepare", name="launcher") as launcher:
        async with open_family(launcher, tmp_path, grace=0) as (worker, keeper, family):
            os.kill(keeper, signal.SIGSTOP)
        assert not alive({worker.pid, keeper})
        (child,) = family - {keeper, worker.pid}
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


async def test_a_killed_zygote_takes_its_workers_along_and_leaves_nothing(
    tmp_path: Path, until: Any
) -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        async with (
            open_family(zygote, tmp_path) as (one, _, family),
            open_family(zygote, tmp_path) as (two, _, other),
        ):
            assert zygote.pid is not None
            os.kill(zygote.pid, signal.SIGKILL)
            assert await one.wait() == await two.wait() == -signal.SIGKILL
        await until(lambda: not alive(family | other))


async def test_leaving_has_a_limit_though_the_grace_is_long_and_the_task_is_cancelled(
    opener: Any, tmp_path: Path
) -> None:
    async with opener(f"{HERE}:prepare", name="launcher") as launcher:
        with trio.CancelScope() as scope:
            async with open_family(launcher, tmp_path, grace=60) as (worker, _, family):
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert worker.status == -signal.SIGTERM
        assert not alive(family)


async def test_an_error_of_the_block_comes_out_bare_when_all_is_gone(
    opener: Any, tmp_path: Path
) -> None:
    error = ValueError("of the block")
    with pytest.raises(ValueError, match="of the block") as caught:
        async with (
            opener(f"{HERE}:prepare", name="launcher") as launcher,
            open_family(launcher, tmp_path) as (_, _, family),
        ):
            raise error
    assert caught.value is error
    assert not alive(family)


async def test_a_hundred_kills_at_any_moment_leave_nothing(tmp_path: Path, until: Any) -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        before = descendants(os.getpid())

        async def once(number: int) -> None:
            with trio.move_on_after(number * 0.001):
                async with zygote.open_worker(f"{HERE}:serve", name=f"w{number}", grace=0.1) as it:
                    if number % 2:
                        os.kill(it.pid, signal.SIGKILL)
                        await it.wait()
                    else:
                        await trio.sleep_forever()

        for start in range(0, 100, 20):
            async with trio.open_nursery() as nursery:
                for number in range(start, start + 20):
                    nursery.start_soon(once, number)
        await until(lambda: descendants(os.getpid()) == before)
        assert zygote.pid is not None
        assert not _children(zygote.pid), "no zombies either"
