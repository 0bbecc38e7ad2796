"""Step costs are learned from steps, within bounds, and paces beside them."""

from __future__ import annotations

import math
import random

import pytest

from dpkit.balancer.stepcosts import (
    BOUND,
    EVERY,
    PRIOR,
    TRUSTED,
    Costs,
    Pace,
    StepCosts,
    is_believable,
    make_paces,
    relative_slowness,
    seconds,
    usual_paces,
)
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


def teach(costs: StepCosts, true: Costs, works: list[StepWork], *, times: float = 1.0) -> None:
    for work in works:
        costs.learn(work, times * seconds(work, true))


def test_a_steps_cost_is_the_plain_sum() -> None:
    work = StepWork(decodes=10, prefill_tokens=100, decode_context=5000, prefill_context=2e6)
    costs = Costs(step=1.0, prefill=0.1, decode=0.01, context=1e-3, attention=1e-6)
    assert seconds(work, costs) == pytest.approx(1.0 + 10.0 + 0.1 + 5.0 + 2.0)


def test_ratios_of_the_constants_are_learned_from_steps_of_all_kinds() -> None:
    factors = (1.0, 1.4, 0.8, 1.2, 0.7)
    true = Costs(*(factor * cost for factor, cost in zip(factors, PRIOR, strict=True)))
    learned = StepCosts()
    teach(learned, true, steps(4000))
    for work in steps(50, seed=1):
        assert seconds(work, learned.costs) == pytest.approx(seconds(work, true), rel=0.03)


def test_another_card_is_all_constants_times_as_long() -> None:
    learned = StepCosts()
    teach(learned, PRIOR, steps(20 * EVERY), times=50.0)
    assert tuple(learned.costs) == pytest.approx([50 * cost for cost in PRIOR], rel=1e-6)


def test_the_first_step_says_how_fast_the_card_is() -> None:
    learned = StepCosts()
    teach(learned, PRIOR, steps(1), times=7.0)
    assert tuple(learned.costs) == pytest.approx([7 * cost for cost in PRIOR])


def test_a_slow_engine_teaches_what_a_usual_one_would() -> None:
    learned = StepCosts()
    for work in steps(10 * EVERY):
        learned.learn(work, 3 * seconds(work, PRIOR), slowness=3.0)
    assert tuple(learned.costs) == pytest.approx(tuple(PRIOR), rel=1e-6)


def test_equal_steps_teach_nothing_absurd() -> None:
    learned = StepCosts()
    work = StepWork(decodes=64, prefill_tokens=0, decode_context=64_000)
    for _ in range(50 * EVERY):
        learned.learn(work, 0.02)
    assert seconds(work, learned.costs) == pytest.approx(0.02, rel=0.01)
    scale = 0.02 / seconds(work, PRIOR)
    for cost, prior in zip(learned.costs, PRIOR, strict=True):
        assert 1 / BOUND <= cost / (scale * prior) <= BOUND
    assert learned.costs.prefill == pytest.approx(scale * PRIOR.prefill)  # no step had any


def test_a_pace_is_what_steps_took_of_what_they_were_reckoned_to() -> None:
    pace = Pace()
    for _ in range(TRUSTED):
        assert pace.slowness is None
        pace.add(2.0, 1.0)
    assert pace.slowness == pytest.approx(2.0)
    for _ in range(600):
        pace.add(1.0, 1.0)
    assert pace.slowness == pytest.approx(1.0, abs=0.01)


def paces(decode: float | None, prefill: float | None) -> tuple[Pace, Pace]:
    made = make_paces()
    for pace, lasted in zip(made, (decode, prefill), strict=True):
        for _ in range(0 if lasted is None else TRUSTED):
            pace.add(lasted or 0.0, 1.0)
    return made


def test_engines_are_compared_by_steps_of_the_same_kind() -> None:
    engines = [paces(5.0, 1.0), paces(5.0, 1.0), paces(5.0, None), paces(15.0, 3.0)]
    usual = usual_paces(engines)
    assert usual == pytest.approx([5.0, 1.0])
    slowness = [relative_slowness(each, usual) for each in engines]
    assert slowness == pytest.approx([1.0, 1.0, 1.0, 3.0])


def test_who_differs_by_less_than_half_counts_as_equal() -> None:
    usual = [1.0, 1.0]
    assert relative_slowness(paces(1.45, 1.45), usual) == 1.0
    assert relative_slowness(paces(1.55, 1.55), usual) == pytest.approx(1.55)
    assert relative_slowness(paces(0.6, 0.6), usual) == pytest.approx(0.6)


def test_of_whom_nothing_is_known_nothing_is_said() -> None:
    assert usual_paces([]) == [None, None]
    assert relative_slowness(make_paces(), [None, None]) == 1.0
    assert relative_slowness(make_paces(), [2.0, 2.0]) == 1.0


NO_STEPS = [
    (StepWork(decodes=1), 0.0),
    (StepWork(decodes=1), math.inf),
    (StepWork(decodes=1), 1e308),
    (StepWork(decodes=1), 1e-320),
    (StepWork(decodes=2**64 - 1), 0.01),
    (StepWork(decodes=1, prefill_context=math.inf), 0.01),
    (StepWork(decodes=1, prefill_context=math.inf), math.inf),
]
"""What no step can be, though an engine may say so."""


@pytest.mark.parametrize(("work", "lasted"), NO_STEPS)
def test_what_no_step_can_be_teaches_nothing(work: StepWork, lasted: float) -> None:
    learned, taught = StepCosts(), StepCosts()
    for each in steps(2 * EVERY):
        took = seconds(each, PRIOR)
        learned.learn(each, took)
        taught.learn(each, took)
        taught.learn(work, lasted)
    assert taught.costs == learned.costs


def test_a_toys_steps_are_believed_and_those_of_a_model_on_a_disk() -> None:
    long_prompt = StepWork(prefill_tokens=8192, prefill_context=8192 * 1e5)
    assert is_believable(long_prompt, 20e-6)
    assert is_believable(StepWork(decodes=1), 60.0)


def test_a_step_without_a_time_says_nothing() -> None:
    learned = StepCosts()
    learned.learn(StepWork(decodes=1), 0.0)
    assert repr(learned).startswith("<StepCosts after 0 steps: step 1.00x, prefill 1.00x")
