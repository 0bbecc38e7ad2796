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

_LAST_LIFE_S = 5.0
"""How long lives may take to let go: they have been cancelled as well."""


class SharedContext:
    """Is there while `open` is; every life uses it within that time."""

    def __init__(self) -> None:
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
                with trio.move_on_after(_LAST_LIFE_S, shield=True):
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
