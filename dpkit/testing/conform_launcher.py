"""`check_launcher`: what whoever starts workers relies on in a launcher.

Starts real processes, some of which do what they should not: it takes real time, about a second.
Linux only, as it reads ``/proc``.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from dpkit.errors import LaunchFailed, ModelNotFound
from dpkit.testing import workers
from dpkit.testing.leaks import Belongings
from dpkit.testing.processes import is_alive
from dpkit.testing.rules import Nonconforming, Subject
from dpkit.testing.runs import leaf_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from dpkit.abc import Launcher

    OpenLauncher = Callable[[str, Mapping[str, Any]], AbstractAsyncContextManager[Launcher]]

SHORT = 0.2
"""Seconds of grace for a worker that will not use them well."""

_SOON = 0.05
"""Seconds after which a signal has had its effect, if it has one."""

_HERE = workers.__name__
_PREPARE = f"{_HERE}:prepare"
_STATE = {"word": "ready"}

GONE = "nothing that a worker started is left when its block is"
STATUS = "the status says how a worker ended"
TYPED = "an error of what prepares comes out as it was raised"
NO_WORK = "a work that cannot be imported is LaunchFailed"
CANCELLED = "a start that is cancelled is killed at once"
AFTERWARDS = "a closed launcher leaves no task, thread, descriptor or child"


async def check_launcher(open_launcher: OpenLauncher, *, limit: float = 10.0) -> None:
    """Check a launcher against the contract of `dpkit.abc.Launcher`.

    Args:
        open_launcher: Opens one whose workers' state ``"pkg.mod:function"`` prepares, called with
            the arguments that are given with it.
        limit: Seconds within which a process must have done what takes it milliseconds.

    Resource handling:
        What a launcher leaves behind of the workers, this ends.

    Error handling:
        Nonconforming: the first rule that is broken.
    """
    before = Belongings.now()
    check = _Check(open_launcher, limit)
    with tempfile.TemporaryDirectory() as folder, check.started:
        check.folder = Path(folder)
        with check.subject.must("a launcher can be opened and closed"):
            async with open_launcher(_PREPARE, _STATE) as launcher:
                check.subject.name = f"launcher {type(launcher).__qualname__}"
                await check.workers(launcher)
                await check.ends(launcher)
                await check.remains(launcher)
        await check.errors()
        await check.cancelled()
    left = Belongings.now().beyond(before)
    check.subject.demand(AFTERWARDS, not left, ", ".join(left))


class _Check:
    """One run of the suite."""

    folder = Path()

    def __init__(self, open_launcher: OpenLauncher, limit: float) -> None:
        self.subject = Subject("launcher")
        self.started = ExitStack()
        """Ends what is left of all that workers have started."""
        self._open = open_launcher
        self._limit = limit

    async def workers(self, launcher: Launcher) -> None:
        """What a worker is given."""
        rule = "a worker runs its work with its own arguments, on what was prepared"
        for args in ({"number": 1}, {"nested": {"list": [1, 2.5, None, "ü"]}}):
            with self.subject.must(rule):
                async with launcher.open_worker(f"{_HERE}:report", args, name="reporter") as worker:
                    status = await self._status(worker.wait)
                    said = self._last_line(worker.last_lines)
            self.subject.demand(STATUS, status == worker.status == 0, f"{status} instead of 0")
            self.subject.demand(rule, said.get("args") == args, f"it got {said.get('args')}")
            state = said.get("state")
            self.subject.demand(
                "what a worker does to its state, no other sees",
                state == ["ready"],
                f"it began with {state}",
            )
            own = said["group"] == said["session"] == worker.pid
            self.subject.demand("a worker leads its own session and group", own, str(said))

    async def ends(self, launcher: Launcher) -> None:
        """What is known of a worker that ended."""
        async with launcher.open_worker(f"{_HERE}:fail", name="failing") as worker:
            status = await self._status(worker.wait)
        self.subject.demand(STATUS, status == 1, f"{status} instead of 1 for one that raised")
        words = worker.last_lines[-1:]
        told = words and workers.CRASH in words[0]
        self.subject.demand("the last lines of a worker are kept", told, f"they end with {words}")
        async with launcher.open_worker(f"{_HERE}:leave", {"code": 7}, name="leaving") as worker:
            status = await self._status(worker.wait)
        self.subject.demand(STATUS, status == 7, f"{status} instead of 7 for an exit code of 7")
        async with launcher.open_worker(f"{_HERE}:serve", self._path("k"), name="killed") as worker:
            pids = await self._read(self._path("k"))
            alive = worker.status is None
            worker.send_signal(signal.SIGKILL)
            status = await self._status(worker.wait)
        self.subject.demand(STATUS, alive, "there was one when it was alive")
        self.subject.demand(STATUS, status == -9, f"{status} instead of -9 for one that was killed")
        self._demand_gone(pids)
        with self.subject.must("a worker that has ended can be signalled and killed in vain"):
            worker.send_signal(signal.SIGTERM)
            worker.kill()

    async def remains(self, launcher: Launcher) -> None:
        """What is left of a worker when its block is left."""
        path = self._path("obeys")
        async with launcher.open_worker(f"{_HERE}:serve", path, name="obeying", grace=60) as worker:
            pids = await self._read(path)
            worker.send_signal(signal.SIGINT)
            await trio.sleep(_SOON)
        rule = "Ctrl-C is the host's affair, and SIGTERM asks a worker to end"
        self.subject.demand(rule, worker.status == -15, f"{worker.status} instead of -15")
        self._demand_gone(pids)
        path = self._path("stubborn")
        args = {**path, "stubborn": True}
        async with launcher.open_worker(
            f"{_HERE}:serve", args, name="stubborn", grace=SHORT
        ) as worker:
            pids = await self._read(path)
        self.subject.demand(
            "a worker that ignores SIGTERM is killed after its grace",
            worker.status == -9,
            f"{worker.status} instead of -9",
        )
        self._demand_gone(pids)
        path = self._path("left")
        async with launcher.open_worker(f"{_HERE}:start_and_leave", path, name="left") as worker:
            await self._status(worker.wait)
        pids = await self._read(path)
        self._demand_gone(pids)

    async def errors(self) -> None:
        """What comes out of a start that fails, of the launcher or of its worker."""
        error = await self._start("refuse", {}, "report")
        good = isinstance(error, ModelNotFound) and workers.REFUSAL in str(error)
        self.subject.demand(TYPED, good, f"it was {error!r}")
        error = await self._start("crash", {}, "report")
        good = isinstance(error, LaunchFailed) and workers.CRASH in str(error)
        self.subject.demand(f"{TYPED}; LaunchFailed, if it is no DpkitError", good, f"{error!r}")
        error = await self._start("prepare", _STATE, "no_such_work")
        good = isinstance(error, LaunchFailed) and "no_such_work" in str(error)
        self.subject.demand(NO_WORK, good, f"it was {error!r}")

    async def cancelled(self) -> None:
        """What is left of a start that took too long."""
        path = self._path("hangs")
        pids = {}
        with trio.move_on_after(self._limit) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._start, "hang", path, "report")
                pids = await self._read(path)
                nursery.cancel_scope.cancel()
        self.subject.demand(CANCELLED, not scope.cancelled_caught, f"not in {self._limit:g} s")
        self._demand_gone(pids, CANCELLED)

    async def _start(
        self, prepare: str, args: Mapping[str, Any], work: str
    ) -> BaseException | None:
        """Open a launcher and a worker, and see what is raised."""
        try:
            async with (
                self._open(f"{_HERE}:{prepare}", args) as launcher,
                launcher.open_worker(f"{_HERE}:{work}", name="never"),
            ):
                return None
        except Exception as error:  # noqa: BLE001 - the caller judges it
            return leaf_of(error)

    def _path(self, name: str) -> dict[str, str]:
        return {"path": str(self.folder / name)}

    async def _read(self, path: Mapping[str, str]) -> dict[str, int]:
        """What a worker tells of itself, once it has."""
        pids = None
        with trio.move_on_after(self._limit):
            while (pids := _told(path)) is None:  # noqa: ASYNC110 - by another process
                await trio.sleep(0.005)
        self.subject.demand("a worker runs its work", pids, f"not within {self._limit:g} s")
        for pid in (pids or {}).values():
            with suppress(ProcessLookupError):  # it has ended
                self.started.callback(_end, os.pidfd_open(pid))
        return pids or {}

    async def _status(self, wait: Callable[[], Awaitable[int]]) -> int:
        with trio.move_on_after(self._limit):
            return int(await wait())
        raise Nonconforming(self.subject.name, STATUS, f"not within {self._limit:g} s")

    def _demand_gone(self, pids: Mapping[str, int], rule: str = GONE) -> None:
        left = [f"{who} {pid}" for who, pid in pids.items() if is_alive(pid)]
        self.subject.demand(rule, not left, f"still alive: {', '.join(left)}")

    def _last_line(self, lines: Sequence[str]) -> dict[str, Any]:
        rule = "the last lines of a worker are kept"
        self.subject.demand(rule, lines, "there are none when it has ended")
        said: dict[str, Any] = json.loads(lines[-1])
        return said


def _end(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def _told(path: Mapping[str, str]) -> dict[str, int] | None:
    file = Path(path["path"])
    if not file.exists():
        return None
    pids: dict[str, int] = json.loads(file.read_text())
    return pids
