"""Deadlines against a plain dict, and how much they keep."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpkit.balancer.deadlines import SLACK, Deadlines

IDS = st.sampled_from([f"r{number}" for number in range(8)])
MOMENTS = st.integers(0, 20).map(float)


class DeadlinesMachine(RuleBasedStateMachine):
    """A dict is the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines = Deadlines()
        self.plain: dict[str, float] = {}

    @rule(moment=MOMENTS, request_id=IDS)
    def add(self, moment: float, request_id: str) -> None:
        self.deadlines.add(moment, request_id)
        self.plain[request_id] = moment

    @rule(request_id=IDS)
    def discard(self, request_id: str) -> None:
        self.deadlines.discard(request_id)
        self.plain.pop(request_id, None)

    @rule(now=MOMENTS)
    def expire(self, now: float) -> None:
        over = self.deadlines.expired(now)
        expected = [request_id for request_id, moment in self.plain.items() if moment <= now]
        assert sorted(over) == sorted(expected)
        moments = [self.plain.pop(request_id) for request_id in over]
        assert moments == sorted(moments)

    @invariant()
    def the_earliest_is_at_hand(self) -> None:
        assert self.deadlines.next() == min(self.plain.values(), default=None)
        assert len(self.deadlines) == len(self.plain)


TestDeadlines = DeadlinesMachine.TestCase
TestDeadlines.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_moment_has_come_when_it_is_reached() -> None:
    deadlines = Deadlines()
    deadlines.add(2.0, "b")
    deadlines.add(1.0, "a")
    assert repr(deadlines) == "<Deadlines: 2, the next at 1.0>"
    assert deadlines.expired(0.999) == []
    assert deadlines.expired(2.0) == ["a", "b"]
    assert deadlines.expired(2.0) == []


def test_a_second_moment_replaces_the_first() -> None:
    deadlines = Deadlines()
    for moment in (5.0, 1.0, 5.0, 5.0):
        deadlines.add(moment, "r")
    assert deadlines.expired(4.0) == []
    assert deadlines.expired(5.0) == ["r"]


def test_requests_that_end_early_leave_no_memory_behind() -> None:
    deadlines = Deadlines()
    deadlines.add(1e6, "stays")
    for number in range(10_000):
        deadlines.add(3600.0 + number, f"r{number}")
        deadlines.discard(f"r{number}")
    assert len(deadlines._heap) <= 2 + SLACK
    assert deadlines.next() == 1e6
