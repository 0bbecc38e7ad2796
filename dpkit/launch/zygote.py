"""Workers forked from a zygote: a process that has prepared what all of them need.

Preparing (imports, loading a model) is done once; a worker is then there within milliseconds and
shares that memory until it writes to it. Useful to any Trio program::

    async with open_zygote("app.model:load", {"path": "weights.bin"}, name="model") as zygote:
        async with zygote.open_worker("app.model:serve", {"port": 8000}, name="server-0") as worker:
            print(await worker.wait())

Owns the zygote and, block by block, its workers. No signal handlers, no threads, and the host
process adopts nobody's children.
"""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import trio

from dpkit.errors import DpkitError, LaunchFailed
from dpkit.imports import refuse_while_importing
from dpkit.launch.notes import Job, encode_job
from dpkit.launch.process import Worker
from dpkit.launch.start import start_keeper
from dpkit.launch.tether import open_tether
from dpkit.nursery.context import protected_context
from dpkit.nursery.services import open_services

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dpkit.launch.tether import Ends, Tether
    from dpkit.nursery.services import Services

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""A pool of threads would not be there after a fork, and its locks would be held for ever."""


_NEWS_WITHIN = 0.2
"""Seconds by which the news of a zygote's end may be later than that of its worker's."""


class _Life:
    """One zygote process, from its start to its end."""

    def __init__(self) -> None:
        self.settled = trio.Event()
        self.error: DpkitError | None = None
        self.tether: Tether | None = None
        self._turn = trio.Lock()
        self._requests: socket.socket | None = None

    @property
    def over(self) -> bool:
        """Whether no worker will come of it any more."""
        return self.settled.is_set() and (self.tether is None or self.tether.status is not None)

    async def run(self, name: str, note: bytes, env: Mapping[str, str]) -> None:
        """Start it, and see it to its end; what it failed of is `error`."""

        async def launch(tether: Tether, ends: Ends) -> None:
            self._requests, its_requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._requests.setblocking(False)
            with its_requests:
                start_keeper(note, tether, ends, its_requests.fileno(), env=env)

        try:
            async with open_tether(name, launch, grace=0) as self.tether:
                self.settled.set()
                await self.tether.gone.wait()
        except DpkitError as error:
            self.error = error
        finally:
            self.settled.set()
            if self._requests is not None:
                trio.lowlevel.notify_closing(self._requests)
                self._requests.close()

    async def fork(self, note: bytes, ends: Ends) -> None:
        """Ask for a worker, which gets these ends.

        Raises:
            LaunchFailed: the zygote has gone.
        """
        async with self._turn:
            while self._requests is not None and not self.over:
                with suppress(BlockingIOError):  # it forks as fast as it can
                    self._send(self._requests, note, ends)
                    return
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(self._requests)
        raise LaunchFailed("the zygote has ended")

    def _send(self, requests: socket.socket, note: bytes, ends: Ends) -> None:
        try:
            socket.send_fds(requests, [note], list(ends.descriptors))
        except ConnectionError as error:
            raise LaunchFailed(f"the zygote has ended: {error}") from error


class Zygote:
    """Forks workers; made by `open_zygote`. While its block lasts, any task may open workers."""

    def __init__(self, name: str, note: bytes, env: Mapping[str, str], services: Services) -> None:
        self._name = name
        self._note = note
        self._env = env
        self._services = services
        self._life: _Life | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the zygote that is there now, if one is."""
        tether = None if self._life is None else self._life.tether
        return None if tether is None or tether.status is not None else tether.pid

    async def wait_ready(self) -> None:
        """Wait until there is a zygote that has prepared; start one if there is none.

        Raises:
            DpkitError: as the code that prepares raised it.
            LaunchFailed: it raised something else, or its process ended.
        """
        await self._ready_life()

    @protected_context
    async def open_worker(
        self, work: str, args: Mapping[str, Any] | None = None, *, name: str, grace: float = 5.0
    ) -> AsyncIterator[Worker]:
        """Fork a process that runs ``work(state, **args)``, where `state` is what was prepared.

        Args:
            work: ``"pkg.mod:function"``. It runs in the main thread of a session and process group
                of its own; its return ends the process. `dpkit.launch.lifeline.lifeline_fd()` is
                readable there once the head is gone.
            args: what JSON can carry, 128 KiB at most.
            name: who it is, in logs (`dpkit.worker.NAME`) and errors.
            grace: Seconds from SIGTERM to SIGKILL, when the block is left while it runs.

        Resource handling:
            When the block is left, in whatever way, the process and all that it started are gone:
            its children too, in whatever session. So they are when it ends by itself, when the
            zygote ends, and when this process is killed.

        Error handling:
            LaunchFailed: `work` cannot be imported, or there is no forking. If the zygote has
            ended, a new one is started, for which all callers wait and which fails as `wait_ready`
            says.
        """
        job = Job(name, None, {}, work, dict(args or {}))
        note = encode_job(job)
        async with AsyncExitStack() as stack:
            yield Worker(await self._enter_worker(stack, name, note, grace))

    def close(self) -> None:
        """Open no workers any more; the end of the block does it."""
        self._closed = True

    async def _enter_worker(
        self, stack: AsyncExitStack, name: str, note: bytes, grace: float
    ) -> Tether:
        while True:
            life = await self._ready_life()

            async def launch(_: Tether, ends: Ends, life: _Life = life) -> None:
                await life.fork(note, ends)

            try:
                return await stack.enter_async_context(open_tether(name, launch, grace=grace))
            except LaunchFailed:
                if not await _has_just_ended(life):
                    raise

    async def _ready_life(self) -> _Life:
        if self._closed:
            raise RuntimeError(f"zygote {self._name} is closed: open workers inside its block")
        if self._life is None or self._life.over:
            self._life = _Life()
            self._services.start_soon(
                self._life.run, self._name, self._note, self._env, name=f"zygote {self._name}"
            )
        life = self._life
        await life.settled.wait()
        if life.error is not None:
            raise _again(life.error)
        return life

    def __repr__(self) -> str:
        return f"<Zygote {self._name} pid {self.pid}>"


