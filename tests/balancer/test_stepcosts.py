"""Step costs are learned from steps, within bounds, and paces beside them."""

from __future__ import annotations

import random

import pytest

from dpkit.balancer.stepcosts import BOUND, EVERY, PRIOR, Costs, Pace, StepCosts, seconds
from dpkit.messages import StepWork


def steps(count: int, seed: int = 0) -> list[StepWork]:
    rng = random.Random(seed)
    return [
        StepWork(
            decodes=(decodes := rng.randrange(1, 200)),
            prefill_tokens=(tokens := rng.choice([0, 0, rng.randrange(8000)])),
            decode_context=decodes * rng.randrange(100, 4000),
            prefill_context=float(tokens * rng.randrange(50_000)),
        )
        for _ in range(count)
    ]


def teach(costs: StepCosts, true: Costs, works: list[StepWork], *, times: float = 1.0) -> Pace:
    pace = Pace()
    for work in works:
        costs.learn(work, times * seconds(work, true), pace)
    return pace


def test_a_steps_cost_is_the_plain_sum() -> None:
    work = StepWork(decodes=10, prefill_tokens=100, decode_context=5000, prefill_context=2e6)
    costs = Costs(step=1.0, prefill=0.1, decode=0.01, context=1e-3, attention=1e-6)
    assert seconds(work, costs) == pytest.approx(1.0 + 10.0 + 0.1 + 5.0 + 2.0)


def test_ratios_of_the_constants_are_learned_from_steps_of_all_kinds() -> None:
    factors = (1.0, 1.4, 0.8, 1.2, 0.7)
    true = Costs(*(factor * cost for factor, cost in zip(factors, PRIOR, strict=True)))
    learned = StepCosts()
    pace = teach(learned, true, steps(4000))
    for work in steps(50, seed=1):
        assert pace.slowness * seconds(work, learned.costs) == pytest.approx(
            seconds(work, true), rel=0.03
        )


def test_a_slow_card_is_a_pace_and_teaches_no_constants() -> None:
    learned = StepCosts()
    pace = teach(learned, PRIOR, steps(20 * EVERY), times=50.0)
    assert pace.slowness == pytest.approx(50.0)
    assert tuple(learned.costs) == pytest.approx(tuple(PRIOR), rel=1e-6)


def test_equal_steps_teach_nothing_absurd() -> None:
    learned = StepCosts()
    work = StepWork(decodes=64, prefill_tokens=0, decode_context=64_000)
    pace = Pace()
    for _ in range(50 * EVERY):
        learned.learn(work, 0.02, pace)
    assert pace.slowness * seconds(work, learned.costs) == pytest.approx(0.02, rel=0.01)
    for cost, prior in zip(learned.costs, PRIOR, strict=True):
        assert prior / BOUND <= cost <= prior * BOUND
    assert learned.costs.prefill == PRIOR.prefill  # no step had any


def test_each_engine_has_its_own_pace() -> None:
    learned, slow, fast = StepCosts(), Pace(), Pace()
    for work in steps(10 * EVERY):
        learned.learn(work, 2 * seconds(work, PRIOR), slow)
        learned.learn(work, seconds(work, PRIOR), fast)
    assert slow.slowness / fast.slowness == pytest.approx(2.0, rel=0.02)


def test_before_the_first_step_a_pace_is_one() -> None:
    assert Pace().slowness == 1.0


def test_a_step_without_a_time_says_nothing() -> None:
    learned, pace = StepCosts(), Pace()
    learned.learn(StepWork(decodes=1), 0.0, pace)
    assert pace.slowness == 1.0
    assert repr(learned).startswith("<StepCosts after 0 steps: step 1.00x, prefill 1.00x")
