"""Both launchers keep the contract, and faulty ones are told which rule they break."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import define

from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote
from dpkit.testing.conformance import Nonconforming, check_launcher
from dpkit.testing.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dpkit.abc import Launcher, Worker


async def test_the_zygote_conforms() -> None:
    await check_launcher(lambda prepare, args: open_zygote(prepare, args, name="zygote"))


async def test_the_spawner_conforms() -> None:
    await check_launcher(lambda prepare, args: open_spawner(prepare, args, name="spawner"))


class Face:
    """A worker, as it is but for what is overridden."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def leave(self) -> None:
        """Its block is about to be left."""


class Optimistic(Face):
    """All is well, always."""

    status = 0

    async def wait(self) -> int:
        await self.worker.wait()
        return 0


class Wordless(Face):
    """Keeps no lines."""

    last_lines = ()


class Unheard(Face):
    """Hears of no end."""

    async def wait(self) -> int:
        await trio.sleep(1000)
        return 0


class Impatient(Face):
    """Kills at once."""

    def leave(self) -> None:
        self.worker.kill()


@define
class Wrapper:
    """A launcher whose workers have another face, and that may lose their arguments."""

    launcher: Launcher
    face: type[Face] = Face
    forgetful: bool = False

    @asynccontextmanager
    async def open_worker(
        self, work: str, args: Mapping[str, Any] | None = None, *, name: str, grace: float = 5.0
    ) -> AsyncIterator[Any]:
        args = None if self.forgetful else args
        async with self.launcher.open_worker(work, args, name=name, grace=grace) as worker:
            face = self.face(worker)
            yield face
            face.leave()


@pytest.mark.parametrize(
    ("faulty", "rule"),
    [
        ({"forgetful": True}, "with its own arguments"),
        ({"face": Impatient}, "SIGTERM asks a worker to end"),
        ({"face": Optimistic}, "the status says"),
        ({"face": Wordless}, "last lines of a worker are kept"),
        ({"face": Unheard}, r"the status says .*: not within 0\.2 s$"),
    ],
)
async def test_faulty_launchers_are_told_which_rule_they_break(
    faulty: dict[str, Any], rule: str
) -> None:
    @asynccontextmanager
    async def open_faulty(prepare: str, args: Mapping[str, Any]) -> AsyncIterator[Launcher]:
        async with open_zygote(prepare, args, name="zygote") as zygote:
            yield Wrapper(zygote, **faulty)

    with pytest.raises(Nonconforming, match=rule):
        await check_launcher(open_faulty, limit=0.2 if faulty.get("face") is Unheard else 10)


@asynccontextmanager
async def _open_untyped(prepare: str, args: Mapping[str, Any]) -> AsyncIterator[Launcher]:
    """A launcher that says by whom it was told, and not what."""
    try:
        async with open_zygote(prepare, args, name="zygote") as zygote:
            yield zygote
    except Exception as error:
        raise RuntimeError("the zygote failed") from error


@asynccontextmanager
async def _open_leaky(prepare: str, args: Mapping[str, Any]) -> AsyncIterator[Launcher]:
    """A launcher that forgets a descriptor."""
    async with open_zygote(prepare, args, name="zygote") as zygote:
        LEAKED.append(os.open("/", os.O_RDONLY))
        yield zygote


LEAKED: list[int] = []


async def test_a_launcher_that_swallows_errors_does_not_conform() -> None:
    with pytest.raises(Nonconforming, match="comes out as it was raised"):
        await check_launcher(_open_untyped)


async def test_a_launcher_that_leaks_does_not_conform() -> None:
    try:
        with pytest.raises(Nonconforming, match=r"leaves no task.*descriptor"):
            await check_launcher(_open_leaky)
    finally:
        while LEAKED:
            os.close(LEAKED.pop())


_PROGRAM = """
import importlib, json, signal, sys
def find(target):
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)
signal.signal(signal.SIGINT, signal.SIG_IGN)
prepare, prepare_args, work, args = json.loads(sys.argv[1])
find(work)(find(prepare)(**prepare_args), **args)
"""


class Naive:
    """A launcher as one writes it first: it ends the process that it started, and that one only."""

    def __init__(self, prepare: str, args: Mapping[str, Any]) -> None:
        self._job = [prepare, args]

    @asynccontextmanager
    async def open_worker(
        self,
        work: str,
        args: Mapping[str, Any] | None = None,
        *,
        name: str,  # noqa: ARG002 - for its errors, if it had any
        grace: float = 5.0,
    ) -> AsyncIterator[Any]:
        command = [sys.executable, "-c", _PROGRAM, json.dumps([*self._job, work, args or {}])]
        with _start(command) as process:
            worker = NaiveWorker(process)
            yield worker
            process.terminate()
            with trio.move_on_after(grace):
                await worker.wait()
            process.kill()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


class NaiveWorker:
    """A process, with the face of a worker."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.last_lines: list[str] = []
        self.send_signal = process.send_signal
        self.kill = process.kill

    @property
    def status(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        while self._process.poll() is None:  # noqa: ASYNC110 - it is naive
            await trio.sleep(0.01)
        if self._process.stdout is not None and not self.last_lines:
            descriptor = self._process.stdout.fileno()
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                self.last_lines += os.read(descriptor, 65536).decode().splitlines()
        return self._process.returncode


async def test_a_launcher_that_ends_one_process_only_does_not_conform() -> None:
    @asynccontextmanager
    async def open_naive(prepare: str, args: Mapping[str, Any]) -> AsyncIterator[Any]:
        yield Naive(prepare, args)

    with pytest.raises(Nonconforming, match="nothing that a worker started is left") as caught:
        await check_launcher(open_naive)
    left = [int(pid) for pid in re.findall(r"(?:child|orphan) (\d+)", str(caught.value))]
    assert len(left) == 2
    with trio.fail_after(10):
        while any(map(is_alive, left)):  # noqa: ASYNC110 - other processes know no events
            await trio.sleep(0.005)
