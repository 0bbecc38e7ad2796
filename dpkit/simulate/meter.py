"""What happened to each request of a run: when it came, was answered, and was done.

Fed synchronously, token by token, so it must be cheap. Knows nothing of what becomes of the
numbers (`dpkit.simulate.measures`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from attrs import define, field

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from dpkit.messages import EngineOutput
    from dpkit.nursery.submission import Submission

GAP_S = 1e-5
"""Gaps between tokens are kept in steps of this: a thousandth of the shortest step there is."""


class Answer(NamedTuple):
    """One request, when all is over. Times are seconds on the run's clock."""

    number: int
    arrival_s: float
    first_s: float
    """NaN: no token came."""
    last_s: float
    prompt_tokens: int
    tokens: int
    failed: bool
    is_whole: bool
    """It came to its end, and nobody left before."""

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of each further token; 0 for a single one."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def e2e_s(self) -> float:
        """From its arrival to its last token."""
        return self.last_s - self.arrival_s


@define(eq=False)
class Life:
    """One request under way: a sink for its outputs."""

    number: int
    arrival_s: float
    prompt_tokens: int
    now: Callable[[], float]
    gaps: Counter[int]
    """How often a token came so many `GAP_S` after the one before; shared by all."""
    on_end: Callable[[Answer], None]
    leaves_after: float = math.inf
    """Tokens after which its reader leaves."""
    submission: Submission | None = field(default=None, repr=False)
    _first_s: float = field(default=math.nan, init=False)
    _last_s: float = field(default=math.nan, init=False)
    _tokens: int = field(default=0, init=False)

    def __call__(self, output: EngineOutput) -> None:
        """Take what a step adds."""
        now, count = self.now(), len(output.token_ids)
        if count:
            if self._tokens:
                self.gaps[int((now - self._last_s) / GAP_S + 0.5)] += 1
            else:
                self._first_s = now
            self._tokens += count
            self._last_s = now
        if output.finish_reason is not None:
            failed = output.error is not None
            self._end(failed=failed, is_whole=not failed)
        elif self._tokens >= self.leaves_after and self.submission is not None:
            self.submission.close()
            self._end(failed=False, is_whole=False)

    def _end(self, *, failed: bool, is_whole: bool) -> None:
        self.submission = None
        self.on_end(
            Answer(
                self.number,
                self.arrival_s,
                self._first_s,
                self._last_s,
                self.prompt_tokens,
                self._tokens,
                failed,
                is_whole,
            )
        )
