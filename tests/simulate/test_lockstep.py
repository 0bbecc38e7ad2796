"""Engines that step together: prompts that begin together hold up fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.balancer.policies.expected_ttft import ExpectedTtft
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


def _run(policy: str) -> Outcome:
    """Four ranks write forty answers; meanwhile a long prompt comes every 40 ms."""
    answers = [(0.0, 10, 400)] * 40
    prompts = [(1.0 + 0.04 * number, 6_000, 2) for number in range(100)]
    scenario = scenario_of(*answers, *prompts, engines=4, preset="h200-30b-a3b", text=TOGETHER)
    return run(with_policy(scenario, policy))


def test_prompts_that_begin_together_leave_more_steps_to_the_answers() -> None:
    alone, together = _run(f"{__name__}:Alone"), _run("expected_ttft")
    assert all(answer.is_whole for answer in together.answers)
    written = [max(a.last_s for a in outcome.answers[:40]) for outcome in (alone, together)]
    assert written[1] < 0.85 * written[0]
    waits = [max(a.ttft_s for a in outcome.answers[40:]) for outcome in (alone, together)]
    assert waits[1] < 2 * waits[0]
