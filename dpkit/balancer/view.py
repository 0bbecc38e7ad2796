"""What one client knows of the engines' loads: its ledger's exact counts plus the newest snapshot.

Knows nothing of how a snapshot was made or what a policy makes of it. The view owns its copy of the
snapshot: a pick may bump it, and the next snapshot replaces it wholesale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.abc import EngineLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.balancer.ledger import Ledger
    from dpkit.messages import EngineId, Snapshot

UNKNOWN = (0, 0, 0.0)
"""An engine that no snapshot speaks of: no load but what this client itself gave it."""


class LoadView:
    """Engines by index, this client's exact counts, and its own copy of the newest snapshot."""

    def __init__(
        self,
        engines: Sequence[EngineId],
        ledger: Ledger,
        *,
        client_index: int = 0,
        client_count: int = 1,
    ) -> None:
        if not engines:
            raise ValueError("cannot balance over no engines: give at least one")
        if not 0 <= client_index < client_count:
            raise ValueError(f"client {client_index} of {client_count}: count clients from 0")
        self.client_index = client_index
        self.client_count = client_count
        self._ledger = ledger
        self._engines = list(engines)
        self._indices = {engine.name: index for index, engine in enumerate(engines)}
        if len(self._indices) != len(self._engines):
            raise ValueError(f"engine names must differ: {', '.join(map(str, engines))}")
        self._forget()

    def __repr__(self) -> str:
        loads = ", ".join(
            f"{engine} {self.load(index).inflight}+{self._waiting[index]}w/{self._running[index]}r"
            for index, engine in enumerate(self._engines)
        )
        return f"<LoadView of client {self.client_index}/{self.client_count}: {loads}>"

    @property
    def engines(self) -> Sequence[EngineId]:
        """The incarnations that may be picked."""
        return self._engines

    @property
    def inflight(self) -> Sequence[int]:
        """This client's unfinished requests on each engine; a copy, so ask once per pick."""
        return [self._ledger.inflight(engine) for engine in self._engines]

    @property
    def waiting(self) -> Sequence[int]:
        """Waiting requests of all clients, from the newest snapshot, bumps since then included."""
        return self._waiting

    @property
    def running(self) -> Sequence[int]:
        """Running requests of all clients, from the newest snapshot."""
        return self._running

    @property
    def kv_cache_usage(self) -> Sequence[float]:
        """Share of KV blocks in use, from the newest snapshot."""
        return self._kv_cache_usage

    def load(self, index: int) -> EngineLoad:
        """All that is known of one engine, in constant time."""
        return EngineLoad(
            inflight=self._ledger.inflight(self._engines[index]),
            waiting=self._waiting[index],
            running=self._running[index],
            kv_cache_usage=self._kv_cache_usage[index],
        )

    def index_of(self, name: str) -> int | None:
        """The index of the engine of this name; None: there is none."""
        return self._indices.get(name)

    def bump_waiting(self, index: int, requests: int) -> None:
        """Count `requests` more as waiting on an engine until the next snapshot says better."""
        self._waiting[index] += requests

    def apply(self, snapshot: Snapshot) -> bool:
        """Replace all loads by a snapshot's; False when it speaks of the wave state only.

        Engines join and leave, so a snapshot may know fewer or more of them than this view: those
        it leaves out are unknown, those only it knows are passed over.
        """
        if snapshot.loads is None:
            return False
        self._forget()
        for index, load in enumerate(snapshot.loads[: len(self._engines)]):
            self._waiting[index], self._running[index], self._kv_cache_usage[index] = load
        return True

    def replace(self, index: int, engine: EngineId) -> None:
        """Put a new life at an index: nothing in flight there, and its load not known yet."""
        if (taken := self._indices.get(engine.name, index)) != index:
            raise ValueError(
                f"cannot make engine {index} {engine}: {engine.name} is engine {taken} already"
            )
        del self._indices[self._engines[index].name]
        self._indices[engine.name] = index
        self._engines[index] = engine
        self._waiting[index], self._running[index], self._kv_cache_usage[index] = UNKNOWN

    def _forget(self) -> None:
        count = len(self._engines)
        waiting, running, kv_cache_usage = UNKNOWN
        self._waiting = [waiting] * count
        self._running = [running] * count
        self._kv_cache_usage = [kv_cache_usage] * count
