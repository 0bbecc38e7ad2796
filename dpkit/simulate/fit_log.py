"""From the log of a real run to the constants of `StepCost`.

A log of requests tells no steps. Each request's decoding time is taken apart by what ran beside it,
in the plain sum of the model's terms; and where a request was alone while its prompt was computed,
the time to its first token is that of a prefill. Least squares of relative errors, no constant
below zero. Pure functions of numbers: knows nothing of files, tables or engines.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from dpkit.simulate.fit import cost_of, fit_of
from dpkit.simulate.identifiable import untold
from dpkit.simulate.squares import non_negative

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.costmodel import StepCost
    from dpkit.simulate.fit import Fit

    Row = tuple[Sequence[float], float]

_CUTS = 12
"""Lengths from which on prompts are tried as bound by arithmetic."""


@frozen(kw_only=True)
class Served:
    """One request of a real run. Times are seconds."""

    prompt_tokens: int
    output_tokens: int
    scheduled_s: float
    first_s: float
    last_s: float


@frozen(kw_only=True)
class _Beside:
    """What a request's decoding time is made of."""

    steps: float
    prefill: float
    decodes: float
    context: float
    attended: float
    seconds: float

    @property
    def terms(self) -> tuple[float, ...]:
        return self.steps, self.prefill, self.decodes, self.context, self.attended


@frozen(kw_only=True)
class _Constants:
    """In seconds."""

    a: float
    a2: float
    b: float
    c: float
    d: float
    q: float

    def decoding(self, beside: _Beside) -> float:
        """A decoding time, by the plain sum."""
        constants = (self.a, self.b, self.c, self.d, self.q)
        return sum(
            (factor * term for factor, term in zip(constants, beside.terms, strict=True)), 0.0
        )

    def prefill(self, tokens: int) -> float:
        """A step of one prompt and nothing else."""
        return max(self.a, self.a2 + self.b * tokens) + self.q * tokens**2 / 2


def fit_run(served: Sequence[Served], *, engines: int = 1) -> Fit:
    """Fit the log of a run.

    A request of O tokens decodes for O - 1 steps, of which each costs a + c*n + d*K, and beside
    which the prompts of others are computed at b a token and q for what it attends to. A prompt of
    p tokens that was alone from its schedule to its first token took the larger of a and
    a2 + b*p, and q*p*p/2. The error is that of these decoding times and lone prefills.

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
    decodes = [_beside(each, served, engines) for each in decoding]
    alone = _alone(served)
    a, b, c, d, q = non_negative([(each.terms, each.seconds) for each in decodes], 5)
    constants = _Constants(a=a, a2=a, b=b, c=c, d=d, q=q)
    if alone:
        constants = _with_prefills(constants, decodes, alone)
    of = f"{len(decodes)} decoding times"
    return fit_of(
        _as_cost(constants, decodes),
        _errors(constants, decodes, alone),
        untold=_untold(decodes, alone),
        of=f"{of} and {len(alone)} lone prefills" if alone else of,
    )


def _errors(
    found: _Constants, decodes: Sequence[_Beside], alone: Sequence[Served]
) -> Iterator[float]:
    yield from (abs(found.decoding(each) / each.seconds - 1) for each in decodes)
    yield from (abs(found.prefill(each.prompt_tokens) / _ttft(each) - 1) for each in alone)


def _untold(decodes: Sequence[_Beside], alone: Sequence[Served]) -> tuple[str, ...]:
    """Constants that a log cannot tell: those of decodes only by decodes, as they are fitted."""
    names = ("a_ms", "b_us", "c_us", "d_ns", "q_ns")
    found = untold(
        dict(zip(names, zip(*(each.terms for each in decodes), strict=True), strict=True))
    )
    prefills: dict[str, Sequence[float]] = {
        "a2_ms": [1.0] * len(alone),
        "b_us": [float(each.prompt_tokens) for each in alone],
        "q_ns": [each.prompt_tokens**2 / 2 for each in alone],
    }
    told = set(prefills) - set(untold(prefills))
    return tuple(name for name in found if name not in told)


def _with_prefills(
    found: _Constants, decodes: Sequence[_Beside], alone: Sequence[Served]
) -> _Constants:
    """What prefills cost anew, from lone ones too; what decodes cost stays what decodes tell.

    Prompts above some length are bound by arithmetic, the others by the weights; the best such
    length is taken. The floor of arithmetic is no higher than that of the weights: a higher one
    would be that of decodes too, whose times say otherwise.
    """
    lengths = sorted({each.prompt_tokens for each in alone})
    tried = []
    for cut in (0, *lengths[:: max(1, len(lengths) // _CUTS)]):
        for floor in (None, found.a):
            a2, b, q = _prefills(found, decodes, alone, cut=cut, floor=floor)
            if a2 <= found.a:
                tried.append(evolve(found, a2=a2, b=b, q=q))
    return min(tried, key=lambda each: sum(_errors(each, decodes, alone)))


def _prefills(
    found: _Constants,
    decodes: Sequence[_Beside],
    alone: Sequence[Served],
    *,
    cut: int,
    floor: float | None,
) -> tuple[float, float, float]:
    """a2, b and q, from what is left of each time without a, c and d; a2 is free, or the floor."""
    rest = evolve(found, b=0.0, q=0.0)
    known = [rest.decoding(each) for each in decodes]
    rows: list[Row] = [((0.0, each.prefill, each.attended), each.seconds) for each in decodes]
    for each in alone:
        tokens = each.prompt_tokens
        bound = (float(floor is None), tokens) if tokens > cut else (0.0, 0.0)
        known.append((floor or 0.0) if tokens > cut else found.a)
        rows.append(((*bound, tokens**2 / 2), _ttft(each)))
    a2, b, q = non_negative(rows, 3, known)
    return a2 if floor is None else floor, b, q


def _as_cost(found: _Constants, decodes: Sequence[_Beside]) -> StepCost:
    """The plain sum in a form that takes the larger of two: as long for the usual decodes."""
    usual = sum(each.decodes / each.steps for each in decodes) / len(decodes)
    arithmetic = max(0.0, found.a2 + found.b * usual - found.a) / usual
    c = max(0.0, found.c - arithmetic)
    return cost_of((found.a, 0.0, found.a2, found.b, c, found.d, 0.0, found.q), (1, 1))


def _alone(served: Sequence[Served]) -> list[Served]:
    """Requests beside whose prefill nothing ran; but for the first, which an engine warms up on."""
    ordered = sorted(served, key=lambda each: each.scheduled_s)
    alone, busy_until = [], ordered[0].last_s
    for each, following in zip_longest(ordered[1:], ordered[2:]):
        ends_alone = following is None or following.scheduled_s >= each.first_s
        if busy_until <= each.scheduled_s < each.first_s and ends_alone:
            alone.append(each)
        busy_until = max(busy_until, each.last_s)
    return alone


def _ttft(served: Served) -> float:
    return served.first_s - served.scheduled_s


def _beside(own: Served, served: Sequence[Served], engines: int) -> _Beside:
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
    return _Beside(
        steps=steps,
        prefill=prefill / engines,
        decodes=steps * decodes / engines,
        context=steps * context / engines,
        attended=attended / engines,
        seconds=span,
    )
