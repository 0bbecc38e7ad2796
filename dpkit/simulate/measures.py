"""What is said of a run: percentiles, rates and shares, each defined in one place.

Pure functions of what was metered; the same numbers for table, JSON and report.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from dpkit.simulate.meter import GAP_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpkit.costmodel import StepCost
    from dpkit.simulate.meter import Answer
    from dpkit.simulate.run import Outcome

WARM_UP = 0.05
"""Share of the requests, the first ones, that percentiles leave out: they met an empty pool."""

_DIGITS = 9


@frozen(kw_only=True)
class Objectives:
    """What a request must keep to be good. Times are seconds."""

    ttft_s: float = 1.0
    """Beside three times what the prompt would take alone."""
    alone: float = 3.0
    tpot_s: float = 0.1

    @classmethod
    def usual(cls, cost: StepCost) -> Objectives:
        """A tenth of a second a token, or two where an idle card needs a quarter of that.

        A 32B model on one card: who chose that has chosen slower answers.
        """
        return cls(tpot_s=0.2 if _decode_alone_s(cost) > _SLOW_STEP_S else 0.1)


_SLOW_STEP_S = 0.018


def _decode_alone_s(cost: StepCost) -> float:
    return cost.seconds(decodes=1, prefill_tokens=0, decode_context=0, prefill_context=0.0)


@frozen(kw_only=True)
class Result:
    """One policy's measures, as `--json` has them. Times are seconds, of requests after warm-up."""

    policy: str
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    itl_p99_s: float
    """Between two tokens of one answer; of all requests."""
    tpot_p99_s: float
    """A request's mean time for each token after the first."""
    e2e_p99_s: float
    throughput_rps: float
    """Requests that were answered to their end, over the time from first arrival to last end."""
    goodput: float
    """Share of requests that kept the objectives."""
    preemptions: int
    kv_cv: float
    """Standard deviation of the engines' KV usage over its mean, averaged over the run."""
    queue_while_room: float
    """Share of moments at which a request waited on an engine while another had room at once."""

    def as_json(self) -> dict[str, str | float | int]:
        """The same, rounded where floats would show their last bits."""
        return {
            name: round(value, _DIGITS) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def measure(
    policy: str,
    outcome: Outcome,
    *,
    alone: Callable[[int], float],
    objectives: Objectives,
) -> Result:
    """Make a run's result.

    Args:
        policy: Its name.
        outcome: The run's.
        alone: How long the prefill of so many tokens takes on an idle engine, in seconds.
        objectives: What makes a request good.
    """
    answers = outcome.answers
    counted = answers[int(WARM_UP * len(answers)) :]
    answered = [each for each in counted if each.tokens and not each.failed]
    ttfts = sorted(each.ttft_s for each in answered)
    tpots = sorted(each.tpot_s for each in answered if each.tokens > 1)
    e2es = sorted(each.e2e_s for each in answered)
    whole = sum(1 for each in answers if each.is_whole)
    good = sum(1 for each in answered if is_good(each, alone, objectives))
    return Result(
        policy=policy,
        ttft_p50_s=percentile(ttfts, 0.50),
        ttft_p99_s=percentile(ttfts, 0.99),
        ttft_mean_s=math.fsum(ttfts) / len(ttfts) if ttfts else 0.0,
        itl_p99_s=_gap_percentile(outcome.gaps, 0.99),
        tpot_p99_s=percentile(tpots, 0.99),
        e2e_p99_s=percentile(e2es, 0.99),
        throughput_rps=whole / outcome.duration_s if outcome.duration_s else 0.0,
        goodput=good / len(counted) if counted else 0.0,
        preemptions=outcome.preemptions,
        kv_cv=outcome.watch.kv_cv,
        queue_while_room=outcome.watch.queue_share,
    )


def is_good(answer: Answer, alone: Callable[[int], float], objectives: Objectives) -> bool:
    """Whether a request that was answered kept the objectives."""
    bound = objectives.ttft_s + objectives.alone * alone(answer.prompt_tokens)
    return answer.ttft_s <= bound and answer.tpot_s <= objectives.tpot_s


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that so large a share of `ordered` does not exceed; 0 if there is none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _gap_percentile(gaps: Mapping[int, int], share: float) -> float:
    left = math.ceil(share * sum(gaps.values()))
    for gap in sorted(gaps):
        if (left := left - gaps[gap]) <= 0:
            return gap * GAP_S
    return 0.0


def prefill_alone(cost: StepCost, budget: int) -> Callable[[int], float]:
    """How long a prompt takes on an idle engine without a cache, by its length.

    Args:
        cost: Of the engine's steps.
        budget: Tokens of a step.
    """

    def seconds(prompt_tokens: int) -> float:
        total = 0.0
        for start in range(0, prompt_tokens, budget):
            count = min(budget, prompt_tokens - start)
            total += cost.seconds(
                decodes=0,
                prefill_tokens=count,
                decode_context=0,
                prefill_context=count * (start + count / 2),
            )
        return total

    return seconds
