"""Engines that step together: prompts that begin together hold up fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.simulate.faults import parse_faults
from dpkit.simulate.run import Outcome, run
from dpkit.simulate.study import with_policy
from tests.simulate.lab import scenario_of

if TYPE_CHECKING:
    from dpkit.abc import LoadView, Pass

TOGETHER = "[coordinator]\nwave_coordination = true\n"


class Alone(ExpectedTtft):
    """Each prompt begins as soon as it can."""

    def open_pass(self, view: LoadView) -> Pass:
        view.steps_together = False
        return super().open_pass(view)


def _run(policy: str, *, clients: int = 1, fault: str = "") -> Outcome:
    """Four ranks write forty answers; meanwhile a long prompt comes every 40 ms."""
    answers = [(0.0, 10, 400)] * 40
    prompts = [(1.0 + 0.04 * number, 6_000, 2) for number in range(100)]
    scenario = scenario_of(*answers, *prompts, engines=4, preset="h200-30b-a3b", text=TOGETHER)
    faults = parse_faults([fault] if fault else [], span_s=scenario.trace.span_s, engines=4)
    return run(evolve(with_policy(scenario, policy), clients=clients, faults=faults))


@pytest.mark.parametrize(
    ("clients", "fault"), [(1, ""), (4, ""), (4, "kill:coordinator@0.5s-0.9s")]
)
def test_prompts_that_begin_together_leave_more_steps_to_the_answers(
    clients: int, fault: str
) -> None:
    alone = _run(f"{__name__}:Alone", clients=clients, fault=fault)
    together = _run("expected_ttft", clients=clients, fault=fault)
    assert all(answer.is_whole for answer in together.answers)
    written = [max(a.last_s for a in outcome.answers[:40]) for outcome in (alone, together)]
    assert written[1] < 0.85 * written[0]
    waits = [max(a.ttft_s for a in outcome.answers[40:]) for outcome in (alone, together)]
    assert waits[1] < 2 * waits[0]
