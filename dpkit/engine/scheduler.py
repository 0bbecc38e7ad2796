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
* Whatever runs is in every batch, decodes first: each was given at least a token of the step that
  admitted it, so no more run than a step has tokens.

A prompt is cut short by an exhausted budget, after which nothing more is admitted, or as a long one
by `long_prefill_share`: then prompts behind it use the rest of the step, and pass it. What nobody
uses is the long ones' again, so the share costs nothing while they are alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.engine.blocks import BlockPool
from dpkit.engine.request import Request, Unfinished
from dpkit.errors import InternalError
from dpkit.messages import Batch, BatchRow, EngineOutput, StepWork
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
    requests_taken_back: int = 0  # waited, and went elsewhere
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
    long_from: int  # tokens: a prompt that has more left is long
    long_budget: int = field(init=False)  # what long ones may still take while others want some
    decodes: dict[Request, BatchRow] = field(factory=dict)
    prefills: dict[Request, BatchRow] = field(factory=dict)
    shares: dict[Request, int] = field(factory=dict)  # of prefills, in tokens
    preempted: bool = False

    def __attrs_post_init__(self) -> None:
        self.long_budget = self.long_from

    def decode(self, request: Request) -> None:
        self.decodes[request] = request.row(1)
        self.budget -= 1

    def share(self, request: Request, reserved: int = 0) -> None:
        """Give a prompt what it can get if so many tokens are kept for others."""
        left = len(request.token_ids) - request.num_computed
        tokens = min(left, self.budget - reserved)
        if left > self.long_from:
            tokens = min(tokens, max(1, self.long_budget))
            self.long_budget -= tokens
        self.shares[request] = tokens
        self.budget -= tokens

    def finish(self) -> None:
        """Give out what nobody has taken, oldest first, and write the rows."""
        for request, tokens in self.shares.items():
            row = request.row(tokens + self.budget)
            self.budget -= len(row.token_ids) - tokens
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
        # Kept, since every report asks and the queues may be long.
        self._waiting_tokens = 0
        self.context_tokens = 0
        """Tokens whose KV running requests hold."""
        self.generated_tokens = 0
        """Output so far of all requests."""
        self.work = StepWork()
        """What the step in flight computes, or the last one."""
        self._prefilling: dict[str, Request] = {}  # run, and have not sampled since they do
        self._batch: Batch | None = None  # in flight
        self._step: dict[Request, BatchRow] = {}  # the same, by request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.running or request_id in self.waiting

    def add(self, request: Request) -> None:
        """Queue a request that fits the limits and whose id is free."""
        self.waiting[request.ask.request_id] = request
        self._waiting_tokens += len(request.token_ids)
        self.generated_tokens += request.num_outputs

    def abort(self, request_id: str, *, is_taken_back: bool = False) -> None:
        """Drop a request, whatever its state; unknown ids are ignored.

        Its client has left, or will have it elsewhere (`is_taken_back`). Its blocks are free at
        once, or when the step in flight has been applied.
        """
        request = self.running.pop(request_id, None)
        if request is None:
            if (request := self.waiting.pop(request_id, None)) is None:
                return
            self._waiting_tokens -= len(request.token_ids)
        else:
            self._stop_running(request)
        self.generated_tokens -= request.num_outputs
        request.move_to(FinishReason.ABORT)
        self.counters.requests_taken_back += is_taken_back
        self.counters.requests_aborted += not is_taken_back
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
        long_from = max(1, int(self.budget * self.limits.long_prefill_share))
        plan = _Plan(self.budget, long_from)
        self._plan_running(plan)
        self._plan_admissions(plan)
        plan.finish()
        self._step = plan.decodes | plan.prefills
        self.counters.peak_kv_usage = max(self.counters.peak_kv_usage, self.pool.usage)
        self._batch = Batch(rows=tuple(self._step.values())) if self._step else None
        if self._batch is not None:
            self.work = self._work_of(plan)
        return self._batch

    def _work_of(self, plan: _Plan) -> StepWork:
        """What a step costs: in time that grows with its prefills only."""
        tokens = started = 0
        context = 0.0
        for row in plan.prefills.values():
            count = len(row.token_ids)
            tokens += count
            started += row.start
            context += count * (row.start + count / 2)
        decodes = len(plan.decodes)
        return StepWork(
            decodes=decodes,
            prefill_tokens=tokens,
            decode_context=self.context_tokens - started + decodes,
            prefill_context=context,
        )

    def shrink(self) -> bool:
        """Take back the step in flight and halve the budget; False: it has one token only.

        Whoever would not fit any more, and the newest prefills, go back to the head of `waiting`:
        then the rules hold for the smaller budget as they did for the larger.
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
        prefilling = self._prefilling
        for request_id, request in tuple(self.running.items()):
            if request_id in prefilling or request.state is not Unfinished.RUNNING:
                continue  # its turn is below, or an older one has preempted it
            if self._grow(request, plan):
                plan.decode(request)
        behind = len(prefilling)
        for request in prefilling.values():  # they hold all the blocks that they need
            behind -= 1
            plan.share(request, reserved=behind)

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
            self._prefilling[request.ask.request_id] = request
            self.context_tokens += request.num_computed
            request.move_to(Unfinished.RUNNING)
            plan.share(request)

    def _grow(self, request: Request, plan: _Plan) -> bool:
        """Hold a block for one more token, at the cost of newer requests or of this one itself.

        Decodes are planned from the oldest to the newest, before all else, so a victim is not in
        the plan yet and has no share of the budget to give back.
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
        self._stop_running(request)
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
        request.hold(hits + fresh, len(hits) * size)
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
        computed = 0
        for index, (request, row) in enumerate(step.items()):
            if request.is_finished:
                self._release(request)
                continue
            count = len(row.token_ids)
            computed += count
            self._advance(request, count)
            request.prompt_logprobs += result.prompt_logprobs.get(index, ())
            if (token_id := result.sampled[index]) is not None:
                outputs.append(self._append(request, token_id, result.logprobs.get(index)))
        self.context_tokens += computed
        self.generated_tokens += len(outputs)
        if self._prefilling:
            self._end_prefills(step)
        return outputs

    def _end_prefills(self, step: dict[Request, BatchRow]) -> None:
        for request in tuple(self._prefilling.values()):
            if step[request].output_index is not None:
                del self._prefilling[request.ask.request_id]

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
            self._stop_running(request)
            self.generated_tokens -= request.num_outputs
            self._release(request)
            self.counters.requests_finished += 1
        return EngineOutput(
            request_id=request.ask.request_id,
            token_ids=(token_id,),
            logprobs=() if logprob is None else (logprob,),
            prompt_logprobs=tuple(request.prompt_logprobs) if is_first else (),
            cached_tokens=request.num_cached if is_first else None,
            finish_reason=reason,
        )

    def _stop_running(self, request: Request) -> None:
        self.context_tokens -= request.num_computed
        self._prefilling.pop(request.ask.request_id, None)

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids.clear()

    @property
    def unprefilled_tokens(self) -> int:
        """Tokens to compute before every request is decoding; cached prefixes count in full."""
        if not self._prefilling:  # most often, and asked after every step
            return self._waiting_tokens
        left = (len(r.token_ids) - r.num_computed for r in self._prefilling.values())
        return self._waiting_tokens + sum(left)

    @property
    def scheduled_tokens(self) -> int:
        """Those of them that the step in flight computes."""
        if not self._prefilling:
            return 0
        rows = (self._step.get(request) for request in self._prefilling.values())
        return sum(len(row.token_ids) for row in rows if row is not None)

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
        self._check_sums()
        holders = dict.fromkeys([*self.running.values(), *self._step])
        self.pool.check(request.block_ids for request in holders)

    def _check_sums(self) -> None:
        running, waiting = self.running.values(), self.waiting.values()
        if self._waiting_tokens != sum(len(r.token_ids) for r in waiting):
            raise InternalError(f"{self._waiting_tokens} tokens wait, by a wrong count")
        if self.context_tokens != sum(r.num_computed for r in running):
            raise InternalError(f"{self.context_tokens} tokens are cached, by a wrong count")
        if self.generated_tokens != sum(r.num_outputs for r in (*running, *waiting)):
            raise InternalError(f"{self.generated_tokens} tokens were made, by a wrong count")
        if not self._prefilling.keys() <= self.running.keys():
            raise InternalError(f"{list(self._prefilling)} prefill; {list(self.running)} run")
