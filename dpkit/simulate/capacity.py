"""How many requests a second a pool could finish at best: what load 1.0 means for a trace.

All requests are there from the start, and an ideal dispatcher that knows each answer's length hands
them out: to an engine that can begin at once and has room to the end, if possible one that has
computed the prompt's prefix before. No policy under test has a part in it, so the load is the same
for all of them. Runs the product's engines, as `dpkit.simulate.run` does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio
import trio.testing
from attrs import define, evolve, field, frozen

from dpkit._trio import seeded_scheduler
from dpkit.messages import SamplingParams
from dpkit.names import PolicyName
from dpkit.nursery.cluster import open_cluster
from dpkit.simulate.prompts import prompt_of
from dpkit.simulate.run import bare_interrupt, seldom_collected
from dpkit.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import EngineOutput
    from dpkit.nursery.cluster import Cluster
    from dpkit.simulate.run import Scenario
    from dpkit.traces import Ask

LOOK_AHEAD = 128
"""Requests at the head of the queue that are looked at for one that suits an engine."""


def capacity_rps(
    scenario: Scenario, *, on_progress: Callable[[int], None] = lambda _: None
) -> float:
    """Requests a second at which the trace's requests are finished, if none is ever wanting.

    Args:
        scenario: Whose engines, and whose requests; neither its policy nor its times count.
        on_progress: Told now and then how many requests have ended.
    """
    balancer = evolve(scenario.config.balancer, policy=PolicyName.ROUND_ROBIN.value)
    config = evolve(scenario.config, balancer=balancer)
    asks = scenario.trace.asks
    clock = trio.testing.MockClock(autojump_threshold=0)
    with seeded_scheduler(scenario.seed), seldom_collected(), bare_interrupt():
        seconds = trio.run(_main, config, asks, on_progress, clock=clock)
    return len(asks) / seconds


async def _main(config: Config, asks: tuple[Ask, ...], on_progress: Callable[[int], None]) -> float:
    async with open_cluster(config) as cluster:
        ideal = IdealDispatcher(cluster, asks, on_progress)
        began = trio.current_time()
        try:
            ideal.hand_out()
            await ideal.done.wait()
        finally:
            ideal.end()
        return trio.current_time() - began


@define(eq=False)
class _Engine:
    """What the dispatcher has given to one engine."""

    name: str
    limits: EngineLimits
    requests: int = 0
    to_prefill: int = 0
    tokens: int = 0
    """Prompts and whole answers of all it has."""

    def takes(self, prompt: int, new: int, output: int) -> bool:
        """Whether it could begin with this in its next step, and finish it without preemption."""
        limits = self.limits
        if not self.requests:
            return True
        return (
            self.requests < limits.max_num_seqs
            and self.tokens + prompt + output <= limits.kv_tokens
            and (not self.to_prefill or self.to_prefill + new <= limits.max_num_batched_tokens)
        )


@frozen
class _Block:
    """Where a prefix was sent; whoever brought it may still be computing it."""

    engine: _Engine
    bringer: int


@define(eq=False)
class IdealDispatcher:
    """Who hands out a queue that is never empty, and knows how long each answer will be."""

    cluster: Cluster
    asks: tuple[Ask, ...]
    on_progress: Callable[[int], None]
    done: trio.Event = field(factory=trio.Event, init=False)
    _queue: deque[int] = field(init=False)
    _engines: list[_Engine] = field(init=False)
    _blocks: dict[int, _Block] = field(factory=dict, init=False)
    _computing: set[int] = field(factory=set, init=False)
    _ended: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._queue = deque(range(len(self.asks)))
        slots = self.cluster._slots  # noqa: SLF001 - the limits are no part of the cluster's face
        self._engines = [_Engine(slot.name, slot.life.limits) for slot in slots]

    def hand_out(self) -> None:
        """Give out whatever some engine can begin with."""
        passed: list[int] = []
        closed: set[str] = set()
        while self._queue and len(passed) < LOOK_AHEAD and len(closed) < len(self._engines):
            number = self._queue.popleft()
            engine, new = self._choose(self.asks[number])
            ask = self.asks[number]
            if engine is not None and engine.takes(ask.prompt_tokens, new, ask.output_tokens):
                self._send(number, engine, new)
                continue
            passed.append(number)
            if engine is not None:
                closed.add(engine.name)
        self._queue.extendleft(reversed(passed))

    def end(self) -> None:
        """Hand out nothing any more: what ends from here on is aborted, and leaves no room."""
        self._queue.clear()

    def _choose(self, ask: Ask) -> tuple[_Engine | None, int]:
        """The engine that suits a request, and the tokens it would compute; None: wait."""
        found = self._home(ask)
        if found is not None:
            home, hit = found
            if home.bringer in self._computing:
                return None, 0
            return home.engine, ask.prompt_tokens - hit
        new = ask.prompt_tokens
        return min(self._engines, key=lambda e: (e.to_prefill, e.tokens, e.requests)), new

    def _home(self, ask: Ask) -> tuple[_Block, int] | None:
        """Where the longest known part of its prompt is, if that is worth the way."""
        if not self._engines[0].limits.prefix_cache:
            return None
        found = None
        for count, block in enumerate(ask.blocks, start=1):
            if (home := self._blocks.get(block)) is None:
                break
            found = home, min(count * BLOCK_TOKENS, ask.prompt_tokens - 1)
        return found if found and found[1] >= ask.prompt_tokens / 4 else None

    def _send(self, number: int, engine: _Engine, new: int) -> None:
        ask = self.asks[number]
        engine.requests += 1
        engine.to_prefill += new
        engine.tokens += ask.prompt_tokens + ask.output_tokens
        self._computing.add(number)
        if engine.limits.prefix_cache:
            for block in ask.blocks:
                known = self._blocks.get(block)
                if known is None or known.engine is not engine:
                    self._blocks[block] = _Block(engine, number)

        def on_output(output: EngineOutput) -> None:
            self._hear(number, engine, new, output)

        self.cluster.client.submit(
            prompt_of(ask, number),
            SamplingParams(max_tokens=ask.output_tokens, seed=0),
            engine=engine.name,
            sink=on_output,
        )

    def _hear(self, number: int, engine: _Engine, new: int, output: EngineOutput) -> None:
        if number in self._computing:
            self._computing.remove(number)
            engine.to_prefill -= new
            self.hand_out()
        if output.finish_reason is None:
            return
        ask = self.asks[number]
        engine.requests -= 1
        engine.tokens -= ask.prompt_tokens + ask.output_tokens
        self._ended += 1
        self.on_progress(self._ended)
        if self._ended == len(self.asks):
            self.done.set()
        else:
            self.hand_out()
