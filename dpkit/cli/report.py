"""What a run amounted to: a short table for people, one object for programs."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING

import click
from attrs import asdict, define, field

if TYPE_CHECKING:
    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.messages import Completion
    from dpkit.nursery.cluster import ClusterStatistics


@define(eq=False)
class Tally:
    """Sums over the completions of a run; times in seconds."""

    started_at: float
    ended_at: float
    completions: list[Completion] = field(factory=list)
    failed: int = 0

    def overall(self) -> dict[str, float | int | None]:
        """Totals; times are None when nothing was generated."""
        tokens = sum(len(completion.token_ids) for completion in self.completions)
        ttfts = [c.ttft_s for c in self.completions if c.token_ids]
        elapsed = self.ended_at - self.started_at
        return {
            "requests": len(self.completions) + self.failed,
            "failed": self.failed,
            "output_tokens": tokens,
            "duration_s": elapsed,
            "ttft_mean_s": statistics.fmean(ttfts) if ttfts else None,
            "ttft_max_s": max(ttfts, default=None),
            "tokens_per_s": tokens / elapsed if elapsed > 0 else None,
        }


def print_json(cluster: ClusterStatistics, tally: Tally) -> None:
    """One last line: ``{"statistics": {"engines": [...], "overall": {...}}}``."""
    engines = [
        {
            "engine": engine.engine.name,
            "model": engine.model,
            "requests": _requests(engine.core),
            **asdict(engine.core),
        }
        for engine in cluster.engines
    ]
    click.echo(json.dumps({"statistics": {"engines": engines, "overall": tally.overall()}}))


def print_table(cluster: ClusterStatistics, tally: Tally) -> None:
    """A row per engine, and one line on the whole."""
    from rich.console import Console  # noqa: PLC0415 - costs a JSON run 70 ms for nothing
    from rich.table import Table  # noqa: PLC0415

    table = Table("engine", box=None, header_style="bold")
    for column in ("requests", "tokens", "peak KV", "preemptions"):
        table.add_column(column, justify="right")
    for engine in cluster.engines:
        core = engine.core
        table.add_row(
            engine.engine.name,
            str(_requests(core)),
            str(core.output_tokens),
            f"{core.peak_kv_usage:.1%}",
            str(core.preemptions),
        )
    Console(highlight=False).print(table)
    click.echo(_summary(tally.overall()))


def _requests(core: EngineCoreStatistics) -> int:
    return core.requests_finished + core.requests_aborted + core.requests_refused


def _summary(overall: dict[str, float | int | None]) -> str:
    parts = [f"{overall['requests']} requests", f"{overall['output_tokens']} tokens"]
    if overall["failed"]:
        parts.insert(1, f"{overall['failed']} failed")
    if overall["ttft_mean_s"] is not None:
        parts.append(f"TTFT mean {overall['ttft_mean_s']:.3f} s, max {overall['ttft_max_s']:.3f} s")
    if overall["tokens_per_s"]:
        parts.append(f"{overall['tokens_per_s']:.1f} tokens/s")
    return "all: " + ", ".join(parts)
