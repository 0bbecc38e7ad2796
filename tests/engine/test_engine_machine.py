"""The whole engine under anything that may happen to it, with a model that checks every batch.

Requests come, leave and are refused at any time, also while a step is in flight, on pools as small
as they get; prompts are short words over two letters, so that prefixes are shared all the time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import (
    Batch,
    BatchRow,
    EngineOutput,
    GenerateRequest,
    SamplingParams,
    StepResult,
)
from dpkit.names import FinishReason
from dpkit.text.bytes import EOS_TOKEN_ID

Cache = dict[tuple[int, int], tuple[int, ...]]


class CheckingModel(EchoModel):
    """Echo with a KV cache: each slot holds the text up to its token, as real KV depends on it."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Cache:
        self.num_blocks = num_blocks
        self.block_size = block_size
        return {}

    def execute(self, batch: Batch, cache: Cache) -> StepResult:
        for row in batch.rows:
            self.write(row, cache)
        for row in batch.rows:
            self.read(row, cache)
        return super().execute(batch, cache)

    def slot(self, row: BatchRow, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size

    def text(self, row: BatchRow, end: int) -> tuple[int, ...]:
        prompt = row.prompt_token_ids
        return tuple(prompt[i % len(prompt)] for i in range(end))

    def write(self, row: BatchRow, cache: Cache) -> None:
        assert all(0 <= block < self.num_blocks for block in row.block_ids)
        end = row.start + len(row.token_ids)
        assert tuple(row.token_ids) == self.text(row, end)[row.start :]
        for position in range(row.start, end):
            cache[self.slot(row, position)] = self.text(row, position + 1)

    def read(self, row: BatchRow, cache: Cache) -> None:
        computed = range(row.start, row.start + len(row.token_ids))
        assert all(place - 1 in computed for place in row.scored)  # the scores are at hand
        for position in range(row.start + len(row.token_ids)):
            assert cache[self.slot(row, position)] == self.text(row, position + 1)


def expected(request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """What a request must get, whatever happens to the others."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    said = [prompt[i % len(prompt)] for i in range(sampling.max_tokens)]
    for index in range(sampling.min_tokens, sampling.max_tokens):
        if index >= len(prompt) and not sampling.ignore_eos:
            return [*said[:index], EOS_TOKEN_ID], FinishReason.STOP
        if said[index] in sampling.stop_token_ids:
            return said[: index + 1], FinishReason.STOP
    return said, FinishReason.LENGTH


SAMPLING = st.integers(1, 12).flatmap(
    lambda max_tokens: st.builds(
        SamplingParams,
        max_tokens=st.just(max_tokens),
        min_tokens=st.one_of(st.just(0), st.integers(0, max_tokens)),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (), (2,)]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
)
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), max_size=12).map(tuple)


class EngineMachine(RuleBasedStateMachine):
    """Remembers every request that is alive, in order of arrival, and what it has got."""

    @initialize(
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 12),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(1, 12),
        prefix_cache=st.booleans(),
        long_prefill_share=st.sampled_from([1.0, 1.0, 0.75, 0.5, 0.1]),
        max_model_len=st.one_of(st.none(), st.integers(2, 20)),
    )
    def start(self, **limits: Any) -> None:
        self.limits = EngineLimits(**limits)
        self.model = CheckingModel()
        self.core = EngineCore(self.model, limits=self.limits)
        self.cache = self.model.allocate(
            num_blocks=self.limits.num_blocks, block_size=self.limits.block_size
        )
        self.batch: Batch | None = None
        self.alive: dict[str, GenerateRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.count = 0

    def is_servable(self, request: GenerateRequest) -> bool:
        asked = len(request.prompt_token_ids) + request.sampling.max_tokens
        longest = self.limits.max_model_len or asked
        return (
            request.prompt_token_ids != ()
            and asked <= longest
            and asked - 1 <= self.limits.num_blocks * self.limits.block_size
        )

    @rule(prompt=PROMPTS, sampling=SAMPLING)
    def add(self, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        self.count += 1
        request = GenerateRequest(
            request_id=f"r{self.count}", prompt_token_ids=prompt, sampling=sampling
        )
        self.core.add(request)
        refusals = self.core.take_outputs()
        assert [refusal.request_id for refusal in refusals] == [request.request_id] * (
            not self.is_servable(request)
        )
        if not refusals:
            self.alive[request.request_id] = request
            self.got[request.request_id] = []

    @precondition(lambda self: self.count)
    @rule(numbers=st.sets(st.integers(1, 10), min_size=1, max_size=3))
    def abort(self, numbers: set[int]) -> None:
        names = [f"r{self.count + 1 - number}" for number in numbers]  # alive, gone or never there
        self.core.abort(names)
        for name in names:
            self.alive.pop(name, None)

    @precondition(lambda self: self.count)
    @rule(numbers=st.sets(st.integers(1, 10), min_size=1, max_size=3))
    def take_back(self, numbers: set[int]) -> None:
        names = [f"r{self.count + 1 - number}" for number in numbers]
        waiting = set(self.core._scheduler.waiting)
        taken = self.core.take_back(names)
        assert set(taken) == waiting.intersection(names)  # and nobody in a step is among them
        for name in taken:
            del self.alive[name]

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        self.batch = self.core.schedule()
        if self.batch is None:
            assert not self.alive
            return
        rows = self.batch.rows
        running = self.core._scheduler.running
        assert {row.request_id for row in rows} == set(running)  # whoever runs advances,
        assert next(iter(self.alive)) in running  # and that is at least the oldest
        assert len(rows) == len(running) <= self.limits.max_num_seqs
        assert all(len(row.token_ids) > 0 for row in rows)
        assert sum(len(row.token_ids) for row in rows) <= self.limits.max_num_batched_tokens
        decodes = [row.is_decode for row in rows]
        assert decodes == sorted(decodes, reverse=True)

    @precondition(lambda self: self.batch is not None)
    @rule()
    def apply(self) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None
        for output in self.core.apply(batch, self.model.execute(batch, self.cache)):
            self.deliver(output)

    def deliver(self, output: EngineOutput) -> None:
        request = self.alive[output.request_id]  # nobody who left gets anything
        self.check_logprobs(request, output)
        self.got[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            assert (self.got[output.request_id], output.finish_reason) == expected(request)
            del self.alive[output.request_id]

    def check_logprobs(self, request: GenerateRequest, output: EngineOutput) -> None:
        told = tuple(each.token_id for each in output.logprobs)
        assert told == (output.token_ids if request.sampling.logprobs is not None else ())
        is_first = not self.got[output.request_id]
        asks = request.sampling.prompt_logprobs is not None
        of_prompt = tuple(each.token_id for each in output.prompt_logprobs)
        assert of_prompt == (request.prompt_token_ids[1:] if asks and is_first else ())

    @invariant()
    def queues_and_blocks_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        scheduler = self.core._scheduler
        report = self.core.report(0.0, self.core.work)
        assert report.requests == len(self.alive)
        assert 0 <= report.scheduled_tokens <= report.unprefilled_tokens
        assert report.kv_tokens_used <= report.kv_tokens
        assert [*scheduler.running, *scheduler.waiting] == list(
            self.alive
        )  # first come first served
        assert self.core.get_request_counts() == (len(scheduler.running), len(scheduler.waiting))
        assert self.core.has_requests() == bool(self.alive)

    def teardown(self) -> None:
        """All that are left finish, in no more steps than they have tokens."""
        if not hasattr(self, "core"):
            return
        if self.batch is not None:
            self.apply()
        asked = self.alive.values()
        steps = sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in asked)
        while self.alive:
            assert steps > 0
            steps -= 1
            self.schedule()
            self.apply()
        self.queues_and_blocks_agree()
        assert self.core.get_kv_cache_usage() == 0.0
        assert self.core.statistics().free_blocks == self.limits.num_blocks


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestEngine = EngineMachine.TestCase
