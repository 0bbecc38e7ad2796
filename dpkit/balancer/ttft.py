"""The expected time to the first token of one request on one engine, and what else it costs there.

Pure arithmetic, every time in seconds and every size in tokens; knows nothing of where the numbers
come from. The formula and its constants were chosen by simulation over public traces, against the
scores of vLLM, Dynamo, llm-d and SGLang; docs/balancing.md has it in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, frozen

if TYPE_CHECKING:
    from dpkit.balancer.stepcosts import Costs
    from dpkit.messages import Room


@frozen(kw_only=True)
class Weights:
    """The constants of the score that are a choice."""

    window: float = 1.0
    """W. Steps' worth of prompt that an engine may have before it, beyond the step under way: with
    less it may run dry, with more requests queue there again and cannot choose any more."""

    fill: float = 1.0
    """theta. Share of the KV cache that may be spoken for."""

    growth: float = 0.5
    """g. Share of the predicted output for which room is kept."""

    ageing: float = 5.0
    """beta. A prompt may be passed by those that come so many times its own prefill later."""

    slowing: float = 0.1
    """sigma. What the load of an engine costs each token of the answer."""

    spread: float = 2.0
    """kappa. The engine's own work weighs once more for so many that come after it."""


@define(eq=False)
class Standing:
    """One engine, as a pass sees it."""

    room: Room
    slowness: float = 1.0  # s
    prefill: float = 0.0  # U: uncached tokens of prompts, beyond the step under way
    requests: int = 0  # n
    context: float = 0.0  # K: tokens of all its requests, those that share blocks each for itself
    growth: float = 0.0  # G: predicted output to come
    kv_tokens: float = 0.0  # V: in use or still to be allocated, shared blocks once


@define(eq=False)
class Rate:
    """What is the same for all requests that might go to one engine: made once a pass."""

    base: float = 0.0
    step: float = 0.0
    life: float = 0.0
    prefill: float = 0.0
    per_step: int = 1
    window: float = 1.0
    slowness: float = 1.0
    free: float = 0.0
    capacity: int = 1
    is_idle: bool = True
    is_full: bool = False

    def renew(self, engine: Standing, costs: Costs, weights: Weights, length: float) -> None:
        """Take an engine as it stands now; `length` is that of an answer."""
        load = costs.decode * engine.requests + costs.context * engine.context
        self.slowness = slowness = engine.slowness
        self.step = slowness * (costs.step + load)
        self.base = slowness * (costs.prefill * engine.prefill + weights.slowing * load * length)
        self.life = self.step * length
        self.prefill = engine.prefill
        self.per_step = engine.room.tokens_per_step
        self.window = weights.window * self.per_step
        self.is_idle = not engine.requests
        self.is_full = engine.requests >= engine.room.requests
        self.capacity = engine.room.kv_tokens
        growth = weights.growth * (engine.growth + length)
        self.free = weights.fill * self.capacity - engine.kv_tokens - growth

    def score(self, prompt: int, new: int, work: float, shared: int = 0) -> float:
        """Seconds; the engine with the least should have the request.

        Args:
            prompt: Tokens of the prompt.
            new: Those that are not cached there.
            work: What `prefill_work` says of them, weighed with `Weights.spread`.
            shared: Leading tokens that running requests hold there.
        """
        steps = -(-(self.prefill + new) // self.per_step)
        score = self.base + self.step * steps + self.slowness * work
        over = prompt - shared - self.free
        if over > 0.0:  # it waits for so much of the cache to come free, which takes lives
            score += over / self.capacity * self.life
        return score

    def has_credit(self, prompt: int, new: int, shared: int = 0) -> bool:
        """Whether a request would begin there with the very next step; arguments as for `score`.

        An idle engine takes any. One that runs takes what fits in its KV cache, with what answers
        are predicted to grow, and beside the prompts that wait there in its next step; a prompt
        longer than a step waits until none is before it.
        """
        if self.is_idle:
            return True
        if self.is_full or prompt - shared > self.free:
            return False
        return self.prefill <= 0.0 or self.prefill + new <= self.window

    @property
    def is_open(self) -> bool:
        """Whether there may be a request at all that has credit."""
        return self.is_idle or not (self.is_full or self.prefill >= self.window or self.free <= 0.0)


def prefill_work(costs: Costs, prompt: int, hit: int = 0) -> float:
    """Seconds that the uncached part of a prompt takes: its tokens, and what they attend to."""
    return costs.prefill * (prompt - hit) + costs.attention * (prompt**2 - hit**2) / 2
