"""What the next step computes: continuous batching over a block pool, first come first served.

Knows requests, blocks and limits; nothing of models, time or tasks. Owns every request from `add`
until it ends, and the block pool. Between `schedule` and `apply` a step is in flight: requests may
come and go, but its blocks stay held.

Four rules carry all the promises:

* Older goes first. `running` and `waiting` are each in order of arrival, and whatever runs is older
  than whatever waits: a request is admitted only from the head of `waiting`, and it is the newest
  running one that is preempted, back to that head.
* A request is admitted only when *all* of its tokens fit in free blocks (as vLLM does), and holds
  them from then on. So only decodes ever need a block more, at most one each.
* The newest running request always holds a block that nobody shares (no prefix hit covers a whole
  request), so each missing block costs one preemption, and the oldest always advances.
* Only an exhausted budget cuts a prompt short, and then nothing more is admitted. So at most one
  prefill is unfinished, the newest request's, and whatever runs is in every batch: decodes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.engine.blocks import BlockPool
from dpkit.engine.request import Request, Unfinished
from dpkit.errors import InternalError
from dpkit.messages import Batch, BatchRow, EngineOutput
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import StepResult, TokenLogprob


@define
class Counters:
    """What has happened since the engine's birth."""

    steps: int = 0
    requests_finished: int = 0  # stop or length
    requests_aborted: int = 0
    prompt_tokens: int = 0  # of requests that gave a first token
    output_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0  # looked for in the cache, likewise
    prefix_hit_tokens: int = 0  # taken from the cache, after a preemption too
    peak_kv_usage: float = 0.0
    steps_halved: int = 0  # for want of memory


@define
class _Plan:
    """The step being put together. A preempted request is never in it: see `_grow`."""

    budget: int
    decodes: dict[Request, BatchRow] = field(factory=dict)
    prefills: dict[Request, BatchRow] = field(factory=dict)
    preempted: bool = False

    def take(self, request: Request) -> None:
        row = request.row(self.budget)
        self.budget -= len(row.token_ids)
        (self.decodes if row.is_decode else self.prefills)[request] = row


