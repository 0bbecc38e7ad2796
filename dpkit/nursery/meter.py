"""What is measured of one life of an engine, step by step: from this side, wherever it lives.

A step brings many tokens in one go, and that moment is the only time that their clients could tell
apart. So all is measured once a step, at the same cost for one request as for a thousand. Knows
nothing of engines, links or who collects.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import trio
from attrs import define, field, frozen, setters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dpkit.messages import Batch

INTER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
"""vLLM's bounds."""

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Likewise."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Likewise."""

FREED_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""An abort takes one step at most, so these are lengths of steps."""


# Frozen by `on_setattr`, not by `frozen`, which makes one three times as dear: a look at 64 engines
# makes 800 of them.
@define(on_setattr=setters.frozen)
class Counted:
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets; the last bucket has none."""
    counts: tuple[int, ...]
    """Values in each bucket, one bucket more than bounds."""
    total: float
    """Sum of all values."""

    @property
    def count(self) -> int:
        """Values in all buckets."""
        return sum(self.counts)

    def plus(self, other: Counted) -> Counted:
        """Both together; they have the same bounds."""
        counts = (ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True))
        return Counted(self.bounds, tuple(counts), self.total + other.total)


class Histogram:
    """Values by size, as Prometheus counts them: a bound belongs to the bucket below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def __repr__(self) -> str:
        return f"<Histogram of {sum(self.counts)} values, {self.total:g} in all>"

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or as many of the same."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def now(self) -> Counted:
        """What it has counted so far."""
        return Counted(self.bounds, tuple(self.counts), self.total)


class FirstTokens:
    """Seconds from the admission of requests to their first tokens, by the rank that gave them."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Histogram] = {}

    def observe(self, rank: int, seconds: float) -> None:
        """A request has got its first token."""
        if (histogram := self._by_rank.get(rank)) is None:
            histogram = self._by_rank[rank] = Histogram(FIRST_TOKEN_S)
        histogram.observe(seconds)

    def now(self) -> Mapping[int, Counted]:
        """All so far."""
        return {rank: histogram.now() for rank, histogram in self._by_rank.items()}


@frozen(kw_only=True)
class Measured:
    """All that a meter has measured by a moment; of several lives, all together."""

    inter_token_s: Counted = field(factory=lambda: Histogram(INTER_TOKEN_S).now())
    """Seconds from a token of a request to its next one."""
    step_tokens: Counted = field(factory=lambda: Histogram(STEP_TOKENS).now())
    """Tokens that a step brought, with the prompts of requests that it gave a first one."""
    abort_to_free_s: Counted = field(factory=lambda: Histogram(FREED_S).now())
    """Seconds from an abort to the engine's word, or deed, that its blocks are free."""

    def plus(self, other: Measured) -> Measured:
        """Both together."""
        return Measured(
            inter_token_s=self.inter_token_s.plus(other.inter_token_s),
            step_tokens=self.step_tokens.plus(other.step_tokens),
            abort_to_free_s=self.abort_to_free_s.plus(other.abort_to_free_s),
        )


class Meter:
    """Measures one life of an engine; for Trio's thread."""

    def __init__(self) -> None:
        self._inter_token = Histogram(INTER_TOKEN_S)
        self._step_tokens = Histogram(STEP_TOKENS)
        self._freed = Histogram(FREED_S)
        self._stepped_at = 0.0
        self._aborted_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Meter: {self._inter_token!r}, {len(self._aborted_at)} aborts under way>"

    def step(self, tokens: int, prompts: Sequence[int] = ()) -> None:
        """A step is over.

        Args:
            tokens: That it brought, one a request.
            prompts: Of each request that got its first one, the length of its prompt.
        """
        if not tokens:
            return
        now = trio.current_time()
        # Whoever has had a token before had it in the step before this: nobody who runs is left
        # out of a step. It is not so for the few that were preempted.
        if (others := tokens - len(prompts)) > 0:
            self._inter_token.observe(now - self._stepped_at, others)
        self._step_tokens.observe(tokens + sum(prompts))
        self._stepped_at = now

    def abort(self, request_id: str) -> None:
        """The engine is asked to drop a request."""
        self._aborted_at.setdefault(request_id, trio.current_time())

    def freed(self, request_ids: Iterable[str]) -> None:
        """The engine has nothing of these any more. Those that nobody aborted are ignored."""
        for request_id in request_ids:
            if (aborted_at := self._aborted_at.pop(request_id, None)) is not None:
                self._freed.observe(trio.current_time() - aborted_at)

    def forget(self, request_id: str) -> None:
        """Nobody will ever know when the engine dropped it."""
        self._aborted_at.pop(request_id, None)

    def end(self) -> None:
        """The life is over, and with it what was under way."""
        self._aborted_at.clear()

    def measured(self) -> Measured:
        """All so far."""
        return Measured(
            inter_token_s=self._inter_token.now(),
            step_tokens=self._step_tokens.now(),
            abort_to_free_s=self._freed.now(),
        )


def first_prompts(batch: Batch) -> list[int]:
    """Lengths of the prompts whose first output token a step samples."""
    prompts = []
    for row in reversed(batch.rows):  # decodes come first, and there are many of them
        if row.is_decode:
            break
        if row.output_index == 0:
            prompts.append(len(row.prompt_token_ids))
    return prompts