@protected_context
async def open_zygote(
    prepare: str,
    args: Mapping[str, Any] | None = None,
    *,
    name: str,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Zygote]:
    """Start a zygote: a fresh interpreter, in which ``prepare(**args)`` makes what workers share.

    Args:
        prepare: ``"pkg.mod:function"``; this process's `sys.path` is where it is looked for. It
            must leave no threads behind.
        args: what JSON can carry, 128 KiB at most.
        name: who it is, in logs and errors.
        env: on top of this process's environment, and of `ONE_THREAD`.

    Resource handling:
        Entering takes as long as `prepare` does; cancelled meanwhile, it kills it at once. When the
        block is left, the zygote and all its workers are gone. Enter it in Trio's main task or in
        any other; workers may be opened in others.

    Error handling:
        As `Zygote.wait_ready` says. RuntimeError: a process that dpkit started, or dpkit itself,
        imports the module that calls this.
    """
    refuse_while_importing("open_zygote was called")
    job = Job(name, prepare, dict(args or {}), None, {})
    async with open_services(grace=0) as services:
        zygote = Zygote(name, encode_job(job), {**ONE_THREAD, **(env or {})}, services)
        try:
            await zygote.wait_ready()
            yield zygote
        finally:
            zygote.close()


async def _has_just_ended(life: _Life) -> bool:
    """Whether a worker did not come up since its zygote ended: nothing of its work has begun."""
    if life.tether is not None and not life.over:
        with trio.move_on_after(_NEWS_WITHIN):
            await life.tether.wait_ended()
    return life.over


def _again(error: DpkitError) -> DpkitError:
    """The same error, to be raised in one task more."""
    kind = type(error)
    other = kind.__new__(kind, *error.args)
    vars(other).update(vars(error))
    return other
