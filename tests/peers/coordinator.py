"""A coordinator of three sockets, as dense engines and their frontends need it.

In a thread of its own, and it remembers: what the engines say is heard while a test waits for HTTP.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

INTERVAL_S = 0.1
PATIENCE_S = 15.0

T = TypeVar("T")


def endpoint(socket: zmq.Socket[bytes]) -> str:
    """Where a socket has bound."""
    address = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


class Coordinator:
    """Tells engines READY when all are there, and frontends what the engines hold."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engines: int) -> None:
        self._engines = engines
        self._to_frontends = context.socket(zmq.XPUB)
        self._from_engines = context.socket(zmq.PULL)
        self._to_engines = context.socket(zmq.XPUB)
        self._sockets = (self._to_frontends, self._from_engines, self._to_engines)
        self._to_engines.setsockopt(zmq.XPUB_VERBOSE, 1)
        for socket in self._sockets:
            socket.linger = 0
            socket.bind("tcp://127.0.0.1:*")
        self.heard: list[tuple[float, int, int, int]] = []
        """(monotonic seconds, rank, running, waiting) of each message, in order."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="coordinator")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join()
        for socket in self._sockets:
            socket.close()

    @property
    def addresses(self) -> dict[str, str]:
        """Its part of what engines are told."""
        front, collect, publish = map(endpoint, self._sockets)
        return {
            "coordinator_input": publish,
            "coordinator_output": collect,
            "frontend_stats_publish_address": front,
        }

    def wait_idle(self, *, after: float = 0.0) -> float:
        """Wait until no engine holds a request, by a word later than `after`; its moment."""
        return self._wait(lambda at, busy: at if at > after and not busy else None)

    def wait_busy(self) -> int:
        """Wait until an engine holds a request; its rank."""
        return self._wait(lambda _, busy: busy[0] if busy else None)

    def _wait(self, found: Callable[[float, list[int]], T | None]) -> T:
        """Wait until `found` makes something of the last word's moment and the busy ranks."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            last = {rank: (at, running + waiting) for at, rank, running, waiting in self.heard}
            latest = max((at for at, _ in last.values()), default=0.0)
            result = found(latest, [rank for rank, (_, held) in last.items() if held])
            if result is not None:
                return result
            time.sleep(0.002)
        raise AssertionError(f"not heard: {self.heard[-5:]}")

    def _serve(self) -> None:
        counts = [[0, 0, 0.0] for _ in range(self._engines)]
        poller, subscribed, changed, last = zmq.Poller(), 0, False, 0.0
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(10))
            if self._to_engines in ready and self._to_engines.recv() == b"\x01":
                subscribed += 1
                if subscribed >= self._engines:  # again for each that comes later, as vLLM's does
                    self._to_engines.send(b"READY")
            if self._to_frontends in ready:
                self._to_frontends.recv()
            if self._from_engines in ready:
                self._take(msgspec.msgpack.decode(self._from_engines.recv()), counts)
                changed = True
            if changed and time.monotonic() - last > INTERVAL_S:
                self._to_frontends.send(msgspec.msgpack.encode((counts, 0, False)))
                changed, last = False, time.monotonic()

    def _take(self, envelope: list[Any], counts: list[list[Any]]) -> None:
        rank, stats = envelope[0], envelope[2]
        running, waiting = stats["num_running_reqs"], stats["num_waiting_reqs"]
        counts[rank] = [waiting, running, stats["kv_cache_usage"]]
        self.heard.append((time.monotonic(), rank, running, waiting))