class Scheduler:
    """The queues of one engine."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.counters = Counters()
        self.budget = limits.max_num_batched_tokens  # of a step; less once one was too much
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self._waiting_tokens = 0  # kept, since the queue may be long and every report asks
        self._batch: Batch | None = None  # in flight
        self._step: dict[Request, BatchRow] = {}  # the same, by request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.running or request_id in self.waiting

    def add(self, request: Request) -> None:
        """Queue a request that fits the limits and whose id is free."""
        self.waiting[request.ask.request_id] = request
        self._waiting_tokens += len(request.token_ids)

    def abort(self, request_id: str) -> None:
        """Drop a request, whatever its state; unknown ids are ignored.

        Its blocks are free at once, or when the step in flight has been applied.
        """
        request = self.running.pop(request_id, None)
        if request is None:
            if (request := self.waiting.pop(request_id, None)) is None:
                return
            self._waiting_tokens -= len(request.token_ids)
        request.move_to(FinishReason.ABORT)
        self.counters.requests_aborted += 1
        if request not in self._step:
            self._release(request)

    def end(self) -> None:
        """Drop all requests and give all blocks back, those of the step in flight too."""
        for request_id in (*self.running, *self.waiting):
            self.abort(request_id)
        for request in self._step:
            self._release(request)
        self._step, self._batch = {}, None

    def schedule(self) -> Batch | None:
        """Choose what the next step computes; None exactly when nothing runs or waits."""
        if self._batch is not None:
            raise InternalError("schedule() was called while a step is in flight; apply it first")
        plan = _Plan(self.budget)
        self._plan_running(plan)
        self._plan_admissions(plan)
        self._step = plan.decodes | plan.prefills
        self.counters.peak_kv_usage = max(self.counters.peak_kv_usage, self.pool.usage)
        self._batch = Batch(rows=tuple(self._step.values())) if self._step else None
        return self._batch

    def shrink(self) -> bool:
        """Take back the step in flight and halve the budget; False: it has one token only.

        Whoever would not fit any more, and every unfinished prefill, goes back to the head of
        `waiting`: then the rules hold for the smaller budget as they did for the larger.
        """
        if self._batch is None:
            raise InternalError("shrink() was called while no step is in flight")
        if self._batch.num_tokens == 1:
            return False
        self.budget = self._batch.num_tokens // 2
        self.counters.steps_halved += 1
        step, self._step, self._batch = self._step, {}, None
        for request in step:
            if request.is_finished:
                self._release(request)
        while self.running:
            newest = next(reversed(self.running.values()))
            if len(self.running) <= self.budget and step[newest].is_decode:
                break
            self._preempt_newest()
        return True

    def _plan_running(self, plan: _Plan) -> None:
        for request in tuple(self.running.values()):
            still_runs = request.state is Unfinished.RUNNING  # not preempted by an older one
            if still_runs and self._grow(request, plan):
                plan.take(request)

    def _plan_admissions(self, plan: _Plan) -> None:
        # Whoever was preempted in this step is at the head and would only be preempted again.
        if plan.preempted:
            return
        while plan.budget and self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = next(iter(self.waiting.values()))
            if not self._hold_all(request):
                return
            del self.waiting[request.ask.request_id]
            self._waiting_tokens -= len(request.token_ids)
            self.running[request.ask.request_id] = request
            request.move_to(Unfinished.RUNNING)
            plan.take(request)

    def _grow(self, request: Request, plan: _Plan) -> bool:
        """Hold a block for one more token, at the cost of newer requests or of this one itself.

        Whoever runs is planned from the oldest to the newest, before any admission, so a victim is
        not in the plan yet and has no share of the budget to give back.
        """
        if len(request.token_ids) <= len(request.block_ids) * self.limits.block_size:
            return True
        while (fresh := self.pool.allocate(1)) is None:
            plan.preempted = True
            if self._preempt_newest() is request:
                return False
        request.block_ids += fresh
        return True

    def _preempt_newest(self) -> Request:
        request_id, request = self.running.popitem()
        request.move_to(Unfinished.PREEMPTED)
        self._release(request)
        self.waiting[request_id] = request
        self.waiting.move_to_end(request_id, last=False)
        self._waiting_tokens += len(request.token_ids)
        self.counters.preemptions += 1
        return request

    def _hold_all(self, request: Request) -> bool:
        """Hold blocks for every token the request has, cached ones included, or none."""
        size = self.limits.block_size
        hits: list[int] = []
        if self.limits.prefix_cache:
            findable = request.num_findable // size
            hits = self.pool.match(request.block_hashes(findable, size)[:findable])
        needed = -(-len(request.token_ids) // size)
        fresh = self.pool.allocate(needed - len(hits), hits=hits)
        if fresh is None:
            return False
        request.block_ids = hits + fresh
        request.num_computed = len(hits) * size
        self.counters.prefix_query_tokens += self.limits.prefix_cache * len(request.token_ids)
        self.counters.prefix_hit_tokens += request.num_computed
        return True

    def apply(self, batch: Batch, result: StepResult) -> list[EngineOutput]:
        """Take in what the step in flight made, and end the requests that are done.

        Rows of requests that were aborted meanwhile only give their blocks back.
        """
        if batch is not self._batch:
            raise InternalError("apply() was given another batch than the one in flight")
        step, self._step, self._batch = self._step, {}, None
        self.counters.steps += 1
        outputs = []
        for index, (request, row) in enumerate(step.items()):
            if request.is_finished:
                self._release(request)
                continue
            self._advance(request, len(row.token_ids))
            request.prompt_logprobs += result.prompt_logprobs.get(index, ())
            if (token_id := result.sampled[index]) is not None:
                outputs.append(self._append(request, token_id, result.logprobs.get(index)))
        return outputs

    def _advance(self, request: Request, count: int) -> None:
        size = self.limits.block_size
        full_before = request.num_computed // size
        request.num_computed += count
        full = request.num_computed // size
        if self.limits.prefix_cache and full > full_before:
            hashes = request.block_hashes(full, size)
            for index in range(full_before, full):
                self.pool.seal(request.block_ids[index], hashes[index])

    def _append(
        self, request: Request, token_id: int, logprob: TokenLogprob | None
    ) -> EngineOutput:
        reason = request.append(token_id)
        is_first = request.num_sampled == 1
        self.counters.output_tokens += 1
        if is_first:
            self.counters.prompt_tokens += len(request.ask.prompt_token_ids)
        if reason is not None:
            request.move_to(reason)
            del self.running[request.ask.request_id]
            self._release(request)
            self.counters.requests_finished += 1
        return EngineOutput(
            request_id=request.ask.request_id,
            token_ids=(token_id,),
            logprobs=() if logprob is None else (logprob,),
            prompt_logprobs=tuple(request.prompt_logprobs) if is_first else (),
            finish_reason=reason,
        )

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids.clear()

    @property
    def unprefilled_tokens(self) -> int:
        """Tokens to compute before every request is decoding; cached prefixes count in full."""
        running = (len(r.token_ids) - r.num_computed for r in self.running.values())
        return self._waiting_tokens + sum(left for left in running if left > 1)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV running requests hold."""
        return sum(request.num_computed for request in self.running.values())

    def check(self) -> None:
        """Compare queues, states and blocks.

        Raises:
            InternalError: they do not agree.
        """
        for request in self.waiting.values():
            if request.block_ids or request.state not in {Unfinished.WAITING, Unfinished.PREEMPTED}:
                raise InternalError(f"{request} waits and holds blocks or is {request.state}")
        for request in self.running.values():
            if request.state is not Unfinished.RUNNING:
                raise InternalError(f"{request} runs and is {request.state}")
        if self._waiting_tokens != sum(len(r.token_ids) for r in self.waiting.values()):
            raise InternalError(f"{self._waiting_tokens} tokens wait, by a wrong count")
        holders = dict.fromkeys([*self.running.values(), *self._step])
        self.pool.check(request.block_ids for request in holders)
