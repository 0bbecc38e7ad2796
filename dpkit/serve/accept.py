"""Accepting connections, come what may. Knows nothing of what is done with them."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Protocol

import trio

from dpkit.serve.listeners import format_peer

if TYPE_CHECKING:
    import socket

    from dpkit.serve.listeners import Listener

_log = logging.getLogger(__name__)

_BACK_OFF = 0.1
"""Seconds, as Trio's own listener has it: short for a client, long for a loop."""
_USELESS = 1.0
"""Seconds without a request after which a connection may be closed for one that waits."""
_BURST = 64
"""Connections accepted between two checkpoints."""
_GIVEN_UP = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR}
"""The client has left the queue, or a firewall has thrown it out."""


class Host(Protocol):
    """Takes clients in."""

    def admit(self, raw: socket.socket, peer: str) -> None:
        """Take over a client's socket, which is non-blocking."""

    def make_room(self, *, idle_for: float) -> bool:
        """Close what has been of no use for so many seconds, if anything has."""


async def accept(listener: Listener, host: Host) -> None:
    """Accept clients until the listener is closed.

    Args:
        listener: Stays its owner's.
        host: Who gets them.

    Error handling:
        Out of descriptors or memory, it closes some idle connections, if there are any, and waits
        100 ms, again and again: clients wait in the kernel's queue, what is under way goes on.
    """
    is_short = False
    while listener.raw.fileno() != -1:
        try:
            await trio.lowlevel.wait_readable(listener.raw)
            for _ in range(_BURST):
                _accept_one(listener, host)
                is_short = False
        except BlockingIOError:
            continue
        except trio.ClosedResourceError:
            return
        except OSError as error:
            if error.errno in _GIVEN_UP or listener.raw.fileno() == -1:
                continue  # or it was closed by what was admitted
            if not is_short:
                _log.error("cannot accept at %s: %s; trying again", listener.address, error)
            is_short = True
            host.make_room(idle_for=_USELESS)
            await trio.sleep(_BACK_OFF)


def _accept_one(listener: Listener, host: Host) -> None:
    raw, name = listener.raw.accept()
    raw.setblocking(False)
    host.admit(raw, format_peer(name))
