"""dpkit's coordinator for engines and frontends that a test starts: in a thread, or as the command.

In a thread it remembers: what the engines say is heard while a test waits for HTTP.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.link.coordinator import open_coordinator
from dpkit.wire.coordinator import CoordinatorAddresses
from dpkit.wire.zsocket import open_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from dpkit.balancer.coordinator import Row
    from dpkit.messages import EngineId

INTERVAL_S = 0.002  # what is told is read when it is told on, and a test wants to know when it came
PATIENCE_S = 15.0

T = TypeVar("T")


class Coordinator:
    """dpkit's own, in a thread with a Trio of its own, and what it heard."""

    def __init__(self, engines: int) -> None:
        self.heard: list[tuple[float, int, int, int]] = []
        """(monotonic seconds, rank, running, waiting) of each message, in order."""
        self.addresses: CoordinatorAddresses
        self._engines = engines
        self._listens = threading.Event()
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), name="coordinator")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(PATIENCE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

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

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        rules = _Remembering(self._engines, self.heard)
        async with open_context() as context, open_coordinator(context, rules) as coordinator:
            self.addresses = coordinator.addresses
            self._listens.set()
            with self._scope:
                await coordinator.run()


class _Remembering(CoordinatorRules):
    def __init__(self, engines: int, heard: list[tuple[float, int, int, int]]) -> None:
        super().__init__(engines, now=trio.current_time(), interval=INTERVAL_S)
        self._heard = heard

    def on_counts(
        self, now: float, index: int, engine: EngineId, row: Row, step: tuple[int, int]
    ) -> None:
        waiting, running, _ = row
        self._heard.append((time.monotonic(), index, running, waiting))
        super().on_counts(now, index, engine, row, step)


@contextmanager
def open_command(
    engines: int, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[CoordinatorAddresses]:
    """`dpkit coordinator`, by the line that it prints."""
    with subprocess.Popen(
        [sys.executable, "-m", "dpkit", "coordinator", "--engines", str(engines), *options],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            yield CoordinatorAddresses(**json.loads(process.stdout.readline()))
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            process.stdout.close()


def init_of(addresses: CoordinatorAddresses) -> dict[str, str]:
    """A coordinator's part of what engines are told."""
    told = attrs.asdict(addresses)
    return {
        "coordinator_input": told["back_publish"],
        "coordinator_output": told["back_output"],
        "frontend_stats_publish_address": told["front"],
    }
