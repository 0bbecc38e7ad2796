"""The retry budget by itself: one loss is made good whatever it costs, a storm is not fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpkit.balancer.retries import LEAST, RECENT_S, RetryBudget
from dpkit.messages import EngineId

A, B, C = (EngineId(name) for name in "abc")


def lose(
    budget: RetryBudget, engine: EngineId, now: float, held: int, *, of: int, share: float = 0.2
) -> int:
    """How many of the requests that an engine held are placed again."""
    return sum(budget.take(engine, now, share=share, requests=of) for _ in range(held))


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_one_loss_is_made_good_in_full(share: float) -> None:
    assert lose(RetryBudget(), A, 0.0, 1000, of=1000, share=share) == 1000


def test_engines_that_end_together_are_one_loss() -> None:
    budget = RetryBudget()
    for number, engine in enumerate((A, B, C)):
        assert lose(budget, engine, number * 0.04, 300, of=1000) == 300


def test_a_second_loss_has_what_is_left_of_the_budget() -> None:
    budget = RetryBudget()
    assert lose(budget, A, 0.0, 150, of=1000) == 150
    assert lose(budget, B, 1.0, 400, of=1000) == 400, "150 of 1000 is less than a fifth"
    assert lose(budget, C, 2.0, 400, of=1000) == 0
    assert budget.refused == 400


def test_an_engine_that_is_lost_again_is_another_loss_however_soon() -> None:
    budget = RetryBudget()
    assert lose(budget, A, 0.0, 500, of=1000) == 500
    assert lose(budget, EngineId("a", 1), 0.01, 500, of=1000) == 0


def test_so_many_requests_are_placed_again_in_any_case() -> None:
    budget = RetryBudget()
    placed = [lose(budget, EngineId("a", life), life * 0.5, 1, of=2) for life in range(LEAST + 3)]
    assert placed == [1] * LEAST + [0] * 3


def test_a_loss_is_forgotten_after_a_while() -> None:
    budget = RetryBudget()
    assert lose(budget, A, 0.0, 500, of=1000) == 500
    assert lose(budget, B, RECENT_S - 1.0, 500, of=1000) == 0
    assert lose(budget, A, float(RECENT_S), 500, of=1000) == 500


def test_requests_that_have_ended_count_for_a_while() -> None:
    budget = RetryBudget()
    assert lose(budget, A, 0.0, 100, of=100) == 100
    for _ in range(900):
        budget.ended(1.0)
    assert lose(budget, B, 1.0, 100, of=100) == 100, "100 of 1000 were placed again"
    assert lose(budget, A, 5.0, 10, of=100) == 0
    assert lose(budget, A, 11.0, 10, of=100) == 10, "all is forgotten"


def test_what_is_refused_is_told_once_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    budget = RetryBudget()
    for now, engine in enumerate((A, B, C)):
        lose(budget, engine, float(now), 50, of=100)
    assert [record.getMessage() for record in caplog.records] == [
        f"not all requests of engine {engine} are placed again: of 100 requests in the last 10 s, "
        "50 were already (admission.retry_budget)"
        for engine in (B, C)
    ]


@given(
    share=st.floats(0, 1),
    losses=st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from("abcd"), st.integers(1, 60)), max_size=60
    ),
)
def test_no_storm_goes_beyond_the_budget_and_one_loss(
    share: float, losses: list[tuple[float, str, int]]
) -> None:
    """In any ten seconds: the share, and what all engines held at one moment."""
    under_way, lives, held = 240, dict.fromkeys("abcd", 0), 60
    budget, now, placed = RetryBudget(), 0.0, list[float]()
    for wait, name, count in losses:
        now += wait
        engine, lives[name] = EngineId(name, lives[name]), lives[name] + 1
        placed += [now] * lose(budget, engine, now, count, of=under_way, share=share)
        recent = sum(at > now - (RECENT_S - 1) for at in placed)
        assert recent <= max(LEAST, share * under_way) + len(lives) * held
