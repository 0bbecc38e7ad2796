"""The coalescing mailbox of one request: the pump puts, the request's task takes everything.

Never full: what arrives while the reader is away is merged into one pending output, so a slow
reader costs memory in proportion to its own text and nobody else's time. Knows nothing of engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.messages import EngineOutput

if TYPE_CHECKING:
    from dpkit.messages import TokenLogprob


class Mailbox:
    """Single reader, any number of writers, all on Trio's thread."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._last: EngineOutput | None = None  # the output that carries the finish reason
        self._closed = False
        self._taking = False  # not the lot's length: an unparked reader has left the lot already
        self._lot = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._last else "open"
        return f"<Mailbox {self._request_id}: {state}, {len(self._token_ids)} tokens pending>"

    def put_nowait(self, output: EngineOutput) -> None:
        """Merge `output` into what is pending and wake the reader."""
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            self._last = output
        self._lot.unpark()

    def close(self) -> None:
        """Let a parked reader go with ClosedResourceError; what comes later is never read."""
        self._closed = True
        self._lot.unpark_all()

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
            if self._token_ids or self._last is not None or self._closed:
                await trio.lowlevel.checkpoint()
            else:
                await self._lot.park()
        finally:
            self._taking = False
        if self._closed:
            raise trio.ClosedResourceError(f"request {self._request_id} was closed")
        return self._drain()

    def _drain(self) -> EngineOutput:
        last = self._last
        output = EngineOutput(
            request_id=self._request_id,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=last.finish_reason if last else None,
            error=last.error if last else None,
        )
        self._token_ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs = ()
        self._last = None
        return output
