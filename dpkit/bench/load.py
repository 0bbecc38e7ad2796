"""Sends the requests of a plan and keeps the record of each: open loop and closed loop.

Open loop: each request begins at its moment, however many are under way, as users do who know
nothing of each other; when this generator was late, its record tells. Closed loop: so many are
under way, and the next begins when one has ended. Knows nothing of HTTP or of clusters.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import trio

from dpkit.bench.plan import asks
from dpkit.bench.record import AskFailed, Outcome, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.bench.plan import Ask, Load
    from dpkit.bench.prompts import PromptMaker
    from dpkit.bench.target import Target

_PROBE_S = 0.01
"""How often the generator sees whether it is on time: a token every 10 ms is a quick model."""


class Generator:
    """One run of a load on a target.

    Args:
        target: Answers.
        load: What is sent.
        prompts: Makes the prompts.
    """

    def __init__(self, target: Target, load: Load, prompts: PromptMaker) -> None:
        self.load = load
        self.records: list[Record] = []
        """Of all requests that began, in that order."""
        self.lags = array("d")
        """By how much a sleep of this program's was too long, again and again: what its own clock
        is worth. Seconds."""
        self.origin = trio.current_time()
        self.running = 0
        """Requests under way."""
        self.measured = 0
        self.ended = 0
        """Among those measured."""
        self._target = target
        self._asks = asks(load, prompts)

    async def run(self) -> None:
        """Send all and wait for the last answer. Cancel it to stop: records say how far all got."""
        self.origin = trio.current_time()
        async with trio.open_nursery() as probing:
            probing.start_soon(self._probe)
            async with trio.open_nursery() as nursery:
                if self.load.concurrency is None:
                    await self._begin_in_time(nursery)
                else:
                    for _ in range(self.load.concurrency):
                        nursery.start_soon(self._ask_on)
            probing.cancel_scope.cancel()

    async def _begin_in_time(self, nursery: trio.Nursery) -> None:
        """Open loop. The next prompt is made before its moment, not at it."""
        for ask in self._left():
            assert ask.start is not None  # noqa: S101 - each has one in an open loop
            if ask.start >= self.load.ends_after:
                return
            intended = self.origin + ask.start
            await trio.sleep_until(intended)
            nursery.start_soon(self._ask, ask, self._record(ask, intended))

    async def _ask_on(self) -> None:
        """One place of a closed loop."""
        for ask in self._left():
            now = trio.current_time()
            if now - self.origin >= self.load.ends_after:
                return
            await self._ask(ask, self._record(ask, now))

    def _left(self) -> Iterator[Ask]:
        while self.load.requests is None or self.measured < self.load.requests:
            if (ask := next(self._asks, None)) is None:
                return
            yield ask

    def _record(self, ask: Ask, intended: float) -> Record:
        seconds = intended - self.origin if ask.start is None else ask.start
        is_warm_up = self.load.is_warm_up(ask.index, seconds)
        self.measured += not is_warm_up
        record = Record(
            index=ask.index,
            intended=intended,
            is_warm_up=is_warm_up,
            prompt_tokens=ask.prompt.tokens,
        )
        self.records.append(record)
        return record

    async def _ask(self, ask: Ask, record: Record) -> None:
        record.began = trio.current_time()
        self.running += 1
        try:
            with trio.move_on_after(self.load.timeout) as scope:
                await self._target.ask(ask, record)
                record.outcome = Outcome.FINISHED
            if scope.cancelled_caught:
                raise AskFailed("timeout", f"no whole answer within {self.load.timeout:g} s")  # noqa: TRY301
        except AskFailed as error:
            record.outcome = Outcome.FAILED
            record.error_kind, record.error = error.kind, str(error)
        finally:
            record.ended = trio.current_time()
            self.running -= 1
            self.ended += not record.is_warm_up

    async def _probe(self) -> None:
        """Be late where everything here is; what that was goes into the report."""
        while True:
            due = trio.current_time() + _PROBE_S
            await trio.sleep_until(due)
            self.lags.append(trio.current_time() - due)
