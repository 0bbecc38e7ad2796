"""Where a group of engines meets that steps together, anew for each of its lives.

Each life of the group has a coordinator, sockets and a rendezvous of its own: what is under way of
an earlier one reaches nobody, and its waves begin at 0. Knows not where they run; imports ZeroMQ,
so it is imported only where there is such a group. What is said is `dpkit.link.coordinator`'s
affair, and how ranks vote `dpkit.link.gloo`'s.
"""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Never

import trio

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.errors import DpkitError, InternalError, WireError, describe
from dpkit.link.coordinator import open_coordinator
from dpkit.link.group import RANKS
from dpkit.nursery.context import protected_context
from dpkit.wire.coordinator import CoordinatorAddresses
from dpkit.wire.zsocket import open_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator

    from dpkit.link.coordinator import WireCoordinator
    from dpkit.link.zmq import WireConnection
    from dpkit.messages import Snapshot
    from dpkit.wire.structs import SchedulerStats

HOST = "127.0.0.1"
"""Of the first rank, as of all processes that are started here."""

MORE_PORTS = 4
"""Of the first rank's host, after the one where ranks meet: vLLM's workers meet there, too."""

_REST_S = 1.0
"""How long the last wave may take to end once nobody has work: a vote or two."""


class Round:
    """One life of the group; made by `Gathering.attend`."""

    def __init__(
        self,
        ranks: Iterable[int],
        on_waves: Callable[[int, bool], None],
        place: tuple[str, int] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.wave = 0
        """The newest that the coordinator has told of."""
        self.newest_step = 0, 0
        """The newest (wave, step) that the coordinator has heard of."""
        self.over = trio.Event()
        """Set once everybody has left it."""
        self.error: Exception | None = None
        """What broke its coordinator."""
        self._on_waves = on_waves
        self._place = place
        self._connections: list[WireConnection] = []
        self._listeners: dict[int, Callable[[SchedulerStats], None]] = {}
        self._settings: dict[int, str | None] = {}
        self._held: dict[int, Callable[[], bool]] = {}  # by rank, in the order of their calls
        self._answered: set[int] = set()
        self._finished: set[int] = set()
        self._runs = False
        self._news = trio.lowlevel.ParkingLot()
        self._coordinator: WireCoordinator

    def __repr__(self) -> str:
        state = "over" if self.over.is_set() else "running" if self._runs else "asleep"
        return f"<Round of ranks {self.ranks}: wave {self.wave}, {state}>"

    @property
    def addresses(self) -> CoordinatorAddresses:
        """Of its coordinator."""
        return self._coordinator.addresses

    @property
    def parallel_config(self) -> dict[str, Any]:
        """What INIT tells each rank of the group."""
        assert self._place is not None, "it is open"  # noqa: S101
        host, port = self._place
        told = {
            "data_parallel_master_ip": host,
            "data_parallel_master_port": port,
            "data_parallel_size": len(self.ranks),
        }
        if self.ranks != tuple(range(len(self.ranks))):
            return told | {RANKS: list(self.ranks)}
        # vLLM's take the last of the list; else each process would pick ports of its own.
        ports = [port + offset for offset in range(MORE_PORTS, -1, -1)]
        return told | {"_data_parallel_master_port_list": ports, "_coord_store_port": 0}

    def stamp(self, connection: WireConnection) -> None:
        """Have the requests of a connection say the newest wave, from now on."""
        self._connections.append(connection)
        connection.current_wave = self.wave

    def listen(self, rank: int, take: Callable[[SchedulerStats], None]) -> None:
        """Have the counts of a rank, which go to the coordinator, taken as well."""
        self._listeners[rank] = take

    async def gather(self, rank: int, answer: Callable[[], bool]) -> bool:
        """Have a rank that has called answered, once all have: who meets others is not called off.

        Args:
            rank: Which.
            answer: Answers it; False: it has left.

        Returns whether it was answered; else it must call anew, and those that called later wait.
        """
        self._held[rank] = answer
        if {*self.ranks} <= self._held.keys() | self._answered:
            self._answer_all()
        while rank in self._held:
            await self._news.park()
        return rank in self._answered

    def _answer_all(self) -> None:
        """Answer those first that have waited longest, who are the likeliest to have left."""
        for rank, answer in list(self._held.items()):
            del self._held[rank]
            if not answer():
                break
            self._answered.add(rank)
        self._news.unpark_all()

    async def agree(self, rank: int, settings: str | None) -> None:
        """Wait until every rank is ready, and has told what it makes of what all must share.

        Raises:
            WireError: they make different things of it.
        """
        self._settings[rank] = settings
        await self._wait_for_all(self._settings.keys())
        if len({*self._settings.values()}) > 1:
            told = ", ".join(f"{each} at rank {n}" for n, each in sorted(self._settings.items()))
            raise WireError(
                "engines that step together must be started with the same settings, and their "
                f"parallel_config_hash is {told}"
            )

    @property
    def not_ready(self) -> list[int]:
        """Ranks that `agree` waits for."""
        return [rank for rank in self.ranks if rank not in self._settings]

    async def _wait_for_all(self, came: Collection[int]) -> None:
        self._news.unpark_all()
        while not {*self.ranks} <= {*came}:
            await self._news.park()

    async def finish(self, rank: int) -> None:
        """Wait until no rank has anything left to do: the others cannot do without this one.

        Then until the last wave has ended, for a moment: who leaves during a vote breaks it off.
        """
        self._finished.add(rank)
        await self._wait_for_all(self._finished)
        with trio.move_on_after(_REST_S):
            while self._runs:
                await self._news.park()

    def leave(self, rank: int) -> None:
        """A rank is gone: nobody waits for it any more."""
        self._finished.add(rank)
        self._news.unpark_all()

    async def wait_for_fault(self) -> Never:
        """Raise what breaks the coordinator, once that happens."""
        while self.error is None:
            await self._news.park()
        if isinstance(self.error, DpkitError):
            raise self.error
        what = describe(self.error)
        message = f"the coordinator of engines that step together broke down: {what}"
        raise InternalError(message) from self.error

    @asynccontextmanager
    async def open(self, bind: tuple[str, str, str], interval: float) -> AsyncIterator[None]:
        """Have sockets and a rendezvous for as long as the block lasts."""
        rules = CoordinatorRules(
            max(self.ranks) + 1,
            now=trio.current_time(),
            interval=interval,
            wave_coordination=True,
        )
        to_engines, from_engines, front = bind
        addresses = CoordinatorAddresses(
            back_publish=to_engines, back_output=from_engines, front=front
        )
        async with (
            open_context() as context,
            open_coordinator(
                context,
                rules,
                bind=addresses,
                await_engines=len(self.ranks),
                tell=self._hear,
                heed=self._heed,
            ) as self._coordinator,
        ):
            if self._place is not None:
                yield
                return
            with _reserved_port() as port:
                self._place = HOST, port
                yield

    async def run(self) -> None:
        """Coordinate until it is over; what breaks that is for `wait_for_fault`."""
        async with trio.open_nursery() as nursery:

            @trio.lowlevel.enable_ki_protection
            async def coordinate() -> None:
                try:
                    await self._coordinator.run()
                except Exception as error:  # noqa: BLE001 - raised by `wait_for_fault`
                    self.error = error
                    self._news.unpark_all()

            nursery.start_soon(coordinate, name="coordinator of a group")
            await self.over.wait()
            nursery.cancel_scope.cancel()

    def _heed(self, rank: int, counts: SchedulerStats) -> None:
        self.newest_step = max(self.newest_step, (counts.current_wave, counts.step_counter))
        if (take := self._listeners.get(rank)) is not None:
            take(counts)

    def _hear(self, snapshot: Snapshot) -> None:
        now = snapshot.current_wave, snapshot.engines_running
        if now == (self.wave, self._runs) or self.over.is_set():
            return
        self.wave, self._runs = now
        for connection in self._connections:
            connection.current_wave = self.wave
        self._on_waves(*now)
        self._news.unpark_all()


class Gathering:
    """One group, through all its lives; `run` is a task beside its supervisor.

    Args:
        bind: Makes three addresses that nobody had before.
        interval: Seconds between two snapshots at least.
        on_waves: Told the number of the present wave and whether it runs, when that changes.
        place: Host and port where ranks meet, of the first rank's host; None: it is this host.
    """

    def __init__(
        self,
        *,
        bind: Callable[[], tuple[str, str, str]],
        interval: float,
        on_waves: Callable[[int, bool], None],
        place: tuple[str, int] | None = None,
    ) -> None:
        self.ranks: set[int] = set()
        """Who takes part from the next life of the group on."""
        self.round: Round | None = None
        """The present one."""
        self._bind = bind
        self._interval = interval
        self._on_waves = on_waves
        self._place = place
        self._inside: set[int] = set()
        self._error: Exception | None = None
        self._news = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<Gathering of ranks {sorted(self.ranks)}: {self.round}>"

    async def run(self) -> Never:
        """Open a round when somebody comes, close it when all have left; until cancelled."""
        while True:
            while not self._inside or self._error is not None:
                await self._news.park()
            round_ = Round(sorted(self.ranks), self._on_waves, self._place)
            try:
                async with round_.open(self._bind(), self._interval):
                    self._on_waves(0, False)
                    self.round = round_
                    self._news.unpark_all()
                    await round_.run()
            except Exception as error:  # noqa: BLE001 - raised by `attend`
                self._error = error
                self._news.unpark_all()

    @protected_context
    async def attend(self, rank: int) -> AsyncIterator[Round]:
        """Take part in the present life of the group, for as long as the block lasts.

        The first to come begins it, the last to leave ends it.

        Error handling:
            AddressFailed: there is no opening its sockets.
        """
        self._inside.add(rank)
        self._news.unpark_all()
        try:
            while self.round is None:
                if self._error is not None:
                    raise self._error
                await self._news.park()
            yield self.round
        finally:
            self._leave(rank)

    def _leave(self, rank: int) -> None:
        self._inside.discard(rank)
        if self.round is not None:
            self.round.leave(rank)
        if self._inside:
            return
        self._error = None
        if self.round is not None:
            self.round.over.set()
            self.round = None
        self._news.unpark_all()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that is free for whoever listens there by `SO_REUSEADDR`, and picked for nobody."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        port: int = reserved.getsockname()[1]
        yield port
