"""What a ZeroMQ socket is told before it is used: its options, and its address.

libzmq's defaults lose messages without a word; these do not. Knows nothing of Trio.
"""

from __future__ import annotations

import errno
import os
import socket as stdlib_socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Iterator


class AddressFailed(DpkitError):  # noqa: N818 - reads as what happened
    """An address cannot be bound or connected to (yours, or the world's); the message says why."""


def set_options(
    raw: zmq.Socket[bytes], *, max_message_bytes: int, max_queued: int, lossy: bool = False
) -> None:
    """Set what is the same for all sockets of dpkit, and what their kind needs."""
    raw.set(zmq.MAXMSGSIZE, max_message_bytes)
    raw.set(zmq.SNDHWM, max_queued)
    raw.set(zmq.RCVHWM, max_queued)
    # A host that vanished without a word is noticed within a minute, not within two hours.
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        raw.set(option, value)
    if raw.type == zmq.ROUTER:
        raw.set(zmq.ROUTER_MANDATORY, 1)  # without: what cannot be sent is dropped without a word
        raw.set(zmq.ROUTER_HANDOVER, 1)  # without: a peer that comes back under its id is ignored
    elif raw.type == zmq.XPUB:
        raw.set(zmq.XPUB_NODROP, int(not lossy))
        raw.set(zmq.XPUB_VERBOSER, 1)  # each who comes or goes is seen, not just first and last


@contextmanager
def attached(raw: zmq.Socket[bytes], bind: str | None, connect: str | None) -> Iterator[None]:
    """Bind or connect for the block; then the file of a Unix socket that was bound is removed.

    Raises:
        AddressFailed: it cannot be done; the message says why, and what to try.
    """
    address = bind if bind is not None else connect or ""
    verb = "listen at" if bind is not None else "connect to"
    try:
        raw.set(zmq.IPV6, int("[" in address))  # else a picked port reads ::ffff:127.0.0.1
        if bind is None:
            raw.connect(address)
        else:
            _refuse_taken_path(address)
            raw.bind(address)
    except (zmq.ZMQError, OSError) as error:
        reason = os.strerror(error.errno or 0) if error.errno else str(error)
        raise AddressFailed(f"cannot {verb} {address}: {reason}; {_hint(error.errno)}") from error
    try:
        yield
    finally:
        if bind is not None and (path := _path_of(bind)) is not None:
            with suppress(OSError):  # libzmq leaves it; somebody else may have removed it
                Path(path).unlink()


def _refuse_taken_path(address: str) -> None:
    """Refuse to steal: libzmq removes a Unix socket's file before it binds, a live server's too."""
    if (path := _path_of(address)) is None:
        return
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # somebody listens, and is busy
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _path_of(address: str) -> str | None:
    """The file of a Unix socket, if it is one that has a file of this name."""
    scheme, _, path = address.partition("://")
    return None if scheme != "ipc" or path.startswith(("@", "*")) else path


def _hint(number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return "another program listens there: stop it, or give another address"
    if number == errno.ENAMETOOLONG:
        return "the path of a Unix socket may have 107 bytes: use a shorter directory"
    return "write tcp://HOST:PORT or ipc://PATH, with a host or a directory of this machine"
