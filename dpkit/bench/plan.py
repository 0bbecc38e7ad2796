"""What is sent, in which order and when: everything that is known before the first request.

A plan is as good as its seed: the same one gives the same requests at the same moments. Lengths,
prompts and arrivals are drawn apart from each other, so that another rate changes no prompt.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.bench.arrivals import Arrivals, at_rate, from_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.bench.lengths import Lengths
    from dpkit.bench.prompts import Prompt, PromptMaker
    from dpkit.traces import Trace


@frozen(kw_only=True)
class Ask:
    """One request to come."""

    index: int
    start: float | None
    """Seconds from the first; None: closed loop, as soon as one has ended."""
    prompt: Prompt
    max_tokens: int


@frozen(kw_only=True)
class Load:
    """What is wanted. Either `rate`, `concurrency`, or `trace` with `replay`."""

    rate: float | None = None
    """Requests a second: open loop."""
    arrivals: Arrivals = Arrivals.POISSON
    concurrency: int | None = None
    """Requests under way, always so many: closed loop."""
    trace: Trace | None = None
    """Lengths, one request after the other and again from the first."""
    replay: bool = False
    """At the moments of the trace, once."""
    speed: float = 1.0
    """Of those moments."""
    prompt_tokens: Lengths | None = None
    """None: those of the trace."""
    output_tokens: Lengths | None = None
    """Likewise."""
    requests: int | None = None
    """How many are measured; None: `duration` says."""
    duration: float | None = None
    """Seconds within which measured ones begin."""
    warm_up_requests: int = 0
    """The first ones, which are not measured."""
    warm_up_time: float = 0.0
    """Likewise, by time."""
    ignore_eos: bool = False
    temperature: float = 0.0
    timeout: float = 600.0
    """Seconds from when a request begins."""
    seed: int = 0

    @property
    def ends_after(self) -> float:
        """Seconds after which none begins."""
        return math.inf if self.duration is None else self.warm_up_time + self.duration

    def is_warm_up(self, index: int, seconds: float) -> bool:
        """Whether a request, by its number and its beginning, is among those left out."""
        return index < self.warm_up_requests or seconds < self.warm_up_time


def asks(load: Load, maker: PromptMaker) -> Iterator[Ask]:
    """Requests in order, each made when it is asked for; without end unless a trace has one."""
    both = zip(_starts(load), _rows(load), strict=False)
    for index, (start, (prompt, output, blocks)) in enumerate(both):
        yield Ask(index=index, start=start, prompt=maker.make(prompt, blocks), max_tokens=output)


def _starts(load: Load) -> Iterator[float | None]:
    if load.trace and load.replay:
        return from_trace((each.arrival_s for each in load.trace.asks), load.speed)
    if load.rate is not None:
        return at_rate(load.rate, load.arrivals, load.seed)
    return itertools.repeat(None)


def _rows(load: Load) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Lengths of prompt and answer, and blocks."""
    rng = random.Random(f"lengths {load.seed}")  # noqa: S311 - load, not secrets
    rows = itertools.cycle(load.trace.asks) if load.trace else itertools.repeat(None)
    for row in rows:
        prompt = load.prompt_tokens.draw(rng) if load.prompt_tokens else row and row.prompt_tokens
        output = load.output_tokens.draw(rng) if load.output_tokens else row and row.output_tokens
        blocks = row.blocks if row and not load.prompt_tokens else ()
        yield prompt or 1, output or 1, blocks
