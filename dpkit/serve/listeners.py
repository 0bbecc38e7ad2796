"""Where a server listens: TCP ports and Unix sockets, from their addresses. Knows nothing of HTTP.

`open_listeners` makes sockets; whoever is given them closes them, as `serve_http` does.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

import trio
from attrs import define

from dpkit.errors import DpkitError

UNIX = "unix:"
_MAX_PORT = 65535
_BACKLOG = 2048
"""Clients that may wait to be accepted; the kernel cuts it to its own limit, often 4096."""


class ListenFailed(DpkitError):  # noqa: N818 - reads as what happened
    """The server cannot listen there (yours, or the world's); the message says why."""


@define(kw_only=True, eq=False)
class Listener:
    """A listening socket."""

    raw: socket.socket
    address: str
    """``127.0.0.1:8000`` or ``unix:/run/dpkit.sock``: with the port that was picked."""
    _inode: int | None = None

    def close(self) -> None:
        """Stop listening, and wake who waits to accept; harmless if closed."""
        if self.raw.fileno() == -1:
            return
        if self._inode is not None:
            path = self.address.removeprefix(UNIX)
            with suppress(OSError):
                if os.stat(path).st_ino == self._inode:  # noqa: PTH116 - else it is another's
                    os.unlink(path)  # noqa: PTH108
        if trio.lowlevel.in_trio_run():
            trio.lowlevel.notify_closing(self.raw)
        self.raw.close()


async def open_listeners(address: str) -> list[Listener]:
    """Listen at an address.

    Args:
        address: ``HOST:PORT``, ``[::1]:PORT``, ``:PORT`` for all interfaces, or ``unix:PATH``. Port
            0 picks one. A name with several addresses, such as ``localhost``, gets a listener each.

    Resource handling:
        The caller closes them, or gives them to `serve_http`, which does. Closing removes a Unix
        socket's path; the path of a server that died without doing so is taken over.

    Error handling:
        ListenFailed: the address is none, is in use, or may not be had. Nothing is open then.
    """
    if address.startswith(UNIX):
        return [_open_unix(address)]
    host, port = _split(address)
    try:
        found = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise _failed(address, error) from error
    return _open_all(address, [(each[0], str(each[4][0]), port) for each in found])


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ListenFailed(f"cannot listen at {address!r}: say HOST:PORT or unix:PATH")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _open_all(address: str, places: list[tuple[int, str, int]]) -> list[Listener]:
    """Open all of them, but those of a family that this host has not."""
    opened: list[Listener] = []
    absent = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    picked = 0
    for family, host, port in dict.fromkeys(places):
        try:
            listener = _open_tcp(family, host, port or picked)
        except OSError as error:
            if error.errno in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                absent = error
                continue
            for each in opened:
                each.close()
            raise _failed(address, error) from error
        picked = listener.raw.getsockname()[1]
        opened.append(listener)
    if not opened:
        raise _failed(address, absent)
    return opened


def _open_tcp(family: int, host: str, port: int) -> Listener:
    raw = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # A port whose connections of a minute ago are not forgotten can be had again.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        raw.bind((host, port))
        raw.listen(_BACKLOG)
    except BaseException:
        raw.close()
        raise
    return Listener(raw=raw, address=format_peer(raw.getsockname()))


def _open_unix(address: str) -> Listener:
    path = address.removeprefix(UNIX)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if _is_stale(path):
            os.unlink(path)  # noqa: PTH108
        raw.bind(path)
        raw.listen(_BACKLOG)
        inode = os.stat(path).st_ino  # noqa: PTH116
    except OSError as error:
        raw.close()
        raise _failed(address, error) from error
    return Listener(raw=raw, address=address, inode=inode)


def _is_stale(path: str) -> bool:
    """Whether there is a socket that nobody listens at."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _failed(address: str, error: OSError) -> ListenFailed:
    hint = _HINTS.get(error.errno or 0, "try another address")
    return ListenFailed(f"cannot listen at {address}: {error.strerror or error}; {hint}")


_HINTS = {
    errno.EADDRINUSE: "stop what listens there, or choose another port",
    errno.EACCES: "choose a port from 1024 on, or a directory that you may write to",
}


def format_peer(name: object) -> str:
    """Say who is at the other end of a socket, from what ``accept`` returned."""
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "unix"
