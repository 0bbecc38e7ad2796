"""What every form of a report shows, as words and numbers in tables. Knows no form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.bench.report import Report
    from dpkit.bench.spread import Spread
    from dpkit.bench.summary import Summary

_NONE = "-"


@frozen(kw_only=True)
class Table:
    """One table; the first column is words, and the others numbers unless `is_prose`."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_prose: bool = False


def tables(report: Report) -> Iterator[Table]:
    """All that there is to say, in the order in which it matters."""
    summary = report.summary
    yield Table(title="Result", header=("", ""), rows=tuple(_facts(summary)), is_prose=True)
    times = (
        ("time to first token", summary.ttft),
        ("between tokens (ITL)", summary.itl),
        ("per output token (TPOT)", summary.tpot),
        ("end to end", summary.e2e),
    )
    header = ("ms", "mean", "p50", "p90", "p95", "p99", "max")
    rows = tuple((name, *_cells(spread)) for name, spread in times)
    yield Table(title="Times", header=header, rows=rows)
    if summary.engines:
        yield _engines(summary)
    if summary.errors:
        rows = tuple((each.kind, f"{each.count:,}", each.example) for each in summary.errors)
        yield Table(
            title="Errors", header=("error", "requests", "the first"), rows=rows, is_prose=True
        )


def milliseconds(seconds: float) -> str:
    """A time, to three digits or to the millisecond."""
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def number(value: float) -> str:
    """A rate: as many digits as mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    outcomes = [f"{summary.finished:,} finished", f"{summary.failed:,} failed"]
    outcomes += [f"{summary.unfinished:,} unfinished"] * bool(summary.unfinished)
    outcomes += [f"{summary.warm_up:,} before, as warm-up"] * bool(summary.warm_up)
    yield "requests", ", ".join(outcomes)
    yield "duration", f"{summary.duration:.2f} s, at most {summary.most_at_once:,} at once"
    yield "throughput", f"{number(summary.requests_per_s)} requests/s"
    both = f"{number(summary.tokens_per_s)} with those of prompts"
    counts = f"{summary.output_tokens:,} and {summary.prompt_tokens:,} tokens"
    yield "tokens", f"{number(summary.output_tokens_per_s)} output tokens/s, {both} ({counts})"
    if (good := summary.goodput) is not None:
        yield (
            "goodput",
            f"{number(good.per_s)} requests/s within {good.slo}: {good.good:,}, {good.share:.1%}",
        )
    if (late := summary.late) is not None:
        spread = f"p50 {milliseconds(late.p50)} ms, p99 {milliseconds(late.p99)} ms"
        yield "generator late by", f"{spread}, max {milliseconds(late.max)} ms"


def _cells(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return (_NONE,) * 6
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
    return tuple(map(milliseconds, values))


def _engines(summary: Summary) -> Table:
    even = "" if summary.imbalance is None else f" (busiest: {summary.imbalance:.2f} of the mean)"
    times = ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms")
    rows = tuple(
        (
            each.engine,
            f"{each.requests:,}",
            f"{each.output_tokens:,}",
            *_two(each.ttft),
            *_two(each.tpot),
        )
        for each in summary.engines
    )
    header = ("engine", "requests", "output tokens", *times)
    return Table(title=f"Engines{even}", header=header, rows=rows)


def _two(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return _NONE, _NONE
    return milliseconds(spread.p50), milliseconds(spread.p99)
