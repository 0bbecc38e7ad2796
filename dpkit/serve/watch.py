"""Which sockets have something to say: one task for all of them, with an epoll of its own.

A task that waits in each connection would cost a system call to arm and a turn of Trio's loop for
every request. Here sockets stay armed: Trio waits for the epoll, which can be waited for like any
descriptor, and all that is ready is called one after another. Knows nothing of HTTP.

Owns the epoll; sockets are their transports', which take them out before they close them.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

_BURST = 64
"""Sockets served between two checkpoints: a millisecond or two, if each brings a request."""


class Watch:
    """Calls whoever has something to read; made in a Trio run, and closed by `close`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<Watch of {len(self._callbacks)} sockets>"

    def add(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Have `callback` called while there is something to read, or an end, or an error.

        It must not raise, nor wait, and must read what there is.
        """
        self._epoll.register(descriptor, select.EPOLLIN)
        self._callbacks[descriptor] = callback

    def remove(self, descriptor: int) -> None:
        """Call no more; harmless if it never was to be called."""
        if self._callbacks.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Watch until cancelled, or closed."""
        callbacks, poll = self._callbacks, self._epoll.poll
        while not self._epoll.closed:
            try:
                await trio.lowlevel.wait_readable(self._epoll)
            except trio.ClosedResourceError:
                return
            for descriptor, _ in poll(0, _BURST):
                # One of those before may have closed it, and a new one may have its number: then
                # the call comes in vain, which is allowed.
                if (callback := callbacks.get(descriptor)) is not None:
                    callback()

    def close(self) -> None:
        """Watch no more; harmless if closed."""
        if not self._epoll.closed:
            trio.lowlevel.notify_closing(self._epoll)
            self._epoll.close()
            self._callbacks.clear()
