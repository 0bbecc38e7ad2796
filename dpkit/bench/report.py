"""A run with all that a reader needs to know of it, whatever form it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from dpkit.bench.summary import LATE_S
from dpkit.config.units import show_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpkit.bench.plan import Load
    from dpkit.bench.record import Record
    from dpkit.bench.summary import Summary


@frozen(kw_only=True)
class Report:
    """Of one run."""

    target: str
    model: str
    settings: Mapping[str, str]
    """What was asked for, in words."""
    notes: tuple[str, ...]
    """What a reader should keep in mind."""
    was_stopped: bool
    """Before its end."""
    origin: float
    """When it began, on Trio's clock."""
    records: Sequence[Record]
    summary: Summary

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": self.target,
            "model": self.model,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "was_stopped": self.was_stopped,
            **self.summary.to_dict(),
        }


def settings_of(load: Load) -> dict[str, str]:
    """A load in words."""
    if load.trace and load.replay:
        kind = (
            f"open loop, a trace of {len(load.trace.asks):,} requests, {load.speed:g} times as fast"
        )
    elif load.rate is not None:
        kind = f"open loop, {load.rate:g} requests/s, {load.arrivals}"
    else:
        kind = f"closed loop, {load.concurrency} at once"
    warm_up = [f"{load.warm_up_requests} requests"] * bool(load.warm_up_requests)
    warm_up += [show_duration(load.warm_up_time)] * bool(load.warm_up_time)
    rows = f"of {load.trace.name}" if load.trace and not load.replay else "of the trace"
    bounds = [f"{load.requests} requests"] * bool(load.requests)
    bounds += [show_duration(load.duration or 0)] * (load.duration is not None)
    return {
        "load": kind,
        "until": ", or ".join(bounds) or "the end of the trace",
        "prompt tokens": str(load.prompt_tokens or rows),
        "output tokens": str(load.output_tokens or rows),
        "ignore EOS": "yes" if load.ignore_eos else "no",
        "warm-up": " and ".join(warm_up) or "none",
        "seed": str(load.seed),
    }


def notes_of(summary: Summary, *, is_exact: bool) -> tuple[str, ...]:
    """What of the figures is in doubt."""
    notes = []
    lateness = [
        f"{what} up to {1e3 * spread.max:.1f} ms late (p99 {1e3 * spread.p99:.1f} ms)"
        for spread, what in ((summary.late, "requests began"), (summary.lag, "it was woken"))
        if spread is not None and spread.p99 > LATE_S
    ]
    if lateness:
        notes.append(
            f"the generator itself was late: {', '.join(lateness)}; the times are partly its own: "
            "ask for less, or give it a core of its own (with --url, if it shares the cluster's)"
        )
    if not is_exact:
        notes.append("prompts are words, and about as long as asked for; the tokens are counted")
    if summary.unfinished:
        notes.append(f"{summary.unfinished} requests were under way when the run was stopped")
    return tuple(notes)
