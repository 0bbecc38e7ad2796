"""What Ctrl-C, SIGTERM and SIGHUP do to a run: finish, stop, be gone; read the file again.

The first stop signal asks to finish what is under way, the second to stop at once, the third ends
the process. SIGHUP asks to read the file again, or, when the terminal is gone, is as the first.
Handlers are plain ones, not Trio's: they must work also while a step hangs on Trio's thread. Knows
nothing of clusters.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)
_LAST = 3  # the stop signal that ends the process
_GONE = 130  # and with which code


class Signals:
    """A context manager: handlers are in force within the block, which must be Trio's main task."""

    def __init__(self) -> None:
        self.stops: list[int] = []
        """Stop signals so far."""
        self.serving = False
        """Whether there is anything to finish; if not, the second signal is the last."""
        self.kill_after = 0.0
        """Seconds from the second signal to the end of the process."""
        self._hangups = 0
        self._had_terminal = _has_terminal()
        self._lot = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in _STOPS:
            self._handle(signum, self._stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self._handle(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.SIGALRM in self._former:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._former.items():
            # After a stop the process only ends: one more Ctrl-C must give no traceback.
            silent = self.stops and signum in _STOPS
            signal.signal(signum, signal.SIG_DFL if silent else handler)

    @property
    def code(self) -> int:
        """Exit code of a run that did not finish because of the signals so far."""
        return 128 + self.stops[-1]

    async def wait_stop(self, count: int) -> None:
        """Wait until there were `count` stop signals."""
        while len(self.stops) < count:
            await self._lot.park()

    async def wait_hangup(self, count: int) -> int:
        """Wait until there were more than `count` SIGHUPs; returns how many there were."""
        while self._hangups <= count:
            await self._lot.park()
        return self._hangups

    def end_within(self, seconds: float) -> None:
        """Whatever hangs: the process is gone in so many seconds, unless the block ends before."""
        self._handle(signal.SIGALRM, self._out_of_time)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would mean never

    def _handle(self, signum: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._former.setdefault(signum, signal.getsignal(signum))
        signal.signal(signum, handler)

    def _stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.stops.append(signum)
        count = len(self.stops)
        if count >= _LAST or (count > 1 and not self.serving):
            _leave(_GONE)
        if count == 1:
            _tell(b"\nstopping; again to stop at once\n")
        else:
            self.end_within(self.kill_after)
        self._wake()

    def _hang_up(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._had_terminal and not _has_terminal():
            if not self.stops:  # a shell tells again what the kernel has told
                self._stop(signal.SIGTERM, frame)
            return
        self._hangups += 1
        self._wake()

    def _out_of_time(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        _leave(self.code)

    def _wake(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._lot.unpark_all)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal, wherever its streams lead."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _tell(message: bytes) -> None:
    """Write to a person, past all buffers: a signal may come in the middle of another write."""
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, message)


def _leave(code: int) -> None:
    """End the process. Threads that hang go with it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # none, closed, full, or busy with the write that we interrupted
            stream.flush()
    os._exit(code)
