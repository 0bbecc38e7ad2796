"""The score and the credit against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dpkit.balancer.stepcosts import Costs
from dpkit.balancer.ttft import (
    Rate,
    Standing,
    Weights,
    has_credit,
    is_open,
    prefill_work,
    rate,
    scores,
)
from dpkit.messages import Room

# In milliseconds 5 a step, 0.02 a prompt token, 0.01 a decode, and, a million tokens, 40 of context
# and 1 of attention.
COSTS = Costs(step=5e-3, prefill=2e-5, decode=1e-5, context=4e-8, attention=1e-9)
ROOM = Room(tokens_per_step=8000, requests=4, kv_tokens=100_000)
LENGTH = 100.0


def standing(**told: Any) -> Standing:
    return Standing(**({"room": ROOM} | told))


def rated(**told: Any) -> Rate:
    return rate(standing(**told), COSTS, Weights(), LENGTH, reserve=0.5)


def score(made: Rate, prompt: int, hit: int = 0, shared: int = 0) -> float:
    work = (1 + Weights().spread) * prefill_work(COSTS, prompt, hit)
    [found] = scores([made], prompt, prompt - hit, work, shared)
    return found


def credit(prompt: int, **told: Any) -> bool:
    engine = standing(**told)
    return has_credit(engine, Weights(), prompt, rated(**told).free - prompt)


def opened(**told: Any) -> bool:
    return is_open(standing(**told), rated(**told).free, Weights())


def test_on_an_idle_engine_the_score_is_one_step_and_the_prompt_three_times() -> None:
    # 1,000 tokens of 20 us and 500,000 pairs of 1 ns, weighed by 1 + kappa = 3; one step: 5 ms.
    assert score(rated(), 1000) == pytest.approx(5e-3 + 3 * (20e-3 + 0.5e-3))


def test_what_is_cached_costs_nothing_and_what_is_not_attends_to_it() -> None:
    # 200 tokens are left: 4 ms, and (1000^2 - 800^2) / 2 = 180,000 pairs: 0.18 ms.
    assert score(rated(), 1000, hit=800) == pytest.approx(5e-3 + 3 * (4e-3 + 0.18e-3))


def test_what_is_before_it_counts_in_tokens_and_in_steps() -> None:
    # U = 7,500: 150 ms before it, and U + new = 8,500 tokens take two steps of 8,000.
    assert score(rated(prefill=7500), 1000) == pytest.approx(0.15 + 2 * 5e-3 + 3 * 20.5e-3)


def test_load_slows_each_step_and_a_tenth_of_it_each_token_of_the_answer() -> None:
    # c*n + d*K = 3 * 10 us + 50,000 * 40 ns = 2.03 ms; sigma * L = 10.
    load = 3e-5 + 2e-3
    made = rated(requests=3, context=50_000)
    assert score(made, 1000) == pytest.approx(5e-3 + load + 3 * 20.5e-3 + 10 * load)


def test_kv_that_is_wanting_takes_lives_of_requests_to_come_free() -> None:
    # free = 99,000 - 80,000 - 0.5 * (20,000 + 100) = 8,950. A prompt of 13,950 with nothing shared
    # wants 5 % of the cache more than that, for 5 % of L * step = 100 * 5 ms.
    made = rated(kv_tokens=80_000, growth=20_000)
    work = 3 * (13_950 * 2e-5 + 13_950**2 / 2 * 1e-9)
    assert score(made, 13_950) == pytest.approx(2 * 5e-3 + work + 0.05 * 0.5)
    # What running requests hold of it needs no room.
    assert score(made, 13_950, shared=5000) == pytest.approx(2 * 5e-3 + work)


def test_a_card_of_half_the_speed_takes_twice_as_long() -> None:
    slow = rated(slowness=2.0, prefill=7500, requests=3, context=50_000, kv_tokens=99_000)
    fast = rated(prefill=7500, requests=3, context=50_000, kv_tokens=99_000)
    assert score(slow, 3000, hit=1000) == pytest.approx(2 * score(fast, 3000, hit=1000))


def test_an_idle_engine_takes_whatever_comes() -> None:
    assert credit(90_000, kv_tokens=99_999)


@pytest.mark.parametrize(
    ("told", "prompt", "expected"),
    [
        # requests: 4 at most
        ({"requests": 3}, 100, True),
        ({"requests": 4}, 100, False),
        # half a step's worth, W * B = 4,000, beyond the step under way
        ({"requests": 1, "prefill": 3000}, 1000, True),
        ({"requests": 1, "prefill": 3000}, 1001, False),
        # a prompt longer than a step only where nothing is before it
        ({"requests": 1}, 20_000, True),
        ({"requests": 1, "prefill": 1}, 20_000, False),
        # KV: half of one answer's 100 tokens is kept free, and half of the growth of others
        ({"requests": 1, "kv_tokens": 80_000}, 18_950, True),
        ({"requests": 1, "kv_tokens": 80_000}, 18_951, False),
        ({"requests": 1, "kv_tokens": 80_000, "growth": 10_000}, 13_951, False),
    ],
)
def test_credit_is_room_in_the_very_next_step(
    told: dict[str, float], prompt: int, expected: bool
) -> None:
    assert credit(prompt, **told) is expected


def test_an_engine_is_open_as_long_as_it_may_have_credit_for_somebody() -> None:
    assert opened()
    assert opened(requests=3, prefill=3999)
    assert not opened(requests=3, prefill=4000)
    assert not opened(requests=4)
    assert not opened(requests=1, kv_tokens=98_950)
