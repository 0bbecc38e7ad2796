"""From a table of measured steps to the constants of `StepCost`.

Least squares of relative errors, no constant below zero, in the form of the cost model itself,
branch by branch. Pure functions of numbers: knows nothing of files, logs or engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from dpkit.costmodel import StepCost
from dpkit.simulate.identifiable import untold
from dpkit.simulate.squares import non_negative

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Sides = tuple[bool, ...]

_ROUNDS = 30
"""Reassignments of steps to branches; they settle in a few."""

_LEAST_PREFILL = 256
"""Tokens from which on a step without decodes is bound by arithmetic on every card measured."""

_CUTS = 12
"""Numbers of tokens from which on steps are tried as bound by arithmetic."""

_SAMPLE = 400
"""Steps that tell which of these is best; a table may have a row for each step of an hour."""


@frozen(kw_only=True)
class Step:
    """One measured step."""

    prefill_tokens: int
    prefill_context: float
    """Tokens that were cached already for the prompt that is computed."""
    decodes: int
    kv_tokens: float
    """Sum of the decodes' contexts."""
    seconds: float

    @property
    def attended(self) -> float:
        """Sum over the prefill tokens of the tokens each attends to."""
        return self.prefill_tokens * (self.prefill_context + self.prefill_tokens / 2)


@frozen(kw_only=True)
class Fit:
    """Constants, and how far they are from what was measured."""

    cost: StepCost
    points: int
    mean_error: float
    """Mean of the relative errors."""
    p95_error: float
    of: str
    """What the errors are of, in words: how many of what was measured."""
    untold: tuple[str, ...] = ()
    """Constants that nothing in the measurements tells, as of decodes where there are none."""


def predicted(cost: StepCost, step: Step) -> float:
    """Seconds that a step should have taken."""
    return cost.seconds(
        decodes=step.decodes,
        prefill_tokens=step.prefill_tokens,
        decode_context=round(step.kv_tokens),
        prefill_context=step.attended,
    )


def fit_steps(
    steps: Sequence[Step], *, experts: tuple[int, int] = (1, 1), host_ms: float = 0.0
) -> Fit:
    """Fit a table of steps.

    Decodes alone and long prefills alone say nearly all there is to say; from there on, steps are
    assigned to the branch that their present constants say they are of, and all constants are
    fitted anew, until nothing changes. The best of these is kept. Where the table has too few
    steps of one kind, as that of a busy server without a prefill alone, that start leads astray, so
    others are tried: since the branch of a step depends on its number of tokens alone, each of
    them takes the steps above some number for bound by arithmetic. Of the two results, that of the
    least error is taken: mean and 95th percentile together, which is what is told of it.

    Args:
        steps: At least one.
        experts: Of a mixture of experts, how many a token uses, of how many.
        host_ms: What the serving loop adds to each step: no part of a table of kernels.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("there are no steps to fit; measure some")
    fits = []
    for start in (_by_kind, _by_cuts):
        cost = _settled(steps, start(steps, experts), set())
        fits.append(fit_of(cost, _errors(cost, steps), untold=(), of=f"{len(steps)} points"))
    best = min(fits, key=lambda fit: fit.mean_error + fit.p95_error)
    sides = _sides(steps, best.cost)
    cost = evolve(best.cost, host_ms=host_ms)
    if experts[1] == 1 and all(sides):  # a is anything up to a2, whose time nobody sees it take
        cost = evolve(cost, a_ms=cost.a2_ms)
    return evolve(best, cost=cost, untold=_untold(steps, experts, sides))


def _untold(steps: Sequence[Step], experts: tuple[int, int], sides: Sides) -> tuple[str, ...]:
    """Constants that a table cannot tell, by the plain sum of the model's terms."""
    columns: dict[str, Sequence[float]] = {
        "a_ms": [1.0] * len(steps),
        "b_us": [step.prefill_tokens for step in steps],
        "c_us": [step.decodes for step in steps],
        "d_ns": [step.kv_tokens for step in steps],
        "q_ns": [step.attended for step in steps],
    }
    if experts[1] > 1:
        columns["e_ms"] = [_touched(experts, s.decodes + s.prefill_tokens) for s in steps]
    found = set(untold(columns))
    if all(step.prefill_tokens for step in steps):  # the weights are told by decodes alone
        found |= {"a_ms", "e_ms"}
    if not any(sides):  # so short that the weights took longer than all arithmetic
        found.add("b_us")
    return tuple(name for name in columns if name in found)


