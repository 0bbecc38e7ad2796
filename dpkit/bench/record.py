"""What happened to one request, as its sender saw it: moments on Trio's clock, and an outcome.

Everything that is reported is computed from these at the end, so no percentile is an estimate.
Knows no target.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from math import nan
from typing import Any

from attrs import define, field

from dpkit.errors import DpkitError


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """The run was stopped before its end."""


class AskFailed(DpkitError):  # noqa: N818 - reads as what happened
    """One request got no whole answer.

    Args:
        kind: In a few words, the same for all that fail alike: what errors are counted by.
        message: All that is known.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _moments() -> array[float]:
    return array("d")


@define(eq=False, kw_only=True)
class Record:
    """One request. Moments are seconds on Trio's clock."""

    index: int
    intended: float
    """When it was to begin. Of an open loop, latencies count from here: a generator that comes late
    because it waited would otherwise hide what its users would have waited."""
    is_warm_up: bool = False
    began: float = nan
    """When it did begin."""
    moments: array[float] = field(factory=_moments)
    """When pieces of the answer came, each of one token or more."""
    ended: float = nan
    prompt_tokens: int = 0
    """As the server counts them, or as wanted if it does not tell."""
    output_tokens: int = 0
    """As the server counts them; pieces if it does not tell."""
    engine: str | None = None
    outcome: Outcome = Outcome.UNFINISHED
    error_kind: str | None = None
    error: str | None = None

    @property
    def late(self) -> float:
        """By how much the generator missed the moment."""
        return self.began - self.intended

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None: none came."""
        return self.moments[0] - self.intended if self.moments else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None: there were none."""
        if self.output_tokens < 2 or len(self.moments) < 2:
            return None
        return (self.moments[-1] - self.moments[0]) / (self.output_tokens - 1)

    @property
    def latency(self) -> float:
        """Seconds from the intended beginning to the end of the answer."""
        return self.ended - self.intended

    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [
            after - before for before, after in zip(self.moments, self.moments[1:], strict=False)
        ]

    def to_dict(self, origin: float) -> dict[str, Any]:
        """For a file: moments in seconds from `origin`."""
        return {
            "index": self.index,
            "outcome": self.outcome.value,
            "engine": self.engine,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "intended_s": self.intended - origin,
            "began_s": self.began - origin,
            "moments_s": [moment - origin for moment in self.moments],
            "ended_s": self.ended - origin,
            "error_kind": self.error_kind,
            "error": self.error,
        }
