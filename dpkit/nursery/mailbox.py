"""The coalescing mailbox of one request: the pump puts, the request's task takes everything.

Never full: what arrives while the reader is away is merged into one pending output, so a slow
reader costs memory in proportion to its own text and nobody else's time. A reader that keeps pace
gets the very outputs that were put. Knows nothing of engines.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from dpkit.messages import EngineOutput
from dpkit.nursery.bell import RUNG, Bell, QuickBell

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")


class Mailbox:
    """Single reader, any number of writers, all on Trio's thread."""

    __slots__ = ("_bell", "_closed", "_pending", "_request_id", "_taking")

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
        self._closed, self._pending = True, None
        self._bell.ring()

    @types.coroutine
    def take(self, read: Callable[[EngineOutput], T]) -> Generator[Any, Any, T]:
        """Wait until something is pending, and return what `read` makes of all of it.

        One generator for all of that, as it is made and run through for every token. Exactly one
        checkpoint, before anything is taken: a cancelled `take` has lost nothing.

        Raises:
            ClosedResourceError: the mailbox was closed, before or while waiting.
            BusyResourceError: another task is waiting already.
            What `read` raises.
        """
        if self._taking:
            raise trio.BusyResourceError(
                f"request {self._request_id} is being read by another task"
            )
        self._taking = True
        try:
            if self._pending is not None or self._closed:
                yield from trio.lowlevel.checkpoint()  # noqa: ASYNC105 - no coroutine, so no await
            elif isinstance(bell := self._bell, QuickBell):
                answer = yield bell.lie_down()
                if answer is not RUNG:
                    answer.unwrap()
            else:
                yield from bell.wait()
        finally:
            self._taking = False
        pending, self._pending = self._pending, None
        if pending is None or self._closed:
            raise trio.ClosedResourceError(f"request {self._request_id} was closed")
        try:
            return read(pending.output() if isinstance(pending, _Merged) else pending)
        finally:
            del pending  # its error, if it has one, is raised: its traceback must not lead to it


class _Merged:
    """Several outputs on their way to become one."""

    __slots__ = ("_last", "_logprobs", "_prompt_logprobs", "token_ids")

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
