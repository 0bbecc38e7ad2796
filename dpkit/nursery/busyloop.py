"""The engine task: drain input, publish counts, step, deliver, publish counts.

Drives one `EngineCore` for one life of one engine. All state of the core is touched here only, on
Trio's thread, between steps; only the model's `execute` may run elsewhere. Knows nothing of
balancing or of who its clients are: outputs go back where the request came from, stats go to the
fan-in.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from dpkit.errors import DpkitError, EngineLost, InternalError, OutOfMemory, describe, reason
from dpkit.link.local import LocalLink
from dpkit.messages import EngineStats, StepWork
from dpkit.nursery.handout import HandOut
from dpkit.nursery.inbox import NOBODY, duplicate, failed, lost
from dpkit.nursery.life import broken_down
from dpkit.nursery.meter import Meter, first_prompts
from dpkit.nursery.runner import Patience, open_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from dpkit.abc import Model
    from dpkit.engine.core import EngineCore, EngineCoreStatistics
    from dpkit.engine.limits import EngineLimits
    from dpkit.engine.publish import PublishGate
    from dpkit.messages import (
        Batch,
        EngineId,
        EngineOutput,
        GenerateRequest,
        StepReport,
        StepResult,
    )
    from dpkit.nursery.inbox import Deliver, Inbox, OnReport, Sender
    from dpkit.nursery.lockstep import Lockstep
    from dpkit.nursery.runner import Runner

_log = logging.getLogger(__name__)


class BusyLoop:
    """One life of one engine, in this process: a `dpkit.nursery.life.Life`.

    Args:
        engine: The incarnation this life is known by.
        index: Rank of the engine in the cluster.
        model: Shared with the other engines of the group.
        core: Scheduler and blocks; owned by this loop from now on.
        inbox: Where requests and aborts come in; closing it ends the loop gracefully.
        publish: Takes stats, synchronously. None: nothing is published.
        gate: Says when the counts have changed enough to be published.
        on_lost: Told that this life is over, before its requests are: whoever places them anew
            must know by then.
        flush: Called when all outputs of a drain or a step have been delivered, with the ids of the
            requests that the drain aborted: for links that send them on together.
        lockstep: Its part in a group that steps together; None: it steps alone.
    """

    def __init__(
        self,
        *,
        engine: EngineId,
        index: int,
        model: Model,
        core: EngineCore,
        inbox: Inbox,
        publish: Callable[[EngineStats], None] | None,
        gate: PublishGate,
        on_lost: Callable[[Exception], None] = lambda _: None,
        flush: Callable[[Sequence[str]], None] = lambda _: None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.engine = engine
        self.core = core
        self.inbox = inbox
        inbox.give_back = self._give_back
        self.lockstep = lockstep
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.step_started_at: float | None = None
        """When the step under way, or the allocation before the first, began; for a watchdog."""
        self.last_step = StepWork()
        """What the last step computed."""
        self.cause: Exception | None = None
        """Why this life is over, once it is lost."""
        self._index = index
        self._model = model
        self.meter = Meter()
        self._publish = publish
        self._gate = gate
        self._on_lost = on_lost
        self._flush = flush
        self._patience = Patience()
        self._deliver: dict[str, Deliver] = {}
        self._hand_out = HandOut(self._send, self._check_alive)
        self._seq = 0
        self._steps = 0
        self._has_drained = False
        self._step_time_s = 0.0
        self._was_halved = False  # the last step, and the next one is the second try
        self._models_error: Exception | None = None

    def __repr__(self) -> str:
        running, waiting = self.core.get_request_counts()
        state = "ended" if self.ended.is_set() else "ready" if self.ready.is_set() else "starting"
        return f"<BusyLoop {self.engine}: {state}, {waiting} waiting, {running} running>"

    async def run(self) -> None:
        """Serve until the inbox is closed and nothing is left to do.

        Error handling:
            What the model raises ends this life: its requests get `EngineLost`, the error itself
            comes out of here.
        """
        limits = self.core.limits
        self.step_started_at = trio.current_time()  # to allocate may hang as well as any step
        try:
            async with open_runner(
                self._model,
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                name=str(self.engine),
                patience=self._patience,
            ) as runner:
                self.step_started_at = None
                self.ready.set()
                await self._serve(runner)
        except Exception as error:
            where = f"step {self._steps + 1}" if self.ready.is_set() else "allocate"
            error.add_note(f"in engine {self.engine}, {where}")
            self.lose(self._judge(error))
            raise
        except trio.Cancelled:
            self.lose(EngineLost(f"engine {self.engine} was stopped", engine=self.engine))
            raise
        finally:
            self.inbox.close()
            self.ended.set()

    def _judge(self, error: Exception) -> Exception:
        """What ended this life: what a model raises as it is, all else as the bug that it is."""
        theirs = error is self._models_error or not self.ready.is_set()
        if theirs or isinstance(error, DpkitError):
            return error
        return broken_down(self.engine, error)

    async def _serve(self, runner: Runner) -> None:
        while True:
            aborted = self._drain()
            lockstep = self.lockstep
            in_wave = lockstep is not None and lockstep.look(self.core.has_requests())
            self._publish_if_changed()  # a long step must not hide what arrived before it
            self._flush(aborted)
            batch = self.core.schedule()
            if self._has_drained or (batch is not None and self.core.work.prefill_tokens):
                self._report()  # what the step leaves undone is known by now
            if batch is not None:
                if (result := await self._execute(runner, batch)) is None:
                    continue
                self._steps += 1
                self.last_step = self.core.work
                outputs = self.core.apply(batch, result)
                self.meter.step(len(outputs), first_prompts(batch))
                await self._hand_out.run(outputs)
                self._publish_if_changed()
                self._flush(())
                self._report()
            elif self.core.has_requests():
                stuck = f"engine {self.engine} has requests it can neither run nor refuse"
                raise InternalError(stuck, engine=self.engine)
            elif in_wave:
                await self._execute_dummy(runner)
            else:
                self.core.check()  # idle: the cheapest moment to find a leaked block
                if self.inbox.closed:
                    return
                await self.inbox.wait()
            if in_wave and lockstep is not None:
                await lockstep.keep_step(self.core.has_requests())

    async def _execute_dummy(self, runner: Runner) -> None:
        """Keep those of the group company who have work."""
        self.step_started_at = trio.current_time()
        try:
            await runner.execute_dummy()
        except Exception as error:
            self._models_error = error
            raise
        finally:
            self.step_started_at = None

    async def _execute(self, runner: Runner, batch: Batch) -> StepResult | None:
        """Let the model compute a step; None: it was too large, a smaller one is to be tried."""
        self.step_started_at = began = trio.current_time()
        try:
            result = await runner.execute(batch)
        except Exception as error:
            if isinstance(error, (MemoryError, OutOfMemory)) and self._shrink(error):
                return None
            self._models_error = error
            raise
        finally:
            self.step_started_at = None
        self._check_alive()
        self._step_time_s = trio.current_time() - began
        self._was_halved = False
        return result

    def _check_alive(self) -> None:
        if self.cause is not None:  # given up meanwhile: nobody waits for the outputs
            raise self.cause

    def _shrink(self, error: Exception) -> bool:
        """Have the step tried again with half of its tokens, once."""
        if self._was_halved or self.cause is not None or not self.core.shrink():
            return False
        self._was_halved = True
        what = describe(error)
        _log.warning("engine %s halves its steps, for want of memory: %s", self.engine, what)
        return True

    def _drain(self) -> Sequence[str]:
        drained = self.inbox.drain()
        self._has_drained = bool(drained.aborts or drained.requests)
        self.core.abort(drained.aborts)
        self.meter.freed(drained.aborts)
        for request_id in drained.aborts:
            self._deliver.pop(request_id, None)
        for request, deliver in drained.requests:
            self._add(request, deliver)
        self._send(self.core.take_outputs())  # refusals
        return drained.aborts

    def _give_back(self, request_ids: Iterable[str], deliver: Deliver) -> Sequence[str]:
        """Give up requests that wait: they are in no step, so this may be in the middle of one."""
        theirs = [each for each in request_ids if self._deliver.get(each) == deliver]
        taken = self.core.take_back(theirs)
        for request_id in taken:
            del self._deliver[request_id]
        self._publish_if_changed()
        return taken

    def _add(self, request: GenerateRequest, deliver: Deliver) -> None:
        request_id = request.request_id
        if request_id in self._deliver:  # another client's: its outputs must not be mixed up
            deliver(self.engine, failed(request_id, duplicate(request_id)))
            return
        self._deliver[request_id] = deliver
        self.core.add(request)

    def _send(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            # Aborted during the step: its client has left, and may have asked anew by this id.
            if self.inbox.is_aborted(output.request_id):
                continue
            deliver = self._deliver[output.request_id]
            if output.finish_reason is not None:
                del self._deliver[output.request_id]
            deliver(self.engine, output)

    def lose(self, cause: Exception) -> None:
        """End this life: every request of it, drained or not, gets `EngineLost`; idempotent.

        The watchdog calls it while a step hangs; `run` ends when that step does, or when it is
        cancelled after `abandon`.
        """
        if self.cause is not None:
            return
        self.cause = cause
        self.inbox.close()
        self._on_lost(cause)
        said = reason(cause)
        held = [each for each in self._deliver.items() if not self.inbox.is_aborted(each[0])]
        self._deliver.clear()
        self.meter.end()
        queued = self.inbox.drain().requests  # perhaps with an id of the former, of another client
        held += ((request.request_id, deliver) for request, deliver in queued)
        for request_id, deliver in held:
            deliver(self.engine, failed(request_id, lost(self.engine, request_id, said, cause)))
        self.core.end()

    @property
    def model_class(self) -> str:
        """The class that computes the steps, as a config would name it."""
        return f"{type(self._model).__module__}:{type(self._model).__qualname__}"

    @property
    def delay(self) -> str:
        """What it has been at since `step_started_at`."""
        return f"{'a step' if self.ready.is_set() else 'to allocate its KV cache'} has taken"

    @property
    def pid(self) -> None:
        """None: it lives in this process."""

    @property
    def limits(self) -> EngineLimits:
        """What the engine may hold and do at once."""
        return self.core.limits

    def link(
        self,
        deliver: Deliver,
        on_report: OnReport | None = None,
        *,
        hears_all: bool = False,  # noqa: ARG002 - here nobody is late
    ) -> LocalLink:
        """A link to this life for one client."""
        return LocalLink(self.engine, self.inbox, deliver, self.meter, on_report)

    def close(self) -> None:
        """Take nothing new, and end when what is there is finished."""
        self.inbox.close()

    def statistics(self) -> EngineCoreStatistics:
        """What it has done since its birth."""
        return self.core.statistics()

    def audit(self, charged: AbstractSet[str]) -> Iterator[str]:
        """The loop against what is charged to it, against its scheduler, and against its blocks.

        A request or an abort that is still in the inbox is reckoned with.
        """
        held = {name for name in self._deliver if not self.inbox.is_aborted(name)}
        held |= set(self.inbox.queued)
        yield from (f"{name} is charged to {self.engine}, which lost it" for name in charged - held)
        yield from (f"{name} is on {self.engine}, charged to nobody" for name in held - charged)
        try:
            self.core.check()
        except InternalError as error:
            yield f"engine {self.engine}: {error}"
        hand_out = self._hand_out
        drained = len(self._deliver.keys() - hand_out.ended)
        scheduled = sum(self.core.get_request_counts())
        if scheduled != drained:
            yield f"{self.engine} took {drained} requests, its scheduler has {scheduled}"
        is_silent = self._publish is None or self.cause or hand_out.is_interrupted
        told = None if is_silent else sum(self._gate.counts)
        if told not in (None, scheduled):
            yield f"{self.engine} published {told} requests, its scheduler has {scheduled}"

    @property
    def lost_with_its_group(self) -> bool:
        """Whether others took it with them: in this process, engines step alone."""
        return False

    @property
    def is_interruptible(self) -> bool:
        """Whether a cancellation ends a step: a simulated one, but none that runs in a thread."""
        return self._model.inline

    def abandon(self) -> None:
        """Let a cancellation end `run` in the middle of a step that hangs in its thread."""
        self._patience.end()

    @property
    def stamp(self) -> tuple[int, int]:
        """What its counts are told with: the wave and the step of its group, or its own steps."""
        return (0, self._steps) if self.lockstep is None else self.lockstep.stamp

    def report(self, sender: Sender = NOBODY) -> StepReport:
        """How much work this engine's requests are, and how long its last step took."""
        return self.core.report(
            self._step_time_s, self.last_step, sent=sender.sent, acknowledged=sender.acknowledged
        )

    def _report(self) -> None:
        """Tell each client that wants to know, with its own counts."""
        for sender in self.inbox.senders:
            if sender.on_report is not None:
                sender.on_report(self.engine, self.report(sender))

    def _publish_if_changed(self) -> None:
        if self._publish is None:
            return
        running, waiting = self.core.get_request_counts()
        kv_cache_usage = self.core.get_kv_cache_usage()
        if self._gate.due(running, waiting, kv_cache_usage):
            self._seq += 1
            wave, step = self.stamp
            self._publish(
                EngineStats(
                    engine=self.engine,
                    index=self._index,
                    seq=self._seq,
                    waiting=waiting,
                    running=running,
                    kv_cache_usage=kv_cache_usage,
                    current_wave=wave,
                    step_counter=step,
                    report=self.report(),
                )
            )