def fit_of(cost: StepCost, errors: Iterable[float], *, untold: tuple[str, ...], of: str) -> Fit:
    """Constants with what their errors come to.

    Args:
        cost: The constants.
        errors: Relative, at least one.
        untold: Constants that nothing tells.
        of: What they are of, in words.
    """
    errors = sorted(errors)
    return Fit(
        cost=cost,
        points=len(errors),
        mean_error=sum(errors) / len(errors),
        p95_error=errors[int(0.95 * (len(errors) - 1))],
        of=of,
        untold=untold,
    )


def _errors(cost: StepCost, steps: Sequence[Step]) -> Iterator[float]:
    return (abs(predicted(cost, step) / step.seconds - 1) for step in steps)


def _mean_error(cost: StepCost, steps: Sequence[Step]) -> float:
    return sum(_errors(cost, steps)) / len(steps)


def _touched(experts: tuple[int, int], tokens: float) -> float:
    chosen, total = experts
    share: float = (1.0 - chosen / total) ** tokens
    return 1.0 - share


def _by_kind(steps: Sequence[Step], experts: tuple[int, int]) -> StepCost:
    """Constants from the steps that are of one kind only."""
    has_experts = experts[1] > 1
    decodes = [step for step in steps if not step.prefill_tokens and step.decodes]
    prefills = [step for step in steps if not step.decodes]
    prefills = [s for s in prefills if s.prefill_tokens >= _LEAST_PREFILL] or prefills
    a, e, c, d = non_negative(
        [
            (
                (1.0, has_experts * _touched(experts, step.decodes), step.decodes, step.kv_tokens),
                step.seconds,
            )
            for step in decodes
        ],
        4,
    )
    a2, b, q = non_negative(
        [((1.0, step.prefill_tokens, step.attended), step.seconds) for step in prefills], 3
    )
    return cost_of((a, e, a2, b, c, d, 0.0, q), experts)


def _by_cuts(steps: Sequence[Step], experts: tuple[int, int]) -> StepCost:
    """The best that a number of tokens leads to from which on steps are bound by arithmetic."""
    ordered = sorted(steps, key=_tokens)
    sample = ordered[:: max(1, len(steps) // _SAMPLE)]
    counts = sorted({_tokens(step) for step in sample})
    tried: set[Sides] = set()
    found = []
    for cut in (0, *counts[:: max(1, len(counts) // _CUTS)]):
        sides = tuple(_tokens(step) > cut for step in sample)
        if sides not in tried:
            tried.add(sides)
            found.append(_settled(sample, _on_sides(sample, sides, experts), tried))
    return min(found, key=lambda cost: _mean_error(cost, sample))


def _settled(steps: Sequence[Step], cost: StepCost, tried: set[Sides]) -> StepCost:
    """The best that reassignments lead to, until they come to one of those that were tried."""
    best, least = cost, _mean_error(cost, steps)
    for _ in range(_ROUNDS):
        if (sides := _sides(steps, cost)) in tried:
            break
        tried.add(sides)
        cost = _on_sides(steps, sides, cost.experts)
        if (error := _mean_error(cost, steps)) < least:
            best, least = cost, error
    return best


def _tokens(step: Step) -> int:
    return step.decodes + step.prefill_tokens


def _sides(steps: Sequence[Step], cost: StepCost) -> Sides:
    """Of each step, whether by `cost` it is bound by arithmetic rather than by the weights."""
    bound = []
    for step in steps:
        touched = _touched(cost.experts, _tokens(step))
        compute = cost.a2_ms * touched + cost.b_us * _tokens(step) / 1e3
        bound.append(compute > cost.a_ms + cost.e_ms * touched)
    return tuple(bound)


def _on_sides(steps: Sequence[Step], sides: Sides, experts: tuple[int, int]) -> StepCost:
    """All constants, each step taken to be on its side of the maximum."""
    rows = []
    for step, is_compute in zip(steps, sides, strict=True):
        touched = _touched(experts, _tokens(step))
        mixed = step.kv_tokens if step.prefill_tokens else 0.0
        shared = (step.decodes, step.kv_tokens, mixed, step.attended)
        own = (1.0, touched * (experts[1] > 1), 0.0, 0.0)
        if is_compute:
            own = (0.0, 0.0, touched, _tokens(step))
        rows.append(((*own, *shared), step.seconds))
    return cost_of(non_negative(rows, 8), experts)


def cost_of(seconds: Sequence[float], experts: tuple[int, int]) -> StepCost:
    """From seconds to published units, in the order of a, e, a2, b, c, d, d2, q."""
    a, e, a2, b, c, d, d2, q = seconds
    return StepCost(
        a_ms=a * 1e3,
        e_ms=e * 1e3,
        a2_ms=a2 * 1e3,
        b_us=b * 1e6,
        c_us=c * 1e6,
        d_ns=d * 1e9,
        d2_ns=d2 * 1e9,
        q_ns=q * 1e9,
        experts=experts,
    )
