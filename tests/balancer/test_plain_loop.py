"""Kept scores choose what a plain loop over all engines chooses, tie for tie, whatever happens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import Factory, define, frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpkit.balancer.policies import load_policy
from dpkit.balancer.scoreboard import FLAT, BlockBoard, ScoreBoard, make_board
from dpkit.messages import EngineId
from dpkit.names import PolicyName
from tests.balancer.conftest import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.balancer.dispatch import Placement


@frozen(kw_only=True)
class Rule:
    """What sets one policy's loop apart from another's."""

    score: Callable[[int, int, int, int, float], float]
    """Of clients, in-flight, waiting, running, KV usage."""

    spread: bool = True
    """Whether clients begin to look at different engines."""

    rotates: bool = False
    fixed: bool = False
    """Whether the start follows from the number of engines at any time."""
    bumps: bool = True


RULES = {
    "kv_pressure": Rule(
        score=lambda clients, inflight, waiting, running, usage: (
            max(clients * inflight, waiting + running) + waiting * 6.0 * max(0.0, usage - 0.5)
        ),
        rotates=True,
    ),
    "inflight": Rule(
        score=lambda _clients, inflight, waiting, running, _usage: max(inflight, waiting + running),
        spread=False,
        bumps=False,
    ),
    "queue_weighted": Rule(
        score=lambda _clients, _inflight, waiting, running, _usage: 4 * waiting + running,
        fixed=True,
    ),
}


@define
class Engine:
    """What the reference knows of one engine."""

    life: EngineId
    inflight: int = 0
    load: list[Any] = Factory(lambda: [0, 0, 0.0])


@define
class PlainLoop:
    """One client's books and loop, as simple as can be: the reference."""

    rule: Rule
    index: int
    clients: int
    engines: list[Engine]
    present: list[int]
    """Ranks of those that may be picked."""
    start: int | None = None
    heard: list[list[Any]] = Factory(list)

    def row(self, rank: int) -> list[Any]:
        return list(self.heard[rank]) if rank < len(self.heard) else [0, 0, 0.0]

    def pick(self) -> int:
        count = len(self.present)
        if self.start is None:
            self.start = count * self.index // self.clients if self.rule.spread else 0
        best, lowest = 0, float("inf")
        for step in range(count):
            index = (self.start + step) % count
            engine = self.engines[self.present[index]]
            score = self.rule.score(self.clients, engine.inflight, *engine.load)
            if score < lowest:
                best, lowest = index, score
        self.start = (self.start + self.rule.rotates) % count
        engine = self.engines[self.present[best]]
        engine.load[0] += self.clients * self.rule.bumps
        engine.inflight += 1
        return best

    def set_present(self, ranks: set[int]) -> None:
        self.present = sorted(ranks)
        if self.rule.fixed:
            self.start = None
        elif self.start is not None and ranks:
            self.start %= len(ranks)


@define
class Pair:
    """The same client twice: ours and the plain loop."""

    ours: Client
    plain: PlainLoop
    live: list[Placement] = Factory(list)

    def pick(self, rng: random.Random) -> None:
        assert self.ours.dispatch.has_room() == bool(self.plain.present)
        for _ in range(rng.randrange(1, 12) if self.plain.present else 0):
            placement = self.ours.place()
            assert placement.index == self.plain.pick()
            self.live.append(placement)

    def pin(self, rng: random.Random) -> None:
        if self.plain.present:
            rank = rng.choice(self.plain.present)
            self.live.append(self.ours.place(engine=f"e{rank}"))
            self.plain.engines[rank].inflight += 1

    def release(self, rng: random.Random) -> None:
        for _ in range(min(len(self.live), rng.randrange(1, 8))):
            placement = self.live.pop(rng.randrange(len(self.live)))
            self.ours.release([placement, placement])
            engine = self.plain.engines[int(placement.engine.name[1:])]
            if engine.life == placement.engine:
                engine.inflight -= 1

    def hear(self, rng: random.Random) -> None:
        """Few different numbers, so that ties are common."""
        count = len(self.plain.engines)
        heard = rng.choice([count, rng.randrange(count + 1)])
        loads = [
            (rng.randrange(3), rng.randrange(4), rng.choice([0.0, 0.5, 0.75, 1.0]))
            for _ in range(heard)
        ]
        self.ours.snapshot(*loads)
        self.plain.heard = [list(load) for load in loads]
        for rank, engine in enumerate(self.plain.engines):
            engine.load = self.plain.row(rank)

    def leave(self, rng: random.Random) -> None:
        """Some engines are picked no more; what they hold goes on."""
        present = self.plain.present
        for rank in rng.sample(present, rng.choice([1, len(present)]) if present else 0):
            assert self.ours.dispatch.remove(self.plain.engines[rank].life)
            self.plain.set_present({*self.plain.present} - {rank})

    def come(self, rng: random.Random) -> None:
        """An engine that was away is back, in the same life or in the next one."""
        away = sorted(set(range(len(self.plain.engines))) - {*self.plain.present})
        if not away:
            return
        rank = rng.choice(away)
        engine = self.plain.engines[rank]
        if rng.random() < 0.5:
            engine.life = EngineId(engine.life.name, epoch=engine.life.epoch + 1)
            engine.inflight, engine.load = 0, [0, 0, 0.0]
        else:
            engine.load = self.plain.row(rank)
        self.ours.dispatch.add(engine.life, rank)
        self.plain.set_present({*self.plain.present, rank})

    def check(self) -> None:
        present = [self.plain.engines[rank] for rank in self.plain.present]
        assert list(self.ours.view.engines) == [engine.life for engine in present]
        assert list(self.ours.view.inflight) == [engine.inflight for engine in present]


