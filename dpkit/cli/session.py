"""The prompts of one run through one client: each gets exactly one answer, however the run ends.

Prompts are taken while there is room and wait where they come from otherwise. What goes wrong with
one is that one's affair. Knows nothing of signals or of clusters.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from dpkit.cli.prompts import Prompt, read_prompts
from dpkit.cli.words import describe
from dpkit.errors import ClusterClosed, DpkitError, Draining
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.cli.answers import Answers, Output, Turn
    from dpkit.cli.report import Tally
    from dpkit.messages import SamplingParams
    from dpkit.nursery.client import Client
    from dpkit.nursery.stream import OutputStream

_log = logging.getLogger(__name__)

_INTERRUPTED = "the run was stopped before this was answered"


@define(eq=False, kw_only=True)
class Session:
    """Sends prompts, prints answers and counts them.

    Args:
        client: Answers.
        prompts: None: they come from standard input.
        chat: Put prompts into the model's chat template.
        sampling: Of every prompt.
        answers: Where they go.
        output: Under `answers`; the session ends when it breaks.
        tally: Counts.
        most: Prompts taken whose answers are not out yet.
    """

    client: Client
    prompts: Sequence[str] | None
    chat: bool
    sampling: SamplingParams
    answers: Answers
    output: Output
    tally: Tally
    most: int
    _intake: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _room: trio.Semaphore = field(init=False)
    _unsent: set[Turn] = field(factory=set, init=False)
    _all_sent: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def __attrs_post_init__(self) -> None:
        self._room = trio.Semaphore(self.most)

    def stop_taking(self) -> None:
        """Take no more prompts; those that were taken are answered."""
        self._intake.cancel()

    async def wait_sent(self) -> None:
        """Wait until every prompt that was taken is with the cluster."""
        while self._unsent:
            await self._all_sent.park()

    async def run(self) -> None:
        """Answer all prompts, each from a task of its own; return when all have ended.

        Raises:
            DpkitError: standard input cannot be read on; what was read before it is answered.
            OSError: nobody reads our output any more.
        """
        failure: Exception | None = None  # raised bare, outside the nursery, which would wrap it
        async with trio.open_nursery() as nursery:
            self.output.on_broken = nursery.cancel_scope.cancel
            with self._intake:
                try:
                    await self._take_all(nursery)
                except DpkitError as error:
                    failure = error
        if failure := self.output.error or failure:
            raise failure

    async def _take_all(self, nursery: trio.Nursery) -> None:
        async def take(prompt: Prompt) -> None:
            await self._room.acquire()
            turn = self.answers.turn(prompt.text, self._room.release)
            self._unsent.add(turn)
            nursery.start_soon(self._answer, prompt, turn)

        if self.prompts is None:
            await read_prompts(take)
            return
        left = deque(self.prompts)
        try:
            while left:
                await take(Prompt(left[0]))
                left.popleft()
        finally:
            for prompt in left:  # stopped: those that nobody will send
                self._ended(None, self.answers.turn(prompt, lambda: None), FinishReason.ABORT)

    async def _answer(self, prompt: Prompt, turn: Turn) -> None:
        """Stream one answer; what goes wrong with it is its own affair."""
        stream: OutputStream | None = None
        self.tally.began(trio.current_time())
        try:
            if prompt.problem is not None:
                raise DpkitError(prompt.problem)  # noqa: TRY301 - one way out for all
            asked = [{"role": "user", "content": prompt.text}] if self.chat else prompt.text
            stream = self.client.generate(asked, self.sampling)
            async with stream:
                self._sent(turn)
                async for output in stream:
                    turn.text(stream, output.text)
        except trio.Cancelled:
            self._ended(stream, turn, FinishReason.ABORT)
            raise
        except (Draining, ClusterClosed):
            self._ended(stream, turn, FinishReason.ABORT)
        except Exception as error:  # noqa: BLE001 - a policy's or a tokenizer's, of this prompt
            if not isinstance(error, DpkitError):
                _log.debug("prompt failed", exc_info=True)
            self._ended(stream, turn, FinishReason.ERROR, describe(error))
        else:
            self.tally.add(stream.completion(), trio.current_time())
            turn.finished(stream.completion())

    def _sent(self, turn: Turn) -> None:
        self._unsent.discard(turn)
        if not self._unsent:
            self._all_sent.unpark_all()

    def _ended(
        self,
        stream: OutputStream | None,
        turn: Turn,
        reason: FinishReason,
        error: str = _INTERRUPTED,
    ) -> None:
        self._sent(turn)
        self.tally.ended_at = trio.current_time()
        if reason is FinishReason.ABORT:
            self.tally.aborted += 1
        else:
            self.tally.failed += 1
        turn.ended(stream, reason, error)
