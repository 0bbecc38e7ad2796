"""Where a model's steps run: on Trio's thread, or in the engine's one thread.

A model that costs nothing (echo, cost) runs inline, which keeps simulations deterministic. A real
model gets one dedicated thread for its engine's whole life: OpenMP keeps a thread pool per calling
thread, so Trio's shared worker threads would each grow their own; and handing over by a queue and
`run_sync_soon` costs half of what `trio.to_thread.run_sync` does (55 against 119 microseconds).
Owns the engine's KV cache, which is made and used in that thread. Knows nothing of scheduling.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import outcome
import trio

from dpkit.abc import Model
from dpkit.engine.checks import check_duration
from dpkit.engine.foreign import call
from dpkit.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.messages import Batch, StepResult

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs one engine's steps, one at a time."""

    async def execute(self, batch: Batch) -> StepResult:
        """Compute a step and let its duration pass; at least one checkpoint, exactly one inline."""

    async def execute_dummy(self) -> None:
        """Take part in a step of others; exactly one checkpoint."""


class Patience:
    """Whether a call into a thread is waited for whatever happens, as it is until `end`.

    For a hung call only: no thread can be killed, so an abandoned one runs on and is reported.
    """

    def __init__(self) -> None:
        self.ended = False
        self.on_end: Callable[[], None] = lambda: None

    def end(self) -> None:
        """Let a cancellation, past or to come, end the wait; the thread is lost."""
        self.ended = True
        self.on_end()


# Protected: Ctrl-C is for the program and waits for the next checkpoint. A KeyboardInterrupt that
# comes out of a model's code is then one that this code raised, and nobody else's affair.
@trio.lowlevel.enable_ki_protection
def _execute(model: Model, batch: Batch, cache: Any) -> StepResult:
    result = call(model, "execute", lambda: model.execute(batch, cache))
    check_duration(model, result)
    return result


@trio.lowlevel.enable_ki_protection
def _execute_dummy(model: Model, cache: Any) -> None:
    call(model, "execute_dummy", lambda: model.execute_dummy(cache))


@trio.lowlevel.enable_ki_protection
def _allocate(model: Model, num_blocks: int, block_size: int, name: str) -> Any:
    def allocate() -> Any:
        return model.allocate(num_blocks=num_blocks, block_size=block_size)

    try:
        return call(model, "allocate", allocate)
    except OutOfMemory as error:
        group = name.partition("#")[0].rpartition("-")[0]
        raise OutOfMemory(
            f"{error}: lower engines.{group}.kv.memory (or num_blocks, or count)"
        ) from error


class _InlineRunner:
    def __init__(self, model: Model, cache: Any) -> None:
        self._model = model
        self._cache = cache

    async def execute(self, batch: Batch) -> StepResult:
        result = _execute(self._model, batch, self._cache)
        await trio.sleep(result.duration_s)  # also the step's one checkpoint when it is 0
        return result

    async def execute_dummy(self) -> None:
        _execute_dummy(self._model, self._cache)
        await trio.lowlevel.checkpoint()


class _EngineThread:
    """A thread that runs what it is given, in order, for one Trio task at a time."""

    def __init__(self, name: str, patience: Patience) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        # A daemon only so that a hung step cannot keep a dying interpreter alive. In the context
        # of its engine's task, so that what a model logs tells whose step it was.
        work = partial(contextvars.copy_context().run, self._work)
        self._thread = threading.Thread(target=work, name=f"dpkit {name}", daemon=True)
        self._thread.start()
        self._waiting: trio.lowlevel.Task | None = None
        self._raise_cancel: Callable[[], Any] | None = None  # of a cancellation that was refused
        self._patience = patience
        patience.on_end = self._let_go

    def _work(self) -> None:
        while (function := self._jobs.get()) is not None:
            result = outcome.capture(function)
            with contextlib.suppress(trio.RunFinishedError):  # abandoned, and Trio is gone by now
                self._token.run_sync_soon(self._hand_over, result)

    def _hand_over(self, result: outcome.Outcome[Any]) -> None:
        if self._waiting is not None:
            task, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(task, result)

    def _let_go(self) -> None:
        """Cancel a wait after all: Trio asks once only, and was told to wait for the step."""
        if self._raise_cancel is not None:
            self._hand_over(outcome.capture(self._raise_cancel))

    async def run(self, function: Callable[[], T]) -> T:
        self._waiting = trio.lowlevel.current_task()
        self._raise_cancel = None
        self._jobs.put(function)

        def abort(raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
            if not self._patience.ended:
                self._raise_cancel = raise_cancel
                return trio.lowlevel.Abort.FAILED  # a thread can't be interrupted: await the step
            self._waiting = None
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return result

    def stop(self) -> None:
        self._jobs.put(None)
        if not self._patience.ended:
            self._thread.join()
        elif self._thread.is_alive():
            _log.error("%s: its step does not end; the thread is left behind", self._thread.name)


class _ThreadRunner:
    def __init__(self, model: Model, cache: Any, thread: _EngineThread) -> None:
        self._model = model
        self._cache = cache
        self._thread = thread

    async def execute(self, batch: Batch) -> StepResult:
        result = await self._thread.run(lambda: _execute(self._model, batch, self._cache))
        if result.duration_s:
            await trio.sleep(result.duration_s)
        return result

    async def execute_dummy(self) -> None:
        if type(self._model).execute_dummy is Model.execute_dummy:
            await trio.lowlevel.checkpoint()  # not worth the way to the thread and back
        else:
            await self._thread.run(lambda: _execute_dummy(self._model, self._cache))


@asynccontextmanager
async def open_runner(
    model: Model,
    *,
    num_blocks: int,
    block_size: int,
    name: str,
    patience: Patience | None = None,
) -> AsyncIterator[Runner]:
    """Allocate one engine's KV cache and open the place where its steps run.

    Args:
        model: Shared by the engines of its group.
        num_blocks: Size of the cache, in blocks.
        block_size: Tokens a block holds.
        name: Of the engine; its thread is called ``dpkit NAME``.
        patience: Ended by whoever gives up on a hung call; None: nobody does.

    Resource handling:
        Cache and thread live exactly as long as the block; leaving it joins the thread. A step
        cannot be cancelled, so the thread is idle by then and the join takes no time. The one
        exception is an engine that was abandoned in a hung step: its thread is left behind, loudly.

    Error handling:
        What the model raises comes out unchanged, from here or from `execute`; what is no
        `Exception`, or no result, as `ModelFailed`; `OutOfMemory` names the keys to change.
    """
    if model.inline:
        yield _InlineRunner(model, _allocate(model, num_blocks, block_size, name))
        return
    thread = _EngineThread(name, patience or Patience())
    try:
        cache = await thread.run(lambda: _allocate(model, num_blocks, block_size, name))
        yield _ThreadRunner(model, cache, thread)
    finally:
        thread.stop()
