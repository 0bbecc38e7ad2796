"""Health: hand cases with exact times, and a machine that holds whatever happens."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpkit.balancer.health import Health, HealthStatistics
from dpkit.messages import EngineId


@frozen(kw_only=True)
class Rules:
    """The defaults of the config."""

    eject_after: int = 3
    eject_for: float = 1.0
    eject_max: float = 60.0
    eject_max_share: float = 0.5


def life(name: str, epoch: int = 0) -> EngineId:
    return EngineId(name, epoch=epoch)


def ready(*names: str, **rules: Any) -> Health:
    """Engines that have just become ready for the first time."""
    health = Health(Rules(**rules))
    for name in names:
        health.on_ready(life(name), 0.0)
    return health


def fail_probe(health: Health, epoch: int, now: float, *, name: str = "a") -> None:
    """Return, take the probe, and die of it."""
    engine = life(name, epoch)
    health.on_ready(engine, now)
    assert health.on_placed(engine)
    assert health.on_lost(engine, now)


def test_an_engine_serves_from_its_first_readiness_on_without_a_probe() -> None:
    health = ready("a")
    assert health.may_pick(life("a"), 0.0)
    assert not health.on_placed(life("a"))
    assert health.may_pick(life("a"), 0.0)
    assert not health.may_pick(life("b"), 0.0), "nobody has heard of it"


def test_a_returning_engine_gets_one_request_until_that_delivers() -> None:
    health = ready("a", "b")
    assert health.on_lost(life("a"), 5.0)
    assert not health.may_pick(life("a"), 5.0)
    back = life("a", 1)
    health.on_ready(back, 5.1)
    assert health.may_pick(back, 5.1)
    assert health.on_placed(back)
    assert not health.may_pick(back, 5.1)
    assert not health.on_placed(back), "one probe at a time"
    assert health.on_success(back)
    assert health.may_pick(back, 5.2)
    assert not health.on_placed(back)
    assert health.statistics(5.2).probes == 1


def test_a_probe_that_its_client_leaves_decides_nothing() -> None:
    health = ready("a", "b")
    health.on_lost(life("a"), 0.0)
    health.on_ready(life("a", 1), 0.1)
    assert not health.on_inconclusive(life("a", 1)), "there was none"
    health.on_placed(life("a", 1))
    assert health.on_inconclusive(life("a", 1))
    assert health.may_pick(life("a", 1), 0.1)
    assert health.on_placed(life("a", 1)), "the next request is the probe"
    assert not health.on_inconclusive(life("b"))


def test_three_losses_in_a_row_eject_and_each_further_one_for_a_second_more() -> None:
    health = ready("a", "b")
    health.on_lost(life("a"), 10.0)
    fail_probe(health, 1, 10.1)
    assert health.next_change(10.1) is None
    fail_probe(health, 2, 10.3)
    assert health.ejected_until("a", 10.3) == 11.3
    health.on_ready(life("a", 3), 10.7)
    assert not health.may_pick(life("a", 3), 11.2)
    assert health.next_change(10.7) == 11.3
    assert health.may_pick(life("a", 3), 11.3)
    assert [health.ejected_until(name, 11.3) for name in ("a", "b", "c")] == [None, None, None]
    assert health.next_change(11.3) is None
    assert health.on_placed(life("a", 3)), "it is on probation"
    health.on_lost(life("a", 3), 11.5)
    health.on_ready(life("a", 4), 12.0)
    assert health.next_change(12.0) == 13.5
    assert health.statistics(12.0) == HealthStatistics(
        serving=1, on_probation=0, ejected=1, ejections=2, spared=0, probes=3
    )


def test_no_ejection_is_longer_than_the_cap() -> None:
    health = ready("a", "b", eject_after=1, eject_for=20.0)
    now = 0.0
    health.on_lost(life("a"), now)
    spells = []
    for epoch in range(1, 6):
        health.on_ready(life("a", epoch), now)
        until = health.next_change(now)
        assert until is not None
        spells.append(until - now)
        now = until
        health.on_lost(life("a", epoch), now)
    assert spells == [20.0, 40.0, 60.0, 60.0, 60.0]


def test_time_without_ejection_forgives() -> None:
    def next_spell(after: float) -> float:
        health = ready("a", "b", eject_after=1, eject_for=1.0, eject_max=10.0)
        health.on_lost(life("a"), 0.0)  # until 1
        health.on_ready(life("a", 1), 1.0)
        health.on_lost(life("a", 1), 1.0)  # until 3
        health.on_ready(life("a", 2), 3.0)
        health.on_success(life("a", 2))
        now = 3.0 + after
        health.on_lost(life("a", 2), now)
        health.on_ready(life("a", 3), now)
        until = health.next_change(now)
        assert until is not None
        return until - now

    assert [next_spell(after) for after in (0.0, 9.5, 10.0, 20.0, 1e6)] == [3.0, 3.0, 2.0, 1.0, 1.0]


def test_a_first_token_ends_the_row() -> None:
    health = ready("a", "b")
    for epoch in range(9):
        health.on_ready(life("a", epoch), float(epoch))
        health.on_success(life("a", epoch))
        health.on_lost(life("a", epoch), float(epoch))
    assert health.statistics(9.0).ejections == 0


def test_never_more_than_the_share_is_ejected() -> None:
    health = ready("a", "b", "c", "d", eject_after=1)
    for name in ("a", "b", "c"):
        health.on_lost(life(name), 0.0)
        health.on_ready(life(name, 1), 0.0)
    assert [health.may_pick(life(name, 1), 0.5) for name in ("a", "b", "c")] == [False, False, True]
    statistics = health.statistics(0.5)
    assert (statistics.ejected, statistics.ejections, statistics.spared) == (2, 2, 1)
    assert (statistics.serving, statistics.on_probation) == (1, 1), "d, and c that was spared"
    alone = ready("a", eject_after=1)
    alone.on_lost(life("a"), 0.0)
    alone.on_ready(life("a", 1), 0.0)
    assert alone.may_pick(life("a", 1), 0.0), "the only one is better than none"


def test_failures_of_an_engine_that_lives_on_eject_it_too() -> None:
    health = ready("a", "b")
    assert [health.on_failure(life("a"), now) for now in (1.0, 2.0)] == [True, True]
    assert health.may_pick(life("a"), 2.0)
    health.on_failure(life("a"), 3.0)
    assert not health.may_pick(life("a"), 3.9)
    health.on_failure(life("a"), 3.9)
    assert health.next_change(3.9) == 4.0, "what it had begun before does not prolong it"
    assert health.on_placed(life("a"))
    health.on_failure(life("a"), 4.0)
    assert health.next_change(4.0) == 6.0


def test_words_of_an_earlier_life_or_of_a_stranger_count_for_nothing() -> None:
    health = ready("a")
    health.on_lost(life("a"), 0.0)
    health.on_ready(life("a", 1), 1.0)
    for engine in (life("a"), life("b")):
        assert not health.on_success(engine)
        assert not health.on_placed(engine)
        assert not health.on_lost(engine, 1.0)
        assert not health.on_failure(engine, 1.0)
        assert not health.on_left(engine)
        assert not health.may_pick(engine, 1.0)
    assert health.on_placed(life("a", 1)), "still on probation"


def test_an_engine_that_left_as_asked_comes_back_without_a_stain() -> None:
    health = ready("a", "b")
    health.on_failure(life("a"), 0.0)
    assert health.on_left(life("a"))
    assert repr(health) == "<Health: 1 of 1 engines alive>"
    health.on_ready(life("a", 1), 1.0)
    assert not health.on_placed(life("a", 1)), "no probe"
    health.on_lost(life("b"), 1.0)
    health.forget("b")
    health.forget("b")
    assert repr(health) == "<Health: 1 of 1 engines alive>"


NAMES = ("a", "b", "c", "d")
ENGINES = st.sampled_from(NAMES)


class HealthMachine(RuleBasedStateMachine):
    """Whatever happens: the share holds, a probe is alone, and nobody is left out for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = evolve(Rules(), eject_after=2, eject_max=4.0)
        self.health = Health(self.limits)
        self.now = 0.0
        self.epochs = dict.fromkeys(NAMES, 0)
        self.alive: set[str] = set()
        self.unproven: set[str] = set()  # lost, and no first token since
        self.probes: dict[str, int] = dict.fromkeys(NAMES, 0)

    def engine(self, name: str) -> EngineId:
        return life(name, self.epochs[name])

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=ENGINES)
    def become_ready(self, name: str) -> None:
        if name not in self.alive:
            self.epochs[name] += 1
            self.alive.add(name)
            self.probes[name] = 0
            self.health.on_ready(self.engine(name), self.now)

    @rule(name=ENGINES)
    def lose(self, name: str) -> None:
        assert self.health.on_lost(self.engine(name), self.now) == (name in self.alive)
        if name in self.alive:
            self.alive.remove(name)
            self.unproven.add(name)

    @rule(name=ENGINES)
    def place(self, name: str) -> None:
        if self.health.may_pick(self.engine(name), self.now):
            assert self.probes[name] == 0, "a probe is alone"
            if self.health.on_placed(self.engine(name)):
                assert name in self.unproven
                self.probes[name] = 1
                assert not self.health.may_pick(self.engine(name), self.now)
            else:
                assert name not in self.unproven

    @rule(name=ENGINES, delivers=st.booleans())
    def end_probe(self, name: str, *, delivers: bool) -> None:
        if name in self.alive and self.probes[name]:
            self.probes[name] = 0
            if delivers:
                self.unproven.discard(name)
                assert self.health.on_success(self.engine(name))
            else:
                assert self.health.on_inconclusive(self.engine(name))

    @invariant()
    def the_share_holds(self) -> None:
        statistics = self.health.statistics(self.now)
        known = len(self.health._records)
        assert statistics.ejected <= known * self.limits.eject_max_share
        assert statistics.serving + statistics.on_probation <= len(self.alive)

    @invariant()
    def whoever_is_alive_may_be_picked_in_the_end(self) -> None:
        later = self.now
        for _ in NAMES:
            change = self.health.next_change(later)
            if change is None:
                break
            assert later < change <= self.now + self.limits.eject_max
            later = change
        for name in self.alive:
            assert self.health.may_pick(self.engine(name), later) == (self.probes[name] == 0)
        for name in set(NAMES) - self.alive:
            assert not self.health.may_pick(self.engine(name), later)


TestHealth = HealthMachine.TestCase
TestHealth.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
