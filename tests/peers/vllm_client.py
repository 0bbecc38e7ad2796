"""vLLM's own balancing client in front of whatever engines shake hands with the test.

Runs in vLLM's environment and knows nothing of dpkit. Tells what came of it as one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import DPLBAsyncMPClient

END = 256  # the end token of the model of bytes


def config(engines: int) -> SimpleNamespace:
    """As much of vLLM's configuration as its client looks at."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_elastic_ep=False,
            enable_fault_tolerance=False,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            data_parallel_size=engines,
            data_parallel_size_local=engines,
            data_parallel_index=0,
            data_parallel_rank=0,
            data_parallel_rank_local=None,
            local_engines_only=False,
            _coord_store_port=0,
        ),
        model_config=SimpleNamespace(max_model_len=2**30, multimodal_config=None),
        cache_config=SimpleNamespace(num_gpu_blocks=0, block_size=16),
    )


def request(number: int, prompt: bytes, **sampling: Any) -> EngineCoreRequest:
    """A request for what was said to be said back."""
    params = SamplingParams(temperature=0.0, **sampling)
    params.update_from_generation_config({}, None if params.ignore_eos else END)
    return EngineCoreRequest(
        request_id=f"r{number}",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class Reader:
    """What the engines said, by request."""

    def __init__(self, client: DPLBAsyncMPClient) -> None:
        self.client = client
        self.said: dict[str, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.engines: Counter[int] = Counter()

    async def read(self) -> None:
        """Read for ever."""
        while True:
            outputs = await self.client.get_output_async()
            for each in outputs.outputs:
                self.said.setdefault(each.request_id, []).extend(each.new_token_ids)
                if each.finish_reason is not None:
                    self.ended[each.request_id] += 1
                    self.engines[outputs.engine_index] += 1


async def until(holds: Any, patience: float = 30.0) -> bool:
    """Wait until something is so; whether it came to be."""
    ends = time.monotonic() + patience
    while not holds() and time.monotonic() < ends:  # noqa: ASYNC110 - sockets set no events
        await asyncio.sleep(0.005)
    return bool(holds())


async def drive(client: DPLBAsyncMPClient, count: int) -> dict[str, Any]:
    """Ask for many things at once, then abort many, and look at the client's own books."""
    reader = Reader(client)
    reading = asyncio.create_task(reader.read())
    tasks = await client.get_supported_tasks_async()
    prompts = {f"r{number}": b"%d of many" % number for number in range(count)}
    for number, prompt in enumerate(prompts.values()):
        await client.add_request_async(request(number, prompt, max_tokens=64))
    await until(lambda: len(reader.ended) == count)
    whole = sum(reader.said[each] == [*prompt, END] for each, prompt in prompts.items())
    shares = dict(reader.engines)

    gone = [f"r{count + number}" for number in range(40)]
    for number in range(40):
        asked = request(count + number, b"never ends", max_tokens=5000, ignore_eos=True)
        await client.add_request_async(asked)
    await until(lambda: all(each in reader.said for each in gone))
    held = sum(client.engine_inflight.values())
    for each in gone:
        await client.abort_requests_async([each])
    await until(lambda: not client.reqs_in_flight)
    counts = await until(lambda: not any(w + r for w, r, _ in client.lb_engines))
    reading.cancel()
    return {
        "tasks": list(tasks),
        "whole": whole,
        "ended_once": all(times == 1 for times in reader.ended.values()),
        "shares": shares,
        "held_before_the_aborts": held,
        "in_flight": len(client.reqs_in_flight),
        "inflight_by_engine": sorted(client.engine_inflight.values()),
        "counts_are_zero": counts,
    }


async def main() -> None:
    """Be the client whose addresses are given."""
    parser = argparse.ArgumentParser()
    for name in ("--input", "--output", "--stats"):
        parser.add_argument(name, required=True)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--requests", type=int, default=200)
    told = parser.parse_args()
    client = DPLBAsyncMPClient(
        config(told.engines),
        executor_class=None,
        log_stats=True,
        client_addresses={
            "input_address": told.input,
            "output_address": told.output,
            "stats_update_address": told.stats,
        },
    )
    try:
        print(json.dumps(await drive(client, told.requests)), flush=True)
    finally:
        client.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
