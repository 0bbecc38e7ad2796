"""The keeper of one process: its parent, which sees to it that nothing of it is left behind.

A keeper forks one process and waits. When that process ends, or the head says so, or the head is
gone, the keeper kills everything below itself, reaps it, and ends. It is the kernel's "subreaper":
descendants whose own parent ended, in whatever session, become its children, so nothing gets away.
It runs no code of anybody else's and never blocks on anything but the news, so it is there when
the process it keeps hangs.

The head holds the other end of `leash`. Runs in the main thread of a process with one thread; knows
no Trio. Must stay cheap to import.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from dpkit.launch.linux import adopt_orphans, children, set_name
from dpkit.launch.notes import LIMIT, Born, Ended, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.launch.notes import Note

_NEWS = {signal.SIGCHLD, signal.SIGTERM}


def keep(work: Callable[[int], int], leash: socket.socket, *, name: str) -> NoReturn:
    """Fork a process, be its keeper until it and all that it started are gone, and exit.

    Args:
        work: what the process does, given its keeper's process id; returns its exit code. It begins
            with the signals in `_NEWS` blocked and with this process's handlers.
        leash: to the head.
        name: the process's.
    """
    try:
        _Keeper(leash).keep(work, name)
    except BaseException:  # noqa: BLE001 - the last frame of this process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Keeper:
    def __init__(self, leash: socket.socket) -> None:
        self._leash = leash
        self._worker = 0
        self._bell, self._clapper = os.pipe()

    def keep(self, work: Callable[[int], int], name: str) -> None:
        set_name(f"keep {name}")
        adopt_orphans()
        self._listen_to_signals()
        if self._has_to_end():  # the head changed its mind, or went, before anything began
            self._listen()
        else:
            self._fork(work)
            self._wait()
            self._sweep()

    def _listen_to_signals(self) -> None:
        """From here on, a child's end and SIGTERM ring the bell, whose bytes say which it was."""
        os.set_blocking(self._bell, False)
        os.set_blocking(self._clapper, False)
        signal.set_wakeup_fd(self._clapper, warn_on_full_buffer=False)
        for signum in _NEWS:
            signal.signal(signum, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NEWS)

    def _has_to_end(self) -> bool:
        news = select.poll()
        news.register(self._leash, select.POLLIN)
        return bool(news.poll(0))

    def _fork(self, work: Callable[[int], int]) -> None:
        keeper = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _NEWS)  # they are not the child's before it is set
        self._worker = os.fork()
        if self._worker == 0:
            os.close(self._bell)
            os.close(self._clapper)
            os._exit(work(keeper))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NEWS)
        own, its = os.pidfd_open(keeper), os.pidfd_open(self._worker)
        self._tell(Born(self._worker), its, own)
        os.close(own)
        os.close(its)

    def _wait(self) -> None:
        """Wait for a reason to end."""
        news = select.poll()
        news.register(self._leash, select.POLLIN)
        news.register(self._bell, select.POLLIN)
        while True:
            if (ready := news.poll()) and ready[0][0] == self._leash.fileno():
                self._listen()
                return
            if signal.SIGTERM in os.read(self._bell, 512):  # by hand, or the parent has died
                return
            if self._reap(os.WNOHANG):
                return

    def _listen(self) -> None:
        with suppress(OSError):  # ECONNRESET: it went and had not read all
            self._leash.recv(LIMIT)

    def _reap(self, flags: int) -> bool:
        """Reap who ended (the first, or all of them by WNOHANG); True: the process was among them.

        Raises:
            ChildProcessError: there are no children.
        """
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                if not ended:
                    raise
                return True
            if pid == self._worker:
                self._tell(Ended(os.waitstatus_to_exitcode(status)))
                ended = True
            if pid == 0 or not flags & os.WNOHANG:
                return ended

    def _sweep(self) -> None:
        """Kill all that is below, until there is nothing.

        Children of the killed become children of this process before those can be reaped, so each
        round sees who is left over from the last one.
        """
        with suppress(ChildProcessError):
            while True:
                for pid in children():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                self._reap(0)

    def _tell(self, note: Note, *descriptors: int) -> None:
        with suppress(OSError):  # the head is gone: there is nobody to tell
            socket.send_fds(self._leash, [encode(note)], list(descriptors))
