"""A model for vLLM's engine core that says back what it was told; vLLM does all the rest itself.

Runs in vLLM's environment and knows nothing of dpkit. In place of a GPU's worker stands an executor
that computes nothing: scheduler, KV blocks, prefix cache, sockets and threads are vLLM's own.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

STEP_S = float(os.environ.get("ECHO_STEP_S", "0"))
BLOCKS = 512
END = 256  # the end token of the model of bytes


def _done(result: Any, non_block: bool) -> Any:
    if not non_block:
        return result
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class EchoExecutor(Executor):  # type: ignore[misc]  # of another environment
    """Output token i is prompt token i, then the end; with `ignore_eos` it starts over."""

    def _init_executor(self) -> None:
        self._spec = FullAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        self._asked: dict[str, Any] = {}
        self._computed: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def check_health(self) -> None:
        """It is well."""

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """What a worker is asked at the start."""
        del timeout, args, kwargs
        answers = {
            "get_kv_cache_spec": {"layer.0": self._spec},
            "get_supported_kv_cache_layouts": ["LBHNC"],
            "determine_available_memory": BLOCKS * self._spec.page_size_bytes,
            "get_supported_tasks": ("generate",),
        }
        return _done([answers.get(method)], non_block)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """One step."""
        time.sleep(STEP_S)
        return _done(self._step(scheduler_output), non_block)

    def _step(self, work: Any) -> ModelRunnerOutput:
        for request_id in work.finished_req_ids:
            for each in (self._asked, self._computed, self._said):
                each.pop(request_id, None)
        for new in work.scheduled_new_reqs:
            self._asked[new.req_id] = new
            self._computed[new.req_id] = new.num_computed_tokens
            self._said.setdefault(new.req_id, 0)
        cached = work.scheduled_cached_reqs
        self._computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ids = list(work.num_scheduled_tokens)
        sampled = [self._sample(each, work.num_scheduled_tokens[each]) for each in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(ids, sampled),
            prompt_logprobs_dict=self._of_prompts(work),
        )

    def _sample(self, request_id: str, count: int) -> list[int]:
        prompt = self._asked[request_id].prompt_token_ids
        self._computed[request_id] += count
        place = self._said[request_id]
        if self._computed[request_id] < len(prompt) + place:
            return []  # a chunk of its prompt
        self._said[request_id] += 1
        ends = place == len(prompt) and not self._asked[request_id].sampling_params.ignore_eos
        return [END if ends else prompt[place % len(prompt)]]

    def _logprobs(self, ids: list[str], sampled: list[list[int]]) -> LogprobsLists | None:
        """As many columns for each as any of the step has asked for, as vLLM's own worker."""
        asked = [self._asked[each].sampling_params.logprobs for each in ids]
        columns = 1 + max((most for most in asked if most is not None), default=-1)
        if not columns:
            return None
        tokens = [[row[0] if row else 0] * columns for row in sampled]
        return LogprobsLists(
            np.array(tokens, dtype=np.int32),
            np.zeros((len(ids), columns), dtype=np.float32),
            np.ones(len(ids), dtype=np.int32),
        )

    def _of_prompts(self, work: Any) -> dict[str, LogprobsTensors | None]:
        told: dict[str, LogprobsTensors | None] = {}
        for new in work.scheduled_new_reqs:
            most, prompt = new.sampling_params.prompt_logprobs, new.prompt_token_ids
            if most is not None and self._computed[new.req_id] >= len(prompt):
                rows = [[each] * (most + 1) for each in prompt[1:]]
                shape = len(rows), most + 1
                told[new.req_id] = LogprobsTensors(
                    torch.tensor(rows, dtype=torch.int32).reshape(shape),
                    torch.zeros(shape, dtype=torch.float32),
                    torch.ones(len(rows), dtype=torch.int32),
                )
        return told
