"""What one client knows of the engines' loads: its ledger's exact counts plus the newest snapshot.

Knows nothing of how a snapshot was made or what a policy makes of it. The view owns its copy of the
snapshot: a pick may bump it, and the next snapshot replaces it wholesale. The in-flight counts are
the ledger's own: an engine's load is the account in which the ledger keeps them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import define

from dpkit.balancer.ledger import Account

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.balancer.ledger import Ledger
    from dpkit.messages import EngineId, Snapshot

UNKNOWN = (0, 0, 0.0)
"""An engine that no snapshot speaks of: no load but what this client itself gave it."""


@define(eq=False)
class Load(Account):
    """All that is known of one life of an engine, as it changes."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    others: int = 0

    def hear(self, waiting: int, running: int, kv_cache_usage: float) -> None:
        """Replace what the last snapshot told."""
        self.waiting = waiting
        self.running = running
        self.kv_cache_usage = kv_cache_usage
        self.others = max(0, waiting + running - self.inflight)


class LoadView:
    """Engines by index, this client's exact counts, and its own copy of the newest snapshot.

    Opens its engines' accounts in the ledger, so a ledger has one view.
    """

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
        self.changes: set[int] = set()
        self._ledger = ledger
        self._engines = list(engines)
        self._indices = {engine.name: index for index, engine in enumerate(engines)}
        if len(self._indices) != len(self._engines):
            raise ValueError(f"engine names must differ: {', '.join(map(str, engines))}")
        self._loads = [self._open(index, engine) for index, engine in enumerate(engines)]

    def __repr__(self) -> str:
        loads = ", ".join(
            f"{load.engine} {load.inflight}+{load.waiting}w/{load.running}r" for load in self._loads
        )
        return f"<LoadView of client {self.client_index}/{self.client_count}: {loads}>"

    @property
    def engines(self) -> Sequence[EngineId]:
        """The incarnations that may be picked."""
        return self._engines

    @property
    def loads(self) -> Sequence[Load]:
        """All that is known of each engine; as it changes, so copy what you want to keep."""
        return self._loads

    @property
    def inflight(self) -> Sequence[int]:
        """This client's unfinished requests on each engine; a copy, so ask once per pick."""
        return [load.inflight for load in self._loads]

    @property
    def waiting(self) -> Sequence[int]:
        """Waiting requests of all clients, from the newest snapshot, bumps included; a copy."""
        return [load.waiting for load in self._loads]

    @property
    def running(self) -> Sequence[int]:
        """Running requests of all clients, from the newest snapshot; a copy."""
        return [load.running for load in self._loads]

    @property
    def kv_cache_usage(self) -> Sequence[float]:
        """Share of KV blocks in use, from the newest snapshot; a copy."""
        return [load.kv_cache_usage for load in self._loads]

    def load(self, index: int) -> Load:
        """All that is known of one engine; as it changes, so copy what you want to keep."""
        return self._loads[index]

    def index_of(self, name: str) -> int | None:
        """The index of the engine of this name; None: there is none."""
        return self._indices.get(name)

    def bump_waiting(self, index: int, requests: int) -> None:
        """Count `requests` more as waiting on an engine until the next snapshot says better."""
        self._loads[index].waiting += requests
        self.changes.add(index)

    def apply(self, snapshot: Snapshot) -> bool:
        """Replace all loads by a snapshot's; False when it speaks of the wave state only.

        Engines join and leave, so a snapshot may know fewer or more of them than this view: those
        it leaves out are unknown, those only it knows are passed over.
        """
        if snapshot.loads is None:
            return False
        heard = len(snapshot.loads)
        for index, load in enumerate(self._loads):
            load.hear(*(snapshot.loads[index] if index < heard else UNKNOWN))
        self.changes.update(range(len(self._loads)))
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
        self._ledger.close(self._loads[index])
        self._loads[index] = self._open(index, engine)

    def _open(self, index: int, engine: EngineId) -> Load:
        load = Load(engine, follower=partial(self.changes.add, index))
        self._ledger.open(load)
        self.changes.add(index)
        return load
