"""What ends a command that serves until it is told to stop: signals, and the end of its input.

`dpkit run` has more to say to a signal: `dpkit.cli.signals`.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


async def watch_input(stop: trio.Event) -> None:
    """Set `stop` at the end of standard input; what is written there is not read for anything."""
    descriptor, read = sys.stdin.fileno(), True
    while read:
        await trio.lowlevel.wait_readable(descriptor)
        read = bool(os.read(descriptor, 4096))
    stop.set()


@contextmanager
def catch_stops(stop: trio.Event) -> Iterator[list[int]]:
    """Have the first SIGTERM or Ctrl-C set `stop`, and the second end the process.

    Plain handlers, not Trio's: they work also while a step hangs on Trio's thread. Gives the
    signals that came so far.
    """
    token, stops = trio.lowlevel.current_trio_token(), list[int]()

    def handle(signum: int, _frame: FrameType | None) -> None:
        stops.append(signum)
        if len(stops) > 1:
            os._exit(128 + signum)
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(stop.set)

    handlers = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stops
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
