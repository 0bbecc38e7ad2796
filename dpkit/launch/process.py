"""A worker as its owner sees it, and how a process ended.

Knows nothing of how it was started: zygotes and spawners make workers of the same kind.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.launch.tether import Tether


class ExitStatus(int):
    """How a process ended: its exit code, or minus the number of the signal that killed it."""

    __slots__ = ()

    @property
    def code(self) -> int:
        """The plain number."""
        return int(self)

    def __str__(self) -> str:
        if self >= 0:
            return f"exited with status {self.code}"
        try:
            return f"was killed by {signal.Signals(-self).name}"
        except ValueError:  # the kernel has more signals than names
            return f"was killed by signal {-self}"

    def __repr__(self) -> str:
        return f"ExitStatus({self.code})"


@define(eq=False, repr=False)
class Worker:
    """A process that ends with whoever started it; made by a launcher, never by hand.

    Its block ends it: leave it, in whatever way, and the process and all that it started are gone.
    """

    _tether: Tether

    @property
    def name(self) -> str:
        """Who it is, in logs and errors."""
        return self._tether.name

    @property
    def pid(self) -> int:
        """Its process id, which is its process group and session too."""
        return self._tether.pid

    @property
    def status(self) -> ExitStatus | None:
        """How it ended; None while it lives."""
        return self._tether.status

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines that it wrote to stdout and stderr; whole once there is a `status`."""
        return tuple(self._tether.lines)

    async def wait(self) -> ExitStatus:
        """Wait until it has ended. What it started may still be dying."""
        return await self._tether.wait_ended()

    def send_signal(self, signum: int) -> None:
        """Signal it, and only it; nothing happens if it has ended."""
        self._tether.send_signal(signum)

    def kill(self) -> None:
        """End it at once, and all that it started."""
        self._tether.kill()

    def __repr__(self) -> str:
        state = "alive" if self.status is None else str(self.status)
        return f"<Worker {self.name} pid {self.pid}: {state}>"
