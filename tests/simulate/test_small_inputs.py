"""Small inputs whose outcome can be counted: what counting requests gets wrong, and what is right.

Each of them shows one fault of `kv_pressure`; `docs/simulate.md` says which policy mends it.
"""

from __future__ import annotations

from attrs import evolve

from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.balancer.ttft import Weights
from dpkit.config.load import parse_config
from dpkit.simulate.run import Outcome, run
from dpkit.simulate.settings import simulated, text_for
from dpkit.simulate.study import with_policy
from tests.simulate.lab import workload_of


def _run(name: str, policy: str) -> Outcome:
    return run(with_policy(workload_of(name), policy))


def test_micro_long_short_prompts_wait_for_the_long_one_if_requests_are_counted() -> None:
    late = [a.number for a in _run("micro-long", "kv_pressure").answers[1:] if a.ttft_s > 0.5]
    assert len(late) >= 5


def test_micro_long_no_short_prompt_waits_if_tokens_are_counted() -> None:
    late = [a.number for a in _run("micro-long", "least_tokens").answers[1:] if a.ttft_s > 0.5]
    assert not late


def test_micro_long_no_short_prompt_waits_for_the_least_expected_ttft() -> None:
    late = [a.number for a in _run("micro-long", "expected_ttft").answers[1:] if a.ttft_s > 0.5]
    assert not late


def test_micro_alias_long_prompts_do_not_pile_up_for_the_least_expected_ttft() -> None:
    by_counts, by_ttft = (_run("micro-alias", p) for p in ("kv_pressure", "expected_ttft"))
    waited = [sum(a.ttft_s for a in outcome.answers) for outcome in (by_counts, by_ttft)]
    assert waited[1] < 0.85 * waited[0]


def test_micro_alias_every_request_is_answered_and_tokens_are_spread_better() -> None:
    by_counts, by_tokens = (_run("micro-alias", p) for p in ("kv_pressure", "least_tokens"))
    assert all(answer.is_whole for answer in by_counts.answers + by_tokens.answers)
    assert by_tokens.watch.kv_cv < by_counts.watch.kv_cv


def test_micro_kv_engines_that_are_short_of_memory_preempt_and_finish_all_the_same() -> None:
    outcome = _run("micro-kv", "kv_pressure")
    assert outcome.preemptions > 0
    assert all(answer.is_whole for answer in outcome.answers)
    assert outcome.watch.queue_share > 0.0


def test_micro_kv_short_prompts_pass_long_answers_that_wait_for_memory() -> None:
    outcome = _run("micro-kv", "expected_ttft")
    assert not [a.number for a in outcome.answers[12:] if a.ttft_s > 1.0]
    assert all(answer.is_whole for answer in outcome.answers)


class Heedless(ExpectedTtft):
    """Long prompts go anywhere."""

    def __init__(self) -> None:
        super().__init__(weights=Weights(stalling=0.0))


def test_bimodal_long_prompts_do_not_stall_answers_that_have_just_begun() -> None:
    workload = workload_of("bimodal", rows=250)
    config = simulated(parse_config(text_for("bimodal") + "kv.prefix_cache = false"))
    scenario = evolve(workload, config=config, trace=workload.trace.scaled(0.03))
    stalled = [
        sum(answer.tpot_s > 0.03 for answer in run(with_policy(scenario, policy)).answers)
        for policy in (f"{__name__}:Heedless", "expected_ttft")
    ]
    assert stalled[1] < stalled[0] / 2
