"""Ranks, a coordinator, clients and an operator, in every order that a seed can think of.

The rules are the real ones: `EngineWaves` of every rank, and the coordinator's. The world is what
lies between them: messages keep their order on each way, and nothing else is promised. A start may
come late, or twice; a rank or the coordinator may crash, and is made good a while later.

A world goes wrong by raising `Wrong`, or what the rules raise: that says what, and which seed.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.engine.waves import Ballot, EngineWaves, Phase
from dpkit.messages import Snapshot, StartWave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpkit.engine.waves import Word

CLIENTS = 2


class Wrong(AssertionError):  # noqa: N818 - reads as what happened
    """A promise is broken."""


@define(eq=False)
class Rank:
    """One engine, as its busy loop has it."""

    waves: EngineWaves
    connected: bool = True
    alive: bool = True
    refuses: bool = False  # asked to pause, and not resumed since
    waits_for_pause: bool = False
    inbox: list[tuple[int, int]] = field(factory=list)  # stamp, steps
    aborts: int = 0
    work: list[int] = field(factory=list)  # steps that are left of each request
    cast: Ballot | None = None
    tally: Ballot | None = None
    has_news: bool = False  # since it looked last
    up: deque[Word] = field(factory=deque)
    down: deque[StartWave] = field(factory=deque)
    orders: deque[str] = field(factory=deque)
    requests: list[deque[tuple[int, int]]] = field(
        factory=lambda: [deque() for _ in range(CLIENTS)]
    )

    @property
    def is_free(self) -> bool:
        """Whether its loop has something to do."""
        if not self.alive or self.cast is not None or self.tally is not None:
            return False
        return bool(self.has_news or self.inbox or self.work or self.waves.runs)


class World:
    """One run; `run` it.

    Args:
        seed: Of all that happens.
        ranks: How many; None: 2 or 3.
        events: How many are sprung on them before all is left to come to rest.
        make: Makes the waves of a rank.
        crashes: Whether ranks and coordinators crash.
        late_words: What an ended group said reaches the coordinator of the next.
    """

    def __init__(
        self,
        seed: int,
        *,
        ranks: int | None = None,
        events: int = 24,
        make: type[EngineWaves] = EngineWaves,
        crashes: bool = True,
        late_words: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.count = ranks or self.rng.choice((2, 3))
        self.interval = self.rng.choice((1, 2, 3, 16))
        self.waves_done = 0
        self.leaves: dict[int, set[int]] = {}
        """By wave of the present life: at which steps ranks left it."""
        self._events = events
        self._make = make
        self._crashes = crashes
        self._late_words = late_words
        self._rules = self._new_rules()
        self._ghosts: list[StartWave] = []
        self._news: list[deque[Snapshot]] = [deque() for _ in range(CLIENTS)]
        self._stamps = [0] * CLIENTS
        self._open = 0
        self._last_order = "resume"
        self.ranks: dict[int, Rank] = {}
        self._begin(range(self.count))

    # -- A life of the group -----------------------------------------------------------------------

    def _new_rules(self) -> CoordinatorRules:
        return CoordinatorRules(self.count, now=0.0, wave_coordination=True)

    def _begin(self, members: Iterable[int]) -> None:
        members = list(members)
        old = self.ranks
        self.ranks = {
            rank: Rank(
                self._make(rank, speaks=rank == members[0], sync_interval=self.interval),
                up=old[rank].up if self._late_words and rank in old else deque(),
            )
            for rank in members
        }
        self._ghosts.clear()
        self.leaves.clear()
        self._last_order = "resume"
        for news in self._news:
            news.clear()

    def _restart(self) -> None:
        """All begin anew, or those that are left: requests are placed again, whoever had them."""
        survivors = [number for number, rank in self.ranks.items() if rank.alive]
        whole = self.rng.random() < 0.5 or not survivors
        lost, self._open = self._open, 0
        self._rules = self._new_rules()
        self._begin(self.ranks if whole else survivors)
        for _ in range(lost):
            self._request()

    # -- What is sprung on it ----------------------------------------------------------------------

    def _request(self) -> None:
        client = self.rng.randrange(CLIENTS)
        request = self._stamps[client], self.rng.choice((1, 1, 2, 5, 20))
        self._any_rank().requests[client].append(request)
        self._open += 1

    def _abort(self) -> None:
        rank = self._any_rank()
        rank.aborts += 1
        rank.has_news = True

    def _order(self) -> None:
        """An operator's word, to all ranks; twice, now and then, as whoever gets no answer does."""
        order = self.rng.choice(("pause", "resume", "resume"))
        for rank in self.ranks.values():
            rank.orders.extend([order] * self.rng.choice((1, 1, 1, 2)))
        self._last_order = order

    def _repeat(self) -> None:
        """A start comes once more, however late."""
        if self._ghosts:
            start, rank = self.rng.choice(self._ghosts), self._any_rank()
            rank.waves.note_start(start.wave, start.engine_index)
            rank.has_news = True

    def _crash(self) -> None:
        if self._crashes:
            self._any_rank().alive = False

    def _forget(self) -> None:
        """The coordinator crashes, with all that is under way to it and from it."""
        if not self._crashes:
            return
        self._rules = self._new_rules()
        for rank in self.ranks.values():
            rank.connected = False
            rank.up.clear()
            rank.down.clear()
        for news in self._news:
            news.clear()

    def _any_rank(self) -> Rank:
        return self.rng.choice(list(self.ranks.values()))

    # -- What comes of it --------------------------------------------------------------------------

    def _moves(self) -> list[Callable[[], None]]:
        """All that can happen next by itself."""
        moves: list[Callable[[], None]] = []
        for number, rank in self.ranks.items():
            if rank.is_free:
                moves.append(partial(self._turn, rank))
            if rank.alive and rank.tally is not None:
                moves.append(partial(self._take_tally, rank))
            if rank.up:
                moves.append(partial(self._hear, number, rank))
            if rank.down:
                moves.append(partial(self._call, rank))
            if rank.orders:
                moves.append(partial(self._obey, rank))
            if not rank.connected:
                moves.append(partial(self._connect, rank))
            moves += [partial(self._arrive, rank, queue) for queue in rank.requests if queue]
        moves += [partial(self._inform, client) for client, news in enumerate(self._news) if news]
        if any(not rank.alive for rank in self.ranks.values()):
            moves.append(self._restart)
        return moves

    def _turn(self, rank: Rank) -> None:
        """One round of a busy loop: drain, look, step, vote."""
        rank.has_news = False
        waves, before = rank.waves, rank.waves.wave
        for _ in range(min(rank.aborts, len(rank.work))):
            rank.work.pop(self.rng.randrange(len(rank.work)))
            self._open -= 1
        rank.aborts = 0
        for stamp, steps in rank.inbox:
            waves.note_request(stamp)
            rank.work.append(steps)
        rank.inbox.clear()
        self._say(rank, waves.look(bool(rank.work)))
        if rank.work:
            if not waves.runs:
                raise Wrong(f"{waves} has work, and no wave")
            self._open -= rank.work.count(1)
            rank.work = [steps - 1 for steps in rank.work if steps > 1]
        self._answer(rank)
        if waves.runs and rank.refuses and not rank.waits_for_pause:
            raise Wrong(f"{self}: {waves} steps, though it has said that it is paused")
        if waves.runs and waves.step():
            rank.cast = waves.ballot(bool(rank.work))
            self._vote()
        if waves.wave < before:
            raise Wrong(f"{waves} was in wave {before}")

    def _vote(self) -> None:
        """A vote is taken once all have entered it, and each hears of it in its own time."""
        ranks = list(self.ranks.values())
        if all(rank.alive and rank.cast is not None for rank in ranks):
            tally = Ballot.tally([rank.cast for rank in ranks if rank.cast is not None])
            for rank in ranks:
                rank.cast, rank.tally = None, tally

    def _take_tally(self, rank: Rank) -> None:
        assert rank.tally is not None
        waves, before, step = rank.waves, rank.waves.wave, rank.waves.step_counter
        tally, rank.tally = rank.tally, None
        self._say(rank, waves.count(tally))
        if waves.wave < before:
            raise Wrong(f"{waves} was in wave {before}")
        if not waves.runs:
            at = self.leaves.setdefault(waves.wave - 1, set())
            at.add(step)
            self.waves_done += 1
            if len(at) > 1:
                raise Wrong(f"ranks leave wave {waves.wave - 1} at steps {at}")
        self._answer(rank)

    def _say(self, rank: Rank, words: Iterable[Word]) -> None:
        if rank.connected:
            rank.up.extend(words)

    def _answer(self, rank: Rank) -> None:
        if rank.waves.is_paused:
            rank.waits_for_pause = False

    def _hear(self, number: int, rank: Rank) -> None:
        word = rank.up.popleft()
        if word.start_wave is not None:
            self._publish(self._rules.on_start_wave(0.0, word.start_wave, number))
        if word.wave_complete is not None:
            self._publish(self._rules.on_wave_complete(0.0, word.wave_complete))

    def _publish(self, told: Iterable[Snapshot | StartWave]) -> None:
        for message in told:
            if isinstance(message, Snapshot):
                for news in self._news:
                    news.append(message)
            else:
                self._ghosts.append(message)
                for rank in self.ranks.values():
                    if rank.connected:
                        rank.down.append(message)

    def _call(self, rank: Rank) -> None:
        start = rank.down.popleft()
        rank.waves.note_start(start.wave, start.engine_index)
        rank.has_news = True

    def _connect(self, rank: Rank) -> None:
        """A rank finds the coordinator that came after, which tells all of a wave that runs."""
        rank.connected = True
        self._say(rank, rank.waves.report())
        now = self._rules.statistics()
        if now.engines_running:
            self._publish([StartWave(wave=now.current_wave, engine_index=-1)])

    def _obey(self, rank: Rank) -> None:
        rank.refuses = rank.orders.popleft() == "pause"
        rank.waits_for_pause = rank.refuses
        rank.has_news = True
        if rank.refuses:
            rank.waves.note_pause()
        else:
            rank.waves.note_resume()

    def _arrive(self, rank: Rank, queue: deque[tuple[int, int]]) -> None:
        request = queue.popleft()
        if rank.refuses:
            self._open -= 1  # its client is told to try again
        else:
            rank.inbox.append(request)

    def _inform(self, client: int) -> None:
        self._stamps[client] = self._news[client].popleft().current_wave

    # -- The run -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Spring all on it, let it come to rest, and look at what is left.

        Raises:
            Wrong: a promise is broken.
        """
        springs = [self._request] * 6 + [self._abort, self._order, self._order]
        springs += [self._repeat] * 2 + [self._crash, self._forget] * (self.rng.random() < 0.3)
        for _ in range(self._events):
            self.rng.choice(springs)()
            for _ in range(self.rng.randrange(12)):
                self._move()
        left = 20_000
        while self._move():
            left -= 1
            if not left:
                raise Wrong(f"{self} does not come to rest")
        self._check()

    def _move(self) -> bool:
        moves = self._moves()
        if moves:
            self.rng.choice(moves)()
        return bool(moves)

    def _check(self) -> None:
        voting = [number for number, rank in self.ranks.items() if rank.cast is not None]
        if voting:
            raise Wrong(f"{self}: ranks {voting} vote for ever, the others do not")
        if self._open:
            raise Wrong(f"{self}: {self._open} requests wait for ever")
        now = self._rules.statistics()
        waves = {rank.waves.wave for rank in self.ranks.values()}
        if any(rank.waves.runs for rank in self.ranks.values()) or now.engines_running:
            raise Wrong(f"{self} is idle, and does not sleep; coordinator: {now}")
        if waves != {now.current_wave}:
            raise Wrong(f"{self}: ranks and coordinator disagree on the wave: {now}")
        phase = Phase.PAUSED if self._last_order == "pause" else Phase.ASLEEP
        if {rank.waves.phase for rank in self.ranks.values()} != {phase}:
            raise Wrong(f"{self}: the last order was {self._last_order}")
        if self._last_order == "pause" and any(
            rank.waits_for_pause for rank in self.ranks.values()
        ):
            raise Wrong(f"{self}: a pause is never answered")

    def __repr__(self) -> str:
        ranks = ", ".join(repr(rank.waves) for rank in self.ranks.values())
        return f"seed {self.seed}, interval {self.interval}: {ranks}"
