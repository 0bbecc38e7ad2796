"""The coalescing mailbox of one request: the pump puts, the request's task takes everything.

Never full: what arrives while the reader is away is merged into one pending output, so a slow
reader costs memory in proportion to its own text and nobody else's time. A reader that keeps pace
gets the very outputs that were put. Knows nothing of engines.
"""

from __future__ import annotations

import trio

from dpkit.messages import EngineOutput
from dpkit.nursery.bell import Bell


class Mailbox:
    """Single reader, any number of writers, all on Trio's thread."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._pending: EngineOutput | _Merged | None = None
        self._closed = False
        self._taking = False  # not whether it sleeps: a reader that was rung sleeps no more
        self._bell = Bell()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        pending = "nothing" if self._pending is None else f"{len(self._pending.token_ids)} tokens"
        return f"<Mailbox {self._request_id}: {state}, {pending} pending>"

    def put_nowait(self, output: EngineOutput) -> None:
        """Merge `output` into what is pending and wake the reader."""
        if self._pending is None:
            self._pending = output
        else:
            if not isinstance(self._pending, _Merged):
                self._pending = _Merged(self._pending)
            self._pending.add(output)
        self._bell.ring()

    def close(self) -> None:
        """Let a parked reader go with ClosedResourceError; what comes later is never read."""
        self._closed = True
        self._bell.ring()
        self._bell.retire()

    async def take(self) -> EngineOutput:
        """Wait until something is pending and return all of it as one output.

        Exactly one checkpoint, before anything is taken: a cancelled `take` has lost nothing.

        Raises:
            ClosedResourceError: the mailbox was closed, before or while waiting.
            BusyResourceError: another task is waiting already.
        """
        if self._taking:
            raise trio.BusyResourceError(
                f"request {self._request_id} is being read by another task"
            )
        self._taking = True
        try:
            if self._pending is None and not self._closed:
                await self._bell.wait()
            else:
                await trio.lowlevel.checkpoint()
        finally:
            self._taking = False
        pending, self._pending = self._pending, None
        if pending is None or self._closed:
            raise trio.ClosedResourceError(f"request {self._request_id} was closed")
        return pending.output() if isinstance(pending, _Merged) else pending


class _Merged:
    """Several outputs on their way to become one."""

    def __init__(self, first: EngineOutput) -> None:
        self.token_ids = list(first.token_ids)
        self._logprobs = list(first.logprobs)
        self._prompt_logprobs = first.prompt_logprobs
        self._last = first  # once the request has ended, the output that says so

    def add(self, output: EngineOutput) -> None:
        self.token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._last = output

    def output(self) -> EngineOutput:
        return EngineOutput(
            request_id=self._last.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self._last.finish_reason,
            error=self._last.error,
        )
