"""What a connection sends: at once while the socket has room, in larger pieces when it has not.

Only a full socket costs a task, which waits for room and ends when all is sent. Knows nothing of
HTTP. Owns the bytes that are not sent yet; the transport is its connection's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.serve.transport import Transport

    Spawn = Callable[[Callable[[], Awaitable[None]]], None]


class Outgoing:
    """The bytes on their way to one client.

    Args:
        transport: Takes them.
        spawn: Starts a task beside the connection's others.
        on_broken: Called, once, when the transport fails.
    """

    def __init__(self, transport: Transport, spawn: Spawn, on_broken: Callable[[], None]) -> None:
        self.moved_at = 0.0
        """When the kernel last took some, or when it first would not; of use while any wait."""
        self._transport = transport
        self._send_nowait = transport.send_nowait
        self._spawn = spawn
        self._on_broken = on_broken
        self._waiting = bytearray()
        self._callbacks: list[Callable[[], None]] = []
        self._drained = trio.lowlevel.ParkingLot()
        self._broken = False

    @property
    def unsent(self) -> int:
        """How many bytes wait for room."""
        return len(self._waiting)

    def send(self, data: bytes) -> None:
        """Send, now or when there is room; nothing once the transport has failed."""
        if self._waiting:
            self._waiting += data
            return
        if self._broken:
            return
        try:
            sent = self._send_nowait(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._break()
            return
        if sent < len(data):
            self._waiting += memoryview(data)[sent:]
            self.moved_at = trio.current_time()
            self._spawn(self._flush)

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once nothing waits any more, which may be now; not if the transport fails."""
        if self._waiting:
            self._callbacks.append(callback)
        elif not self._broken:
            callback()

    async def wait_drained(self) -> None:
        """Wait until nothing waits any more, or nothing ever will be sent."""
        if not self._waiting:
            await trio.lowlevel.checkpoint()
        while self._waiting:
            await self._drained.park()

    def drop(self) -> None:
        """Forget what waits; nothing is sent from now on."""
        self._broken = True
        self._waiting.clear()
        self._callbacks.clear()
        self._drained.unpark_all()

    def let_go(self) -> None:
        """Forget the connection, which is over."""
        self._spawn, self._on_broken = lambda _: None, lambda: None

    def _break(self) -> None:
        self.drop()
        self._on_broken()

    async def _flush(self) -> None:
        while self._waiting:
            try:
                await self._transport.wait_writable()
                if not self._waiting:  # dropped meanwhile
                    return
                sent = self._send_nowait(self._waiting)
            except BlockingIOError:
                continue
            except OSError:
                self._break()
                return
            del self._waiting[:sent]
            self.moved_at = trio.current_time()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self._drained.unpark_all()
