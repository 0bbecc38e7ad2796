"""The head's end of one kept process: hears what becomes of it, and can end it.

Owns the head's descriptors of it: the leash (to the keeper), the lifeline (whose end of file tells
the process that the head is gone), its output, and pidfds. Knows nothing of how it is started.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio
from attrs import define

from dpkit import errors
from dpkit.errors import ConfigError, DpkitError, LaunchFailed
from dpkit.launch.notes import Born, End, Ended, Failed, Ready, decode_answer, encode, receive
from dpkit.launch.output import Output
from dpkit.launch.process import ExitStatus
from dpkit.nursery.services import open_services

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from dpkit.launch.notes import Answer

KILL_WITHIN = 5.0
"""Seconds from `End` to the end of the last process. The kernel needs milliseconds, unless a
process hangs in one of its own calls (a dead network file system), which nobody can end."""

_PIDFDS = 2

logger = logging.getLogger("dpkit.launch")


@define
class Ends:
    """The other ends, for the process that is to be. Given away, and then closed here."""

    leash: socket.socket
    lifeline: int
    output: int

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """All of them, in the order in which processes expect them."""
        return self.leash.fileno(), self.lifeline, self.output

    def close(self) -> None:
        """Close our copies: only the process is to have them."""
        self.leash.close()
        os.close(self.lifeline)
        os.close(self.output)


class Tether:
    """One kept process, from the head; made by `open_tether`."""

    def __init__(self, name: str, leash: socket.socket, lifeline: int, output: int) -> None:
        self.name = name
        self.pid = 0
        self.status: ExitStatus | None = None
        self.gone = trio.Event()
        """Nothing of it is left, its keeper included."""
        self.keeper: subprocess.Popen[bytes] | None = None
        """The keeper, if it is a child of this process, to be reaped here."""
        self._leash = leash
        self._lifeline = lifeline
        self._output = Output(output, name)
        self._said_ready = False
        self._settled = trio.Event()
        self._ended = trio.Event()
        self._failed: Failed | None = None
        self._pidfds: list[int] = []

    @property
    def ready(self) -> bool:
        """Whether it is prepared; two processes tell us, in either order."""
        return self._said_ready and len(self._pidfds) == _PIDFDS

    @property
    def lines(self) -> Iterable[str]:
        """The last lines it wrote."""
        return self._output.lines

    async def wait_ready(self) -> None:
        """Wait until what it prepares is prepared.

        Raises:
            DpkitError: as its code raised it.
            LaunchFailed: it raised something else, or ended meanwhile.
        """
        await self._settled.wait()
        if not self.ready:
            with trio.move_on_after(KILL_WITHIN):
                await self._ended.wait()  # for its status and its last words
            raise self.failure()

    async def wait_ended(self) -> ExitStatus:
        """Wait until it has a status."""
        while self.status is None:
            await self._ended.wait()
        return self.status

    def failure(self) -> DpkitError:
        """A new error for why it did not become ready."""
        if self._failed is not None and (error := _typed(self._failed)) is not None:
            return error
        what = "did not become ready" if self._failed is None else self._failed.text
        known = self.status is not None and (self.pid > 0 or self.keeper is not None)
        end = f"; it {self.status}" if known else ""
        words = "\n  ".join(("; its last words:", *self.lines)) if self.lines else ""
        return LaunchFailed(f"{self.name}: {what}{end}{words}")

    def send_signal(self, signum: int) -> None:
        """Signal the process, if it is there."""
        if self.status is None and self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[0], signum)

    def kill(self) -> None:
        """Have the keeper end it and all that it started."""
        self.send_signal(signal.SIGKILL)
        self.tell(encode(End()))

    def tell(self, note: bytes) -> None:
        """Tell the keeper."""
        with suppress(OSError):  # it is gone, as its end of the leash will tell
            self._leash.send(note)

    async def end(self, grace: float) -> None:
        """End it, politely for `grace` seconds, and wait until nothing is left of it.

        Not to be cancelled: it takes `grace` and twice `KILL_WITHIN` seconds at most.
        """
        if grace > 0 and self.ready and self.status is None:
            self.send_signal(signal.SIGTERM)
            with trio.move_on_after(grace, shield=True):
                await self._ended.wait()
        self.kill()
        for last_resort in (self._kill_keeper, None):
            with trio.move_on_after(KILL_WITHIN, shield=True):
                await self.gone.wait()
                return
            if last_resort is not None:
                last_resort()
        if not self.gone.is_set():
            logger.error("%s (pid %d) cannot be killed: left behind", self.name, self.pid)

    async def listen(self) -> None:
        """Take what keeper and process say, until both are gone."""
        while (answer := await self._hear()) is not None:
            match answer:
                case Born():
                    self.pid = answer.pid
                    if len(self._pidfds) < _PIDFDS:  # the kernel dropped them
                        self._failed = Failed(["LaunchFailed"], "no descriptors are left for it")
                case Ready():
                    self._said_ready = True
                case Failed():
                    self._failed = answer
                case Ended():
                    self._end(ExitStatus(answer.code))
            if self.ready or self._failed is not None:
                self._settled.set()
        await self._reap()
        if self.status is None:
            self._end(self._status_untold())
        self._output.drain()  # what its children had to say
        self.gone.set()

    async def relay(self) -> None:
        """Relay its output."""
        await self._output.relay()

    def close(self) -> None:
        """Close every descriptor."""
        self._leash.close()
        os.close(self._lifeline)
        self._output.close()
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds.clear()

    def _end(self, status: ExitStatus) -> None:
        self._output.drain()  # it wrote nothing after it ended: these are its last words
        self.status = status
        self._settled.set()
        self._ended.set()

    def _status_untold(self) -> ExitStatus:
        """How it ended when the keeper did not say: never begun, or killed with its keeper."""
        if self.pid == 0 and self.keeper is not None and self.keeper.returncode is not None:
            return ExitStatus(self.keeper.returncode)
        return ExitStatus(-signal.SIGKILL)

    async def _hear(self) -> Answer | None:
        while True:
            await trio.lowlevel.wait_readable(self._leash)
            try:
                data, descriptors = receive(self._leash, _PIDFDS)
            except (ConnectionResetError, BlockingIOError):
                continue  # it went without reading all; what it said before is still to be read
            self._pidfds += descriptors
            return decode_answer(data) if data else None

    def _kill_keeper(self) -> None:
        """Somebody stopped it, perhaps. What it keeps dies with it, by the kernel's hand."""
        if self.keeper is not None:
            self.keeper.kill()
        elif len(self._pidfds) == _PIDFDS:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[1], signal.SIGKILL)

    async def _reap(self) -> None:
        """Wait for the end of process and keeper, and reap what is our child."""
        for pidfd in self._pidfds:
            await trio.lowlevel.wait_readable(pidfd)
        if self.keeper is not None:
            self.keeper.wait()  # at once, or nearly: it ended, or did not come to begin


