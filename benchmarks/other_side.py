"""The other side of a benchmark: the same script in a process of its own, which does as it is told.

Its work must not cost the contenders anything, and it must be the same for all of them. Orders are
JSON objects over a REQ socket; the answer says that one is done.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never

import zmq
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SERVE = "--serve"
"""The script's argument, with the address of the orders behind it, that makes it the other side."""


@frozen
class OtherSide:
    """The process, for whoever gives it orders."""

    directory: str
    """For addresses of sockets."""
    pid: int
    _orders: zmq.Socket[bytes]

    def begin(self, order: Mapping[str, Any]) -> None:
        """Give an order, and do not wait."""
        self._orders.send(json.dumps(order).encode())

    def wait(self) -> None:
        """Wait until the order is done.

        Raises:
            zmq.Again: it is not done in time: a process that has failed says nothing.
        """
        self._orders.recv()


@contextmanager
def open_other_side(script: str, *, patience_s: float | None = None) -> Iterator[OtherSide]:
    """Start `script` as the other side, and end it at the end.

    Args:
        script: Its ``__file__``, which calls `serve` if its first argument is `SERVE`.
        patience_s: How long an order may take; None: as long as it likes.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        zmq.Context() as context,
        context.socket(zmq.REQ) as orders,
    ):
        control = f"ipc://{directory}/control"
        orders.bind(control)
        if patience_s is not None:
            orders.rcvtimeo = int(patience_s * 1000)
        child = subprocess.Popen([sys.executable, script, SERVE, control])  # noqa: S603
        try:
            yield OtherSide(directory, child.pid, orders)
        finally:
            child.kill()
            child.wait()


def serve(control: str, work: Callable[..., object]) -> Never:
    """Be the other side, for ever: `work` gets the context and each order's keys as keywords."""
    context = zmq.Context()
    orders = context.socket(zmq.REP)
    orders.connect(control)
    while True:
        work(context, **json.loads(orders.recv()))
        orders.send(b"")