ENGINES = st.one_of(
    st.integers(1, 9), st.sampled_from([FLAT - 1, FLAT, FLAT + 1, 512]), st.integers(1, 600)
)
CLIENTS = st.integers(1, 4).flatmap(lambda c: st.tuples(st.integers(0, c - 1), st.just(c)))
EVENTS = st.lists(
    st.sampled_from(
        [Pair.pick, Pair.pick, Pair.release, Pair.pin, Pair.hear, Pair.leave, Pair.come, Pair.come]
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", RULES)
@given(engines=ENGINES, clients=CLIENTS, events=EVENTS, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_pick_is_that_of_the_plain_loop(
    name: str,
    engines: int,
    clients: tuple[int, int],
    events: list[Callable[[Pair, random.Random], None]],
    seed: int,
) -> None:
    index, count = clients
    rng = random.Random(seed)
    pair = Pair(
        Client(engines, load_policy(name), index, count),
        PlainLoop(
            rule=RULES[name],
            index=index,
            clients=count,
            engines=[Engine(EngineId(f"e{rank}")) for rank in range(engines)],
            present=list(range(engines)),
        ),
    )
    for event in events:
        event(pair, rng)
        pair.check()
    pair.pick(rng)
    assert pair.ours.ledger.audit() == ()
    pair.ours.release(pair.live)
    assert set(pair.ours.view.inflight) <= {0}
    assert len(pair.ours.ledger._accounts) == len(pair.plain.present), "the others left nothing"


@pytest.mark.parametrize("name", list(PolicyName))
@given(engines=st.integers(1, 6), changes=st.lists(st.integers(0, 5), max_size=30))
@settings(max_examples=60, deadline=None)
def test_whoever_comes_and_goes_a_policy_picks_from_those_there_are(
    name: PolicyName, engines: int, changes: list[int]
) -> None:
    client = Client(engines, load_policy(name, rng=random.Random(0)), 0, 1)
    for change in changes:
        engine = EngineId(f"e{change % engines}")
        if not client.dispatch.remove(engine):
            client.dispatch.add(engine, change % engines)
        client.hear_nothing_but_zeros()
        if client.dispatch.has_room():
            placement = client.place()
            assert client.view.engines[placement.index] == placement.engine


@given(
    scores=st.lists(st.integers(0, 3).map(float), min_size=1, max_size=200),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3).map(float)), max_size=30),
    block=st.booleans(),
)
@example(scores=[1.0, 0.0, 0.0], changes=[(0, 0.0)], block=True)
@settings(max_examples=200, deadline=None)
def test_a_board_finds_the_first_lowest_from_any_start(
    scores: list[float], changes: list[tuple[int, float]], *, block: bool
) -> None:
    board = (BlockBoard if block else ScoreBoard)(scores)
    count = len(scores)
    for place, score in [(0, scores[0]), *changes]:
        board[place % count] = scores[place % count] = score
        start = place * 7 % count
        order = [*range(start, count), *range(start)]
        assert board.lowest(start) == min(order, key=scores.__getitem__)
    assert list(board) == scores


@pytest.mark.parametrize(("count", "kind"), [(1, ScoreBoard), (FLAT, ScoreBoard), (65, BlockBoard)])
def test_only_large_boards_lie_in_blocks(count: int, kind: type[ScoreBoard]) -> None:
    assert type(make_board([0.0] * count)) is kind
