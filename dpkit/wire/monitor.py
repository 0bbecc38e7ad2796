"""Peers of a ZeroMQ socket coming and going, as libzmq's monitor tells them.

Knows nothing of Trio: it sets a monitor up and reads what it says. `ZSocket` owns the monitor's end
of the line, and closes it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tell = Callable[[str], object]

_ARRIVALS = zmq.Event.ACCEPTED | zmq.Event.CONNECTED
_EVENTS = _ARRIVALS | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


def attach_monitor(
    context: zmq.Context[Any], socket: zmq.Socket[bytes], address: str
) -> zmq.Socket[bytes]:
    """Have `socket` tell of its peers from now on; attach before it binds or connects.

    Args:
        context: The socket's own.
        socket: Whose peers are watched.
        address: Any ``inproc://`` address that no other socket of the context uses.

    Resource handling:
        The caller closes what is returned, and calls `disable_monitor` of `socket` before that.
    """
    socket.monitor(address, int(_EVENTS))
    line: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
    # libzmq's I/O thread waits when this line is full, and with it all sockets of the context do.
    line.set(zmq.RCVHWM, 0)
    line.set(zmq.LINGER, 0)
    line.connect(address)
    return line


class PeerReader:
    """Reads what a monitor says, and leaves out strangers.

    A port scanner, or a client of another protocol, connects and drops as well. libzmq numbers its
    connections when they begin and when they end, but not when they turn out to be peers. So who
    it was is known once as many have turned out as have begun; until then an end is a stranger's.
    """

    def __init__(self) -> None:
        self._arrived: set[int] = set()
        self._peers: set[int] = set()
        self._greetings = 0
        """Peers among the arrived."""

    def read(self, frames: Sequence[bytes], on_connect: Tell, on_drop: Tell) -> None:
        """Call back with the endpoint for one message of the monitor, if it is of a peer."""
        event, connection = struct.unpack("=Hi", frames[0])
        endpoint = frames[1].decode(errors="replace")
        if event & _ARRIVALS:
            self._arrived.add(connection)
            self._settle()
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._greetings += 1
            self._settle()
            on_connect(endpoint)
        elif connection in self._peers:
            self._peers.remove(connection)
            on_drop(endpoint)
        else:
            self._arrived.discard(connection)
            self._settle()

    def _settle(self) -> None:
        if self._greetings == len(self._arrived):
            self._peers |= self._arrived
            self._arrived.clear()
            self._greetings = 0
