"""What a run amounted to: counts, spreads and rates, from the records of all its requests.

Only measured requests count, which leaves out the warm-up. Times are of those that finished. Knows
nothing of how it is shown.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from dpkit.bench.record import Outcome
from dpkit.bench.spread import Spread, spread_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpkit.bench.record import Record
    from dpkit.bench.slo import Slo

LATE_S = 0.01
"""Of a generator: by more than that, and a report says that its figures are in doubt."""


@frozen(kw_only=True)
class ErrorKind:
    """Requests that failed alike."""

    kind: str
    count: int
    example: str


@frozen(kw_only=True)
class EngineShare:
    """What one engine did, as its answers tell."""

    engine: str
    requests: int
    output_tokens: int
    ttft: Spread | None
    tpot: Spread | None


@frozen(kw_only=True)
class Goodput:
    """Requests within the SLO."""

    slo: str
    good: int
    share: float
    """Of all that ended, the failed among them."""
    per_s: float


@frozen(kw_only=True)
class Summary:
    """Times in seconds."""

    requests: int
    """That began, the warm-up not counted."""
    warm_up: int
    """That began before, and are counted nowhere else."""
    finished: int
    failed: int
    unfinished: int
    """Under way when the run was stopped."""
    duration: float
    """From the intended beginning of the first to the end of the last."""
    prompt_tokens: int
    """Of finished requests, as are all that follow."""
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    """Prompt and output."""
    most_at_once: int
    """Requests under way."""
    ttft: Spread | None
    """To the first token."""
    itl: Spread | None
    """Between two pieces of an answer: every gap is a sample."""
    tpot: Spread | None
    """For each token after the first: every answer is a sample."""
    e2e: Spread | None
    """To the end of the answer."""
    late: Spread | None
    """By how much requests began later than they were to."""
    lag: Spread | None
    """By how much the generator's own sleeps were too long."""
    goodput: Goodput | None
    engines: tuple[EngineShare, ...]
    imbalance: float | None
    """Output tokens of the busiest engine, in parts of the mean: 1 is even."""
    errors: tuple[ErrorKind, ...]

    @property
    def generator_was_late(self) -> bool:
        """Whether the figures are as much the generator's as the server's."""
        return any(each is not None and each.p99 > LATE_S for each in (self.late, self.lag))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return asdict(self) | {"generator_was_late": self.generator_was_late}


def summarise(
    records: Iterable[Record], *, lags: Sequence[float] = (), slo: Slo | None = None
) -> Summary:
    """Sum a run up.

    Args:
        records: Of all requests.
        lags: As `Generator` has them.
        slo: For the goodput.
    """
    everything = list(records)
    measured = [record for record in everything if not record.is_warm_up]
    done = [record for record in measured if record.outcome is Outcome.FINISHED]
    outcomes = Counter(record.outcome for record in measured)
    duration = _duration(measured)
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    engines = _engines(done)
    return Summary(
        requests=len(measured),
        warm_up=len(everything) - len(measured),
        finished=len(done),
        failed=outcomes[Outcome.FAILED],
        unfinished=outcomes[Outcome.UNFINISHED],
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=_rate(len(done), duration),
        output_tokens_per_s=_rate(output_tokens, duration),
        tokens_per_s=_rate(prompt_tokens + output_tokens, duration),
        most_at_once=_most_at_once(measured),
        ttft=_spread(record.ttft for record in done),
        itl=spread_of(chain.from_iterable(record.gaps() for record in done)),
        tpot=_spread(record.tpot for record in done),
        e2e=spread_of(record.latency for record in done),
        late=spread_of(record.late for record in measured),
        lag=spread_of(lags),
        goodput=None if slo is None else _goodput(measured, slo, duration),
        engines=engines,
        imbalance=_imbalance(engines),
        errors=tuple(_errors(measured)),
    )


def _spread(samples: Iterable[float | None]) -> Spread | None:
    return spread_of(sample for sample in samples if sample is not None)


def _duration(measured: Sequence[Record]) -> float:
    if not measured:
        return 0.0
    return max(each.ended for each in measured) - min(each.intended for each in measured)


def _rate(amount: float, duration: float) -> float:
    return amount / duration if duration > 0 else 0.0


def _most_at_once(measured: Sequence[Record]) -> int:
    """Ends before beginnings of the same moment: a place of a closed loop is one request."""
    changes = [(each.began, 1) for each in measured] + [(each.ended, -1) for each in measured]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def _goodput(measured: Sequence[Record], slo: Slo, duration: float) -> Goodput:
    ended = sum(record.outcome is not Outcome.UNFINISHED for record in measured)
    good = sum(slo.is_met(record) for record in measured)
    share = good / ended if ended else 0.0
    return Goodput(slo=str(slo), good=good, share=share, per_s=_rate(good, duration))


def _engines(done: Sequence[Record]) -> tuple[EngineShare, ...]:
    """In the order of their names, numbers by their size; who does not tell is left out."""
    by_engine: dict[str, list[Record]] = {}
    for record in done:
        if record.engine is not None:
            by_engine.setdefault(record.engine, []).append(record)
    names = sorted(by_engine, key=lambda name: (len(name), name))
    return tuple(_share(name, by_engine[name]) for name in names)


def _share(name: str, records: Sequence[Record]) -> EngineShare:
    return EngineShare(
        engine=name,
        requests=len(records),
        output_tokens=sum(record.output_tokens for record in records),
        ttft=_spread(record.ttft for record in records),
        tpot=_spread(record.tpot for record in records),
    )


def _imbalance(engines: Sequence[EngineShare]) -> float | None:
    tokens = [each.output_tokens for each in engines]
    return max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else None


def _errors(measured: Sequence[Record]) -> Iterable[ErrorKind]:
    kinds = Counter(record.error_kind for record in measured if record.error_kind is not None)
    examples = {record.error_kind: record.error for record in reversed(measured)}
    for kind, count in kinds.most_common():
        yield ErrorKind(kind=kind, count=count, example=examples[kind] or "")
