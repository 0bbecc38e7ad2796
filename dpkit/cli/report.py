"""What a run amounted to: a short table for people, one object for programs."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from attrs import asdict, define

from dpkit.cli.answers import to_json
from dpkit.cli.words import show_seconds
from dpkit.errors import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attrs import Attribute

    from dpkit.messages import Completion
    from dpkit.nursery.standing import ClusterStatistics, EngineStatistics, EngineTotals

_MOST_ROWS = 32  # engines that fill a screen; of more, a row for each group


@define(eq=False)
class Tally:
    """Sums over the prompts of a run; times in seconds, on one clock."""

    began_at: float | None = None
    """When the first prompt was sent."""
    ended_at: float | None = None
    """When the last answer ended."""
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    output_tokens: int = 0
    """Of whole answers: those that failed or were aborted count none."""
    _ttfts: int = 0
    _ttft_sum: float = 0.0
    _ttft_max: float = 0.0

    def began(self, now: float) -> None:
        """A prompt was sent."""
        if self.began_at is None:
            self.began_at = now

    def add(self, completion: Completion, now: float) -> None:
        """A prompt was answered."""
        self.ended_at = now
        self.finished += 1
        self.output_tokens += len(completion.token_ids)
        if completion.token_ids:
            self._ttfts += 1
            self._ttft_sum += completion.ttft_s
            self._ttft_max = max(self._ttft_max, completion.ttft_s)

    def overall(self) -> dict[str, float | int | None]:
        """Totals; times are None when nothing was generated."""
        began, ended = self.began_at, self.ended_at
        elapsed = 0.0 if began is None or ended is None else ended - began
        return {
            "requests": self.finished + self.failed + self.aborted,
            "failed": self.failed,
            "aborted": self.aborted,
            "output_tokens": self.output_tokens,
            "duration_s": elapsed,
            "ttft_mean_s": self._ttft_sum / self._ttfts if self._ttfts else None,
            "ttft_max_s": self._ttft_max if self._ttfts else None,
            "tokens_per_s": self.output_tokens / elapsed if elapsed > 0 else None,
        }


def json_report(cluster: ClusterStatistics, tally: Tally) -> str:
    """One last line: ``{"statistics": {"engines": [...], "overall": {...}}}``."""
    engines = [
        {
            "engine": engine.engine.name,
            "model": engine.model,
            **asdict(engine.core),
            **asdict(engine.totals, filter=_is_a_count),
            "restarts": engine.restarts,
        }
        for engine in cluster.engines
    ]
    return to_json({"statistics": {"engines": engines, "overall": tally.overall()}})


def table_report(cluster: ClusterStatistics, tally: Tally) -> str:
    """A row per engine, or per group if there are many; and one line on the whole."""
    from rich.console import Console  # noqa: PLC0415 - costs a JSON run 70 ms for nothing
    from rich.table import Table  # noqa: PLC0415

    table = Table("engine", box=None, header_style="bold")
    for column in ("requests", "tokens", "peak KV", "preemptions"):
        table.add_column(column, justify="right")
    for row in _rows(cluster.engines):
        table.add_row(*row)
    console = Console(highlight=False)
    with (
        console.capture() as captured
    ):  # written by us: rich would end the process at a closed pipe
        console.print(table)
    return f"{captured.get()}{_summary(tally)}\n"


def _is_a_count(attribute: Attribute[Any], _value: object) -> bool:
    return attribute.name != "measured"


def _rows(engines: tuple[EngineStatistics, ...]) -> Iterator[tuple[str, ...]]:
    if len(engines) <= _MOST_ROWS:
        for engine in engines:
            yield _row(engine.engine.name, [engine.totals])
        return
    for group, members in groupby(engines, key=lambda each: each.engine.name.rpartition("-")[0]):
        totals = [member.totals for member in members]
        yield _row(f"{group}-0 … {group}-{len(totals) - 1}" if len(totals) > 1 else group, totals)


def _row(name: str, totals: list[EngineTotals]) -> tuple[str, ...]:
    return (
        name,
        str(sum(each.requests for each in totals)),
        str(sum(each.output_tokens for each in totals)),
        f"{max(each.peak_kv_usage for each in totals):.1%}",
        str(sum(each.preemptions for each in totals)),
    )


def _summary(tally: Tally) -> str:
    overall = tally.overall()
    parts = [plural(tally.finished + tally.failed + tally.aborted, "request")]
    parts += [f"{tally.failed} failed"] * (tally.failed > 0)
    parts += [f"{tally.aborted} aborted"] * (tally.aborted > 0)
    cut_off = tally.failed or tally.aborted  # the engines' rows count what was made for those too
    parts.append(plural(tally.output_tokens, "token") + " in whole answers" * bool(cut_off))
    mean, longest, rate = (overall[k] for k in ("ttft_mean_s", "ttft_max_s", "tokens_per_s"))
    if mean is not None and longest is not None:
        parts.append(f"TTFT mean {show_seconds(mean)}, max {show_seconds(longest)}")
    if rate:
        parts.append(f"{rate:.1f} tokens/s")
    return "all: " + ", ".join(parts)
