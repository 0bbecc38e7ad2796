"""What one client knows of the engines' loads: its ledger's exact counts plus the newest snapshot.

Knows nothing of how a snapshot was made or what a policy makes of it. The view owns its copy of the
snapshot: a pick may bump it, and the next snapshot replaces it wholesale. The in-flight counts are
the ledger's own: an engine's load is the account in which the ledger keeps them.

An engine's *rank* is its place in the cluster, and its row in a snapshot; its *index* is its place
in the view, which holds only those that may be picked now, in the order of their ranks.
"""

from __future__ import annotations

from bisect import insort
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from attrs import define

from dpkit.balancer.ledger import Account

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dpkit.balancer.ledger import Ledger
    from dpkit.messages import EngineId, Room, Snapshot, StepReport

UNKNOWN = (0, 0, 0.0)
"""An engine that no snapshot speaks of: no load but what this client itself gave it."""


@define(eq=False)
class Load(Account):
    """All that is known of one life of an engine, as it changes."""

    rank: int = 0
    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    others: int = 0
    room: Room | None = None
    report: StepReport | None = None
    heard_at: float | None = None
    """When anything of this was told last, in seconds; None: never."""

    def hear_report(self, report: StepReport, now: float) -> None:
        """Replace what the engine itself told before."""
        self.report = report
        self.heard_at = now

    def hear(
        self, waiting: int, running: int, kv_cache_usage: float, *, alone: bool = False
    ) -> None:
        """Replace what the last snapshot told.

        To a client that is alone it tells of no others: what it counts beyond the client's own are
        requests that have ended since it was made.
        """
        self.waiting = waiting
        self.running = running
        self.kv_cache_usage = kv_cache_usage
        self.others = 0 if alone else max(0, waiting + running - self.inflight)


class LoadView:
    """The engines that may be picked, this client's exact counts, and the newest snapshot.

    Opens its engines' accounts in the ledger, so a ledger has one view. The first engines have the
    ranks 0, 1, …; there may be none at all.
    """

    def __init__(
        self,
        engines: Iterable[EngineId],
        ledger: Ledger,
        *,
        client_index: int = 0,
        client_count: int = 1,
    ) -> None:
        if not 0 <= client_index < client_count:
            raise ValueError(f"client {client_index} of {client_count}: count clients from 0")
        self.client_index = client_index
        self.client_count = client_count
        self.steps_together = False
        self.changes: set[int] = set()
        self._ledger = ledger
        self._heard: Sequence[tuple[int, int, float]] = ()
        first = list(engines)
        # By name: the life that is in the view or was the last one there; None before the first.
        self._lives: dict[str, EngineId | None] = {engine.name: engine for engine in first}
        if len(self._lives) != len(first):
            raise ValueError(f"engine names must differ: {', '.join(map(str, first))}")
        self._loads = [self._open(engine, rank) for rank, engine in enumerate(first)]
        self._renumber()

    def __repr__(self) -> str:
        loads = ", ".join(
            f"{load.engine} {load.inflight}+{load.waiting}w/{load.running}r" for load in self._loads
        )
        return f"<LoadView of client {self.client_index}/{self.client_count}: {loads or 'nobody'}>"

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
        """The index of the engine of this name; None: it may not be picked now."""
        return self._indices.get(name)

    def find_life(self, engine: EngineId) -> int | None:
        """The index of this life of an engine; None: it may not be picked now."""
        index = self._indices.get(engine.name)
        return index if index is not None and self._engines[index] == engine else None

    def report_of(self, engine: EngineId) -> StepReport | None:
        """What this life of an engine told last; None: nothing, or it may not be picked now."""
        return None if (index := self.find_life(engine)) is None else self._loads[index].report

    def find(self, account: Account, index: int) -> int | None:
        """Where a life is now that was at `index` once; None: it has left the view."""
        loads = self._loads
        if index < len(loads) and loads[index] is account:
            return index
        now = self._indices.get(account.engine.name)
        return now if now is not None and loads[now] is account else None

    @property
    def names(self) -> Collection[str]:
        """The engines there are, in the view or away for a while."""
        return self._lives.keys()

    def bump_waiting(self, index: int, requests: int) -> None:
        """Count `requests` more as waiting on an engine until the next snapshot says better."""
        self._loads[index].waiting += requests
        self.changes.add(index)

    def apply(self, snapshot: Snapshot, *, now: float = 0.0) -> bool:
        """Replace all loads by a snapshot's; False when it speaks of the wave state only.

        Engines join and leave, so a snapshot may know fewer or more of them than this view: those
        it leaves out are unknown, those only it knows are passed over.
        """
        if snapshot.loads is None:
            return False
        self._heard = snapshot.loads
        for load in self._loads:
            load.hear(*self._row(load.rank), alone=self.client_count == 1)
            if load.rank < len(self._heard):
                load.heard_at = now
        self.changes.update(range(len(self._loads)))
        return True

    def add(self, engine: EngineId, rank: int, room: Room | None = None) -> None:
        """Let a life of an engine be picked.

        A new life has nothing in flight, and its load is not known before the next snapshot. A life
        that was away has what it had. `room` is what it can hold and do at once, if that is known.

        Raises:
            ValueError: a life of this engine, or another engine of this rank, is in the view.
        """
        for load in self._loads:
            if load.rank == rank or load.engine.name == engine.name:
                raise ValueError(
                    f"cannot add engine {engine} at rank {rank}: {load.engine} is there already"
                )
        load = self._open(engine, rank)
        load.room = room
        insort(self._loads, load, key=attrgetter("rank"))
        self._lives[engine.name] = engine
        self._renumber()

    def remove(self, engine: EngineId) -> bool:
        """Let a life be picked no more; False: it is not in the view.

        What it holds still counts until it is released, and its name is known until `forget`.
        """
        if (index := self.find_life(engine)) is None:
            return False
        self._ledger.close(self._loads.pop(index))
        self._renumber()
        return True

    def expect(self, name: str) -> None:
        """An engine belongs to the cluster and will come: requests may be pinned to it already."""
        self._lives.setdefault(name, None)

    def forget(self, name: str) -> None:
        """An engine that is not in the view will not come back."""
        if name not in self._indices:
            self._lives.pop(name, None)

    def _row(self, rank: int) -> tuple[int, int, float]:
        return self._heard[rank] if rank < len(self._heard) else UNKNOWN

    def _open(self, engine: EngineId, rank: int) -> Load:
        """A life's account: the one that it left behind when it went away, or a new one."""
        load = self._ledger.account(engine)
        if not isinstance(load, Load):
            load = Load(engine)
            self._ledger.open(load)
        load.rank = rank
        heard = self._row(rank) if self._lives.get(engine.name) == engine else UNKNOWN
        load.hear(*heard, alone=self.client_count == 1)
        return load

    def _renumber(self) -> None:
        """Indices have moved: all loads are news."""
        self._engines = [load.engine for load in self._loads]
        self._indices = {engine.name: index for index, engine in enumerate(self._engines)}
        for index, load in enumerate(self._loads):
            load.follower = partial(self.changes.add, index)
        self.changes.clear()
        self.changes.update(range(len(self._loads)))