@asynccontextmanager
async def open_tether(
    name: str, launch: Callable[[Tether, Ends], Awaitable[None]], *, grace: float
) -> AsyncIterator[Tether]:
    """Start a process that has a keeper, and have it ready; leave, and nothing of it is left.

    Args:
        name: who it is, in logs and errors.
        launch: gives the process its ends.
        grace: Seconds from SIGTERM to SIGKILL, once it was ready.

    Raises:
        DpkitError: as `Tether.wait_ready` says, or by `launch`.
    """
    tether, ends = _connect(name)
    try:
        async with open_services(grace=0) as services:
            try:
                services.start_soon(tether.listen, name=f"listen to {name}")
                services.start_soon(tether.relay, name=f"output of {name}")
                try:
                    await launch(tether, ends)
                finally:
                    ends.close()  # where nobody has others, that is the end
                await tether.wait_ready()
                yield tether
            finally:
                await tether.end(grace)
    finally:
        tether.close()


def _connect(name: str) -> tuple[Tether, Ends]:
    """Both sides' descriptors."""
    with ExitStack() as undo:
        try:
            leash, its_leash = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(leash.close)
            undo.callback(its_leash.close)
            its_lifeline, lifeline = os.pipe()
            undo.callback(os.close, its_lifeline)
            undo.callback(os.close, lifeline)
            output, its_output = os.pipe()
        except OSError as error:
            raise LaunchFailed(f"{name}: there are no descriptors for it: {error}") from error
        undo.pop_all()
    leash.setblocking(False)
    return Tether(name, leash, lifeline, output), Ends(its_leash, its_lifeline, its_output)


def _typed(failed: Failed) -> DpkitError | None:
    """The error that was raised over there, if it was one of ours."""
    for kind in failed.kinds:
        found = getattr(errors, kind, None)
        if found is LaunchFailed:
            return None  # it gets its status and last words here
        if found is ConfigError:
            return ConfigError(failed.text.split("\n"))
        if isinstance(found, type) and issubclass(found, DpkitError):
            with suppress(TypeError):  # it needs more than words: one of its bases does not
                return found(failed.text)
    return None
