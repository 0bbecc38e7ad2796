"""How much a server lets its clients have: bytes, seconds, connections.

Knows nothing of sockets.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

_positive: Any = validators.gt(0)


@frozen(kw_only=True)
class HttpLimits:
    """Limits of one server; sizes in bytes, times in seconds."""

    max_head: int = field(default=32 * 1024, validator=_positive)
    """Request line and headers together: nginx takes 32 KiB in all, Node.js 16, h11 64."""
    max_body: int = field(default=32 * 2**20, validator=_positive)
    """One request's body. A million tokens as JSON integers are about 7 MiB."""
    max_bodies: int = field(default=512 * 2**20, validator=_positive)
    """Bodies of all requests under way, together. What is beyond is told to come back later."""
    max_unsent: int = field(default=256 * 1024, validator=_positive)
    """What one stream may hold for a client that does not read, before it is cut off.

    An answer that is sent in one piece is not concerned: its handler had it in memory anyway.
    """
    max_connections: int = field(default=4096, validator=_positive)
    """Beyond this the connection that has been idle the longest gives way; if none is, 503."""
    idle_timeout: float = field(default=75.0, validator=_positive)
    """Between requests, as nginx has it: longer than what clients keep idle connections for."""
    receive_timeout: float = field(default=60.0, validator=_positive)
    """From the first byte of a request to the last one of its body."""
    send_timeout: float = field(default=30.0, validator=_positive)
    """How long a client that has something to read may take no byte of it."""
    linger: float = field(default=2.0, validator=_positive)
    """After the server's last byte: how long a client may take to read it and close."""

    @property
    def tick(self) -> float:
        """How exactly the times are kept."""
        shortest = min(self.idle_timeout, self.receive_timeout, self.send_timeout, self.linger)
        return min(1.0, shortest / 4)


class Room:
    """Bytes that all connections share, `HttpLimits.max_bodies` of them.

    Args:
        size: How many there are.
    """

    __slots__ = ("size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    def take(self, count: int) -> bool:
        """Take so many, or none and return False."""
        if self.used + count > self.size:
            return False
        self.used += count
        return True

    def give_back(self, count: int) -> None:
        """Return what was taken."""
        self.used -= count
