"""The expected time to the first token of one request on one engine, and what else it costs there.

Pure arithmetic, every time in seconds and every size in tokens; knows nothing of where the numbers
come from. The formula and its constants were chosen by simulation over public traces, against the
scores of vLLM, Dynamo, llm-d and SGLang; docs/balancing.md has it in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attrs import define, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.balancer.stepcosts import Costs
    from dpkit.messages import Room


@frozen(kw_only=True)
class Weights:
    """The constants of the score that are a choice."""

    window: float = 0.5
    """W. Steps' worth of prompt that an engine may have before it, beyond the step under way: with
    less it may run dry, with more requests queue there again and cannot choose any more."""

    fill: float = 0.99
    """theta. Share of the KV cache that may be spoken for: what answers grow by is a guess."""

    ageing: float = 5.0
    """beta. A prompt may be passed by those that come so many times its own prefill later."""

    aged_tokens: int = 16_000
    """A. Tokens of a prompt that count for that: those that are all longer go as they came, or the
    longest would wait for all others again and again."""

    slowing: float = 0.1
    """sigma. What the load of an engine costs each token of the answer."""

    spread: float = 2.0
    """kappa. The engine's own work weighs once more for so many that come after it."""

    stalling: float = 0.02
    """lambda. A long prompt's work weighs that part more for each answer that has just begun: its
    tokens come late meanwhile. Only without a prefix cache: with one it matters more to go where
    the prefix is."""


@define(eq=False)
class Standing:
    """One engine, as a pass sees it."""

    room: Room
    slowness: float = 1.0  # s
    prefill: float = 0.0  # U: uncached tokens of prompts, beyond the step under way
    requests: int = 0  # n
    context: float = 0.0  # K: tokens of all its requests, those that share blocks each for itself
    begun: int = 0  # F: of them those whose answer has just begun, or is to begin
    growth: float = 0.0  # G: predicted output to come
    kv_tokens: float = 0.0  # V: in use or still to be allocated, shared blocks once

    def joined(self, prompt: int, new: int, wants: int, length: float) -> Standing:
        """How it stands with one request more.

        Args:
            prompt: Tokens of the prompt.
            new: Those that are not cached.
            wants: Those that no running request holds.
            length: Tokens of an answer.
        """
        return Standing(
            room=self.room,
            slowness=self.slowness,
            prefill=self.prefill + new,
            requests=self.requests + 1,
            context=self.context + prompt,
            begun=self.begun + 1,
            growth=self.growth + length,
            kv_tokens=self.kv_tokens + wants,
        )


class Rate(NamedTuple):
    """What a score needs of an engine, the same for all requests that might go there.

    A tuple, as it is taken apart once for each engine and request.
    """

    base: float  # seconds that what is there already costs
    step: float  # seconds of a step without prompts
    prefill: float
    per_step: int
    slowness: float
    free: float  # KV tokens that nobody speaks for
    dear: float  # seconds of waiting for each token that is wanting
    stalled: float  # how many times its own work a long prompt costs others


def rate(engine: Standing, costs: Costs, weights: Weights, length: float, reserve: float) -> Rate:
    """Take an engine as it stands.

    Args:
        engine: How it stands.
        costs: Of its steps.
        weights: The constants.
        length: Tokens of an answer.
        reserve: g, the share of the predicted output for which room is kept.
    """
    room, slowness = engine.room, engine.slowness
    load = costs.decode * engine.requests + costs.context * engine.context
    step = slowness * (costs.step + load)
    return Rate(
        slowness * (costs.prefill * engine.prefill + weights.slowing * load * length),
        step,
        engine.prefill,
        room.tokens_per_step,
        slowness,
        weights.fill * room.kv_tokens - engine.kv_tokens - reserve * (engine.growth + length),
        # KV comes free when requests end: a whole cache of it in a life of one.
        step * length / room.kv_tokens,
        0.0 if room.has_prefix_cache else weights.stalling * engine.begun,
    )


def scores(
    rates: Iterable[Rate], prompt: int, new: int, work: float, shared: int = 0
) -> list[float]:
    """Seconds; the engine with the least should have the request.

    Args:
        rates: Of the engines.
        prompt: Tokens of the prompt.
        new: Those that are not cached there.
        work: What `prefill_work` says of them, weighed with `Weights.spread`.
        shared: Leading tokens that running requests hold there.
    """
    wants = prompt - shared
    return [
        base
        + step * -(-(prefill + new) // per_step)
        + slowness * (work * (1.0 + stalled) if new > per_step else work)
        + (dear * (wants - free) if wants > free else 0.0)
        for base, step, prefill, per_step, slowness, free, dear, stalled in rates
    ]


def prefill_work(costs: Costs, prompt: int, hit: int = 0) -> float:
    """Seconds that the uncached part of a prompt takes: its tokens, and what they attend to."""
    return costs.prefill * (prompt - hit) + costs.attention * (prompt**2 - hit**2) / 2


def is_open(engine: Standing, free: float, weights: Weights) -> bool:
    """Whether there may be a request at all that has credit; `free` as in `Rate`."""
    return not engine.requests or (
        engine.requests < engine.room.requests
        and engine.prefill < weights.window * engine.room.tokens_per_step
        and free > 0.0
    )


def has_credit(engine: Standing, weights: Weights, new: int, spare: float) -> bool:
    """Whether a request would begin there with the very next step.

    An idle engine takes any. One that runs takes what fits in its KV cache, with what answers are
    predicted to grow, and beside the prompts that wait there in its next step; a prompt longer than
    a step waits until none is before it.

    Args:
        engine: How it stands.
        weights: The constants.
        new: Tokens of the prompt that are not cached there.
        spare: KV tokens that would be left, with the request and all growth.
    """
    if not engine.requests:
        return True
    if engine.requests >= engine.room.requests or spare < 0.0:
        return False
    window = weights.window * engine.room.tokens_per_step
    return engine.prefill <= 0.0 or engine.prefill + new <= window
