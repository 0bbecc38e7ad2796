"""What a connection needs of the world: bytes in, bytes out without waiting, and an end.

`SocketTransport` is that over a stream socket: Trio's own `send_all` takes locks and a checkpoint
for each call, which is more than the call itself costs. Knows nothing of HTTP.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.serve.watch import Watch

CHUNK = 64 * 1024
"""Most bytes of one receive."""
_UNSENT_IN_KERNEL = 64 * 1024
# Not in every version of the socket module; Linux has had it since 3.12.
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_NO_LINGER = struct.pack("ii", 1, 0)


class Transport(Protocol):
    """One connection's bytes. What the world does comes out as OSError, also after `close`."""

    peer: str
    """Who is at the other end, for logs."""

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Have `on_ready` called, from now on, while there is something to receive, or an end."""

    def receive_nowait(self) -> bytes:
        """Take what has come; empty at the end of what the peer sends.

        Raises:
            BlockingIOError: nothing has come.
        """

    def send_nowait(self, data: bytes | bytearray) -> int:
        """Send what there is room for; how many bytes that was.

        Raises:
            BlockingIOError: there is no room.
        """

    async def wait_writable(self) -> None:
        """Wait until there may be room."""

    def shut_down(self) -> None:
        """Tell the peer that nothing more comes. Receiving goes on."""

    def close(self, *, reset: bool = False) -> None:
        """Close at once, and wake whoever waits; harmless if closed.

        Args:
            reset: Drop what the peer has not taken, and tell it so. Without, the kernel goes on
                delivering it for as long as the peer lets it.
        """


class SocketTransport:
    """A connected stream socket, TCP or Unix; see `Transport` for what each method does.

    Args:
        raw: Non-blocking. This object closes it.
        peer: As in `Transport`.
        watch: Calls when there is something to receive.
        patience: Seconds after which a peer that acknowledges nothing is gone.
    """

    def __init__(self, raw: socket.socket, peer: str, watch: Watch, patience: float) -> None:
        self.peer = peer
        self.send_nowait: Callable[[bytes | bytearray], int] = raw.send
        self._raw = raw
        self._watch = watch
        with suppress(OSError):  # a peer that has gone already, or a kernel without an option
            _set_options(raw, patience)

    def attach(self, on_ready: Callable[[], None]) -> None:
        """As `Transport` says."""
        self._watch.add(self._raw.fileno(), on_ready)

    def receive_nowait(self) -> bytes:
        """As `Transport` says."""
        return self._raw.recv(CHUNK)

    async def wait_writable(self) -> None:
        """As `Transport` says."""
        try:
            await trio.lowlevel.wait_writable(self._raw)
        except (trio.ClosedResourceError, ValueError) as error:
            await trio.lowlevel.checkpoint()  # which waiting for a closed socket is not
            raise OSError(errno.EBADF, "the connection was closed here") from error

    def shut_down(self) -> None:
        """As `Transport` says."""
        self._raw.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        """As `Transport` says."""
        if (descriptor := self._raw.fileno()) == -1:
            return
        self._watch.remove(descriptor)
        trio.lowlevel.notify_closing(self._raw)
        if reset:
            with suppress(OSError):
                self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._raw.close()


def _set_options(raw: socket.socket, patience: float) -> None:
    """Bound what waits in the kernel, send small chunks at once, and notice who has vanished."""
    if raw.family == socket.AF_UNIX:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_IN_KERNEL)
        return
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that is gone without a word is noticed while idle too, and frees what it holds here.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1000))
    # The kernel would buffer megabytes for a client that does not read: it would be noticed late.
    raw.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_IN_KERNEL)
