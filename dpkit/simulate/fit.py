"""From measured steps, or from the log of a real run, to the constants of `StepCost`.

Least squares of relative errors, no constant below zero. The steps of a table are fitted in the
form of the cost model itself, branch by branch; a log of requests tells no steps, so each request's
decoding time is taken apart by what ran beside it, in the plain sum of the same terms.
Pure functions of numbers: knows nothing of files or engines.
"""

from __future__ import annotations

from itertools import chain, combinations
from operator import mul
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from dpkit.costmodel import StepCost
from dpkit.simulate.identifiable import untold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Row = tuple[Sequence[float], float]

_ROUNDS = 30
"""Reassignments of steps to branches; they settle in a few."""

_LEAST_PREFILL = 256
"""Tokens from which on a step without decodes is bound by arithmetic on every card measured."""


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
class Served:
    """One request of a real run. Times are seconds."""

    prompt_tokens: int
    output_tokens: int
    scheduled_s: float
    first_s: float
    last_s: float


@frozen(kw_only=True)
class Fit:
    """Constants, and how far they are from what was measured."""

    cost: StepCost
    points: int
    mean_error: float
    """Mean of the relative errors."""
    p95_error: float
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
    fitted anew, until nothing changes. The best of these is kept.

    Args:
        steps: At least one.
        experts: Of a mixture of experts, how many a token uses, of how many.
        host_ms: What the serving loop adds to each step: no part of a table of kernels.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("there are no steps to fit; measure some")
    best = cost = _by_kind(steps, experts)
    for _ in range(_ROUNDS):
        refined = _refined(steps, cost)
        if refined == cost:
            break
        cost = refined
        if _mean_error(cost, steps) < _mean_error(best, steps):
            best = cost
    return _fit(evolve(best, host_ms=host_ms), _errors(best, steps), untold=_untold(steps, experts))


def _untold(steps: Sequence[Step], experts: tuple[int, int]) -> tuple[str, ...]:
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
    return tuple(name for name in columns if name in found)


def _fit(cost: StepCost, of: Iterable[float], *, untold: tuple[str, ...]) -> Fit:
    errors = sorted(of)
    return Fit(
        cost=cost,
        points=len(errors),
        mean_error=sum(errors) / len(errors),
        p95_error=errors[int(0.95 * (len(errors) - 1))],
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
    return _cost((a, e, a2, b, c, d, 0.0, q), experts)


def _refined(steps: Sequence[Step], cost: StepCost) -> StepCost:
    """All constants anew, each step on the side of the maximum that it is on by `cost`."""
    experts, rows = cost.experts, []
    for step in steps:
        tokens = step.decodes + step.prefill_tokens
        touched = _touched(experts, tokens)
        weights = cost.a_ms + cost.e_ms * touched
        compute = cost.a2_ms * touched + cost.b_us * tokens / 1e3
        mixed = step.kv_tokens if step.prefill_tokens else 0.0
        shared = (step.decodes, step.kv_tokens, mixed, step.attended)
        own = (1.0, touched * (experts[1] > 1), 0.0, 0.0)
        if compute > weights:
            own = (0.0, 0.0, touched, tokens)
        rows.append(((*own, *shared), step.seconds))
    return _cost(non_negative(rows, 8), experts)


def _cost(seconds: Sequence[float], experts: tuple[int, int]) -> StepCost:
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


def fit_run(served: Sequence[Served], *, engines: int = 1) -> Fit:
    """Fit the log of a run.

    A request of O tokens decodes for O - 1 steps, of which each costs a + c*n + d*K, and beside
    which the prompts of others are computed at b a token and q for what it attends to. The error is
    that of these decoding times.

    Args:
        served: At least one with two tokens.
        engines: How many shared the requests evenly; the log does not say who had which.

    Raises:
        ValueError: no request has two tokens.
    """
    decoding = [each for each in served if each.output_tokens > 1 and each.last_s > each.first_s]
    if not decoding:
        raise ValueError(
            "no request has the two tokens from which a step can be told; log one of longer answers"
        )
    rows = [(_beside(each, served, engines), each.last_s - each.first_s) for each in decoding]
    a, b, c, d, q = constants = non_negative(rows, 5)
    errors = (abs(sum(map(mul, constants, terms)) / seconds - 1) for terms, seconds in rows)
    # The plain sum, in a form that takes the larger of two: there both begin with a.
    cost = _cost((a, 0.0, a, b, max(0.0, c - b), d, 0.0, q), (1, 1))
    columns = zip(*(terms for terms, _ in rows), strict=True)
    names = ("a_ms", "b_us", "c_us", "d_ns", "q_ns")
    return _fit(cost, errors, untold=untold(dict(zip(names, columns, strict=True))))


def _beside(own: Served, served: Sequence[Served], engines: int) -> tuple[float, ...]:
    """What a request's decoding time is made of: steps, prefill, decodes, context, attention."""
    start, end = own.first_s, own.last_s
    steps, span = own.output_tokens - 1, end - start
    decodes = context = prefill = attended = 0.0
    for other in served:
        if (shared := min(end, other.last_s) - max(start, other.first_s)) > 0:
            middle = (max(start, other.first_s) + min(end, other.last_s)) / 2
            done = (middle - other.first_s) / max(other.last_s - other.first_s, 1e-9)
            decodes += shared / span
            context += shared / span * (other.prompt_tokens + done * other.output_tokens)
        if (shared := min(end, other.first_s) - max(start, other.scheduled_s)) > 0:
            part = shared / max(other.first_s - other.scheduled_s, 1e-9)
            prefill += part * other.prompt_tokens
            attended += part * other.prompt_tokens**2 / 2
    shares = (prefill, steps * decodes, steps * context, attended)
    return steps, *(share / engines for share in shares)


def non_negative(rows: Sequence[Row], width: int) -> list[float]:
    """Least squares of relative errors over factors of which none is negative.

    Every subset of the columns is solved by itself: the best solution without a negative factor is
    the exact one, and eight columns have 255 subsets.

    Args:
        rows: The columns of each equation, and what they should add up to.
        width: How many columns there are.
    """
    scales = [max((abs(terms[i]) for terms, _ in rows), default=0.0) or 1.0 for i in range(width)]
    scaled = [[terms[i] / scales[i] / value for i in range(width)] for terms, value in rows]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(width)] for i in range(width)]
    target = [sum(row[i] for row in scaled) for i in range(width)]
    best, least = [0.0] * width, 0.0
    for columns in _subsets(width):
        found = _solve(
            [[gram[i][j] for j in columns] for i in columns], [target[i] for i in columns]
        )
        if found is None or min(found) < 0:
            continue
        # What the squares sum to, less the part that is the same for all: the rows' number.
        loss = -sum(factor * target[i] for factor, i in zip(found, columns, strict=True))
        if loss < least:
            least, best = loss, [0.0] * width
            for factor, column in zip(found, columns, strict=True):
                best[column] = factor
    return [factor / scale for factor, scale in zip(best, scales, strict=True)]


def _subsets(width: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(width), size) for size in range(1, width + 1))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve linear equations by elimination with pivots; None: they have no single solution."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        sizes = [abs(row[column]) for row in rows]
        pivot = sizes.index(max(sizes[column:]), column)
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(size):
            if i != column and (factor := rows[i][column] / rows[column][column]):
                rows[i] = [x - factor * y for x, y in zip(rows[i], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
