"""What a good answer is: upper bounds on its times. Knows only records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import asdict, frozen

from dpkit.bench.record import Outcome
from dpkit.config.checks import BadValue
from dpkit.config.units import parse_duration, show_duration
from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from dpkit.bench.record import Record


_ROUNDING = 1e-9
"""Seconds by which the difference of two moments may be off."""


class BadSlo(DpkitError):  # noqa: N818 - reads as what happened
    """An SLO is put wrong (yours)."""


@frozen(kw_only=True)
class Slo:
    """Seconds that an answer may take; None: as long as it likes."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    """The longest gap of an answer, not the mean."""
    e2e: float | None = None

    def __str__(self) -> str:
        bounds = asdict(self).items()
        return ",".join(f"{name}={show_duration(at)}" for name, at in bounds if at is not None)

    def is_met(self, record: Record) -> bool:
        """Whether a request finished within all bounds; a time that it does not have is good."""
        if record.outcome is not Outcome.FINISHED:
            return False
        times = (
            (self.ttft, record.ttft),
            (self.tpot, record.tpot),
            (self.itl, max(record.gaps(), default=None)),
            (self.e2e, record.latency),
        )
        return all(
            most is None or seconds is None or seconds <= most + _ROUNDING
            for most, seconds in times
        )


_NAMES = ("ttft", "tpot", "itl", "e2e")


def parse_slo(text: str) -> Slo:
    """An SLO from ``ttft=500ms,tpot=50ms``.

    Raises:
        BadSlo: a name or a duration is wrong.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, duration = part.strip().partition("=")
        if name not in _NAMES:
            raise BadSlo(f"{name!r} is none of {', '.join(_NAMES)}")
        try:
            bounds[name] = parse_duration(duration)
        except BadValue as error:
            raise BadSlo(f"{name}: {error.problem}") from None
    return Slo(**bounds)
