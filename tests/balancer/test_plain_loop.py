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
        score=lambda _clients, _inflight, waiting, running, _usage: 4 * waiting + running
    ),
}


@define
class PlainLoop:
    """One client's books and loop, as simple as can be: the reference."""

    rule: Rule
    clients: int
    start: int
    inflight: list[int]
    loads: list[list[Any]]

    def pick(self) -> int:
        count = len(self.inflight)
        best, lowest = 0, float("inf")
        for step in range(count):
            index = (self.start + step) % count
            score = self.rule.score(self.clients, self.inflight[index], *self.loads[index])
            if score < lowest:
                best, lowest = index, score
        self.start = (self.start + self.rule.rotates) % count
        self.loads[best][0] += self.clients * self.rule.bumps
        self.inflight[best] += 1
        return best


@define
class Pair:
    """The same client twice: ours and the plain loop."""

    ours: Client
    plain: PlainLoop
    live: list[Placement] = Factory(list)

    def pick(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 12)):
            placement = self.ours.place()
            assert placement.index == self.plain.pick()
            self.live.append(placement)

    def pin(self, rng: random.Random) -> None:
        index = rng.randrange(len(self.plain.inflight))
        self.live.append(self.ours.place(engine=f"e{index}"))
        self.plain.inflight[index] += 1

    def release(self, rng: random.Random) -> None:
        for _ in range(min(len(self.live), rng.randrange(1, 8))):
            placement = self.live.pop(rng.randrange(len(self.live)))
            self.ours.release([placement, placement])
            if self.ours.view.engines[placement.index] == placement.engine:
                self.plain.inflight[placement.index] -= 1

    def hear(self, rng: random.Random) -> None:
        """Few different numbers, so that ties are common."""
        heard = rng.choice([len(self.plain.inflight), rng.randrange(len(self.plain.inflight) + 1)])
        loads = [
            (rng.randrange(3), rng.randrange(4), rng.choice([0.0, 0.5, 0.75, 1.0]))
            for _ in range(heard)
        ]
        self.ours.snapshot(*loads)
        self.plain.loads = [[0, 0, 0.0] for _ in self.plain.inflight]
        self.plain.loads[:heard] = map(list, loads)

    def replace(self, rng: random.Random) -> None:
        index = rng.randrange(len(self.plain.inflight))
        old = self.ours.view.engines[index]
        self.ours.view.replace(index, EngineId(old.name, epoch=old.epoch + 1))
        self.plain.inflight[index] = 0
        self.plain.loads[index] = [0, 0, 0.0]


ENGINES = st.one_of(
    st.integers(1, 9), st.sampled_from([FLAT - 1, FLAT, FLAT + 1, 512]), st.integers(1, 600)
)


@pytest.mark.parametrize("name", RULES)
@given(
    engines=ENGINES,
    clients=st.integers(1, 4).flatmap(lambda c: st.tuples(st.integers(0, c - 1), st.just(c))),
    events=st.lists(
        st.sampled_from([Pair.pick, Pair.pick, Pair.release, Pair.pin, Pair.hear, Pair.replace]),
        max_size=40,
    ),
    seed=st.integers(0, 2**32),
)
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
            clients=count,
            start=engines * index // count if RULES[name].spread else 0,
            inflight=[0] * engines,
            loads=[[0, 0, 0.0] for _ in range(engines)],
        ),
    )
    for event in events:
        event(pair, rng)
        assert list(pair.ours.view.inflight) == pair.plain.inflight
    pair.pick(rng)
    assert pair.ours.ledger.audit() == ()
    pair.ours.release(pair.live)
    assert set(pair.ours.view.inflight) == {0}


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
