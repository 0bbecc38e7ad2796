"""One ZeroMQ context for the sockets of several lives, which end before it does.

A context costs two threads, and closing one waits for all that its sockets have to send: neither is
for each life.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from dpkit.wire.zsocket import open_context

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from dpkit.wire.zsocket import Context


class SharedContext:
    """Is there while `open` is; every life uses it within that time.

    Args:
        patience: Seconds that the last lives may take to let go: by then they have been told to end
            as well.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._context: Context
        self._lives = 0
        self._no_lives = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Context]:
        """Open it. When the block ends, it waits until no life uses it, and closes it."""
        async with open_context() as self._context:
            try:
                yield self._context
            finally:  # lives end by themselves, but their sockets must not outlive the context
                await self.wait_unused()

    async def wait_unused(self) -> None:
        """Wait until no life uses it, cancelled or not, but no longer than the patience."""
        with trio.move_on_after(self._patience, shield=True):
            while self._lives:
                await self._no_lives.park()

    @contextmanager
    def use(self) -> Iterator[Context]:
        """The context for the sockets of one life, which are closed when the block ends."""
        self._lives += 1
        try:
            yield self._context
        finally:
            self._lives -= 1
            if not self._lives:
                self._no_lives.unpark_all()
