"""The face of one engine: requests in, steps, outputs. Sans-IO; the busy loop drives it.

Knows a model's spec and its name, and runs it only in `step`, for callers without a loop of their
own. The caller owns the model and its cache. Everything here is synchronous and belongs to one
task; between `schedule` and `apply` only the model may be elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from dpkit.engine.checks import check_result, find_problem
from dpkit.engine.request import Request
from dpkit.engine.scheduler import Scheduler
from dpkit.errors import RequestRejected
from dpkit.messages import EngineOutput, StepReport
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.abc import Model
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import Batch, GenerateRequest, StepResult, StepWork


@frozen(kw_only=True)
class EngineCoreStatistics:
    """One engine at one moment, and what it has done since its birth."""

    running: int
    waiting: int  # preempted ones included
    kv_cache_usage: float
    free_blocks: int
    num_blocks: int
    peak_kv_usage: float
    steps: int
    requests_finished: int  # stop or length
    requests_aborted: int
    requests_taken_back: int  # waited, and went elsewhere: neither finished nor aborted
    requests_refused: int
    prompt_tokens: int  # of requests that gave a first token
    output_tokens: int
    preemptions: int
    prefix_hit_tokens: int  # tokens that need not be computed, after a preemption too
    steps_halved: int  # for want of memory
    prefix_query_tokens: int = 0  # looked for in the cache, found or not


class EngineCore:
    """Scheduler, blocks and refusals of one engine with one model."""

    def __init__(self, model: Model, *, limits: EngineLimits) -> None:
        """Make an idle engine.

        Args:
            model: What will execute the batches.
            limits: Bounds of the scheduler and the block pool.
        """
        self.model = model
        self.limits = limits
        spec = model.spec
        # Others cannot be sampled; a model that is told to ban them need not cope with them.
        self._eos_token_ids = frozenset(i for i in spec.eos_token_ids if i < spec.vocab_size)
        self._scheduler = Scheduler(limits)
        self._refusals: dict[str, EngineOutput] = {}
        self._num_refused = 0

    def __repr__(self) -> str:
        running, waiting = self.get_request_counts()
        pool = self._scheduler.pool
        return f"<EngineCore running={running} waiting={waiting} {pool}>"

    def step(self, cache: Any = None) -> list[EngineOutput]:
        """Run one step to its end, and return everything there is to deliver: the heart."""
        batch = self.schedule()
        if batch is None:
            return self.take_outputs()
        result = self.model.execute(batch, cache)
        return [*self.take_outputs(), *self.apply(batch, result)]

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. A bad one is refused by an output, never by an exception."""
        problem = self._problem(request)
        if problem is None:
            self._scheduler.add(Request(request, self._eos_token_ids))
            return
        self._num_refused += 1
        error = RequestRejected(f"cannot serve request: {problem}", request_id=request.request_id)
        self._refusals[request.request_id] = EngineOutput(
            request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error
        )

    def _problem(self, request: GenerateRequest) -> str | None:
        """Why a request cannot be taken in, if so."""
        if request.request_id in self._scheduler:
            return "another request with its id is still in this engine; give each its own"
        return find_problem(request, self.limits, self.model.spec)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests whose clients have left, in whatever state; they give no output any more.

        Idempotent; unknown ids are ignored. Blocks of a step in flight are free after its `apply`.
        """
        for request_id in request_ids:
            self._refusals.pop(request_id, None)
            self._scheduler.abort(request_id)

    def take_back(self, request_ids: Iterable[str]) -> list[str]:
        """Drop those of these requests that wait, and return them: somebody else will have them.

        A request that runs is left alone, also while its first step is in flight.
        """
        taken = [each for each in request_ids if each in self._scheduler.waiting]
        for request_id in taken:
            self._scheduler.abort(request_id, is_taken_back=True)
        return taken

    def end(self) -> None:
        """Drop all requests, since this life is over: a step in flight will not be applied."""
        self._refusals.clear()
        self._scheduler.end()

    def has_requests(self) -> bool:
        """Whether `schedule` would give a batch."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests running, and requests waiting (preempted ones included)."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def get_kv_cache_usage(self) -> float:
        """Share of the KV blocks that are held, 0.0 to 1.0."""
        return self._scheduler.pool.usage

    @property
    def work(self) -> StepWork:
        """What the step in flight computes, or the last one if none is."""
        return self._scheduler.work

    def report(
        self, step_time_s: float, last_step: StepWork, *, sent: int = 0, acknowledged: int = 0
    ) -> StepReport:
        """How much work the requests are; the arguments are the caller's to know."""
        scheduler, limits = self._scheduler, self.limits
        counters, waiting = scheduler.counters, len(scheduler.waiting)
        return StepReport(
            step_time_s=step_time_s,
            unprefilled_tokens=scheduler.unprefilled_tokens,
            scheduled_tokens=scheduler.scheduled_tokens,
            context_tokens=scheduler.context_tokens,
            requests=len(scheduler.running) + waiting,
            waiting=waiting,
            generated_tokens=scheduler.generated_tokens,
            kv_tokens_used=scheduler.pool.num_held * limits.block_size,
            kv_tokens=limits.kv_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            last_step=last_step,
            sent=sent,
            acknowledged=acknowledged,
        )

    def schedule(self) -> Batch | None:
        """Choose the next step; None exactly when there are no requests. Then `apply` it."""
        return self._scheduler.schedule()

    def apply(self, batch: Batch, result: StepResult) -> list[EngineOutput]:
        """Take in a step's result and return what it adds to each request.

        Raises:
            ModelFailed: the result does not fit the batch; nothing changed.
        """
        check_result(self.model, batch, result)
        return self._scheduler.apply(batch, result)

    def shrink(self) -> bool:
        """Take back the step in flight, which was more than the model can do at once.

        It and all later steps have half as many tokens at most. False: it cannot be less.
        """
        return self._scheduler.shrink()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is forgotten: requests hold blocks."""
        return self._scheduler.pool.forget()

    def take_outputs(self) -> list[EngineOutput]:
        """Return the refusals since the last call."""
        refusals, self._refusals = self._refusals, {}
        return list(refusals.values())

    def statistics(self) -> EngineCoreStatistics:
        """Counts of this moment and since birth."""
        running, waiting = self.get_request_counts()
        return EngineCoreStatistics(
            running=running,
            waiting=waiting,
            kv_cache_usage=self.get_kv_cache_usage(),
            free_blocks=self._scheduler.pool.num_free,
            num_blocks=self.limits.num_blocks,
            requests_refused=self._num_refused,
            **asdict(self._scheduler.counters),
        )

    def check(self) -> None:
        """Check that queues and blocks agree; called whenever the engine goes idle.

        Raises:
            InternalError: a block is leaked or a request lost.
        """
        self._scheduler.check()
