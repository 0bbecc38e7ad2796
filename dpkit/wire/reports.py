"""What an engine says of itself, as the wire has it, and back: its load, its counts, its size.

vLLM's map has the queues and the KV usage; what dpkit's balancing needs beyond it travels under a
key of its own. Sans-IO; knows no bytes (`codec`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import UNSET

from dpkit.engine.core import EngineCoreStatistics
from dpkit.messages import EngineStats, StepReport, StepWork
from dpkit.wire.structs import VLLM_VERSION, EngineReport, ReadyResponse, SchedulerStats

if TYPE_CHECKING:
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import EngineId

_FIELDS = EngineReport.__struct_fields__
# Those that `EngineCoreStatistics` has too.
_COUNTS = _FIELDS[_FIELDS.index("free_blocks") : _FIELDS.index("scheduled_tokens")]
_counts = attrgetter(*_COUNTS)
# What a `StepReport` has stands before them, and, as far as it came later, behind them.
_begin = attrgetter("step_time_s", "unprefilled_tokens", "context_tokens")
_end = attrgetter(
    "scheduled_tokens",
    "generated_tokens",
    "kv_tokens_used",
    "kv_tokens",
    "last_step.decodes",
    "last_step.prefill_tokens",
    "last_step.decode_context",
    "last_step.prefill_context",
    "sent",
    "acknowledged",
)


def stats_to_wire(stats: EngineStats, core: EngineCoreStatistics) -> SchedulerStats:
    """Write an engine's load, and what it has done since its birth."""
    report = stats.report or StepReport()
    return SchedulerStats(
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        step_counter=stats.step_counter,
        current_wave=stats.current_wave,
        kv_cache_usage=stats.kv_cache_usage,
        dpkit=EngineReport(*_begin(report), *_counts(core), *_end(report)),
    )


def stats_from_wire(wire: SchedulerStats, *, engine: EngineId, index: int, seq: int) -> EngineStats:
    """Read an engine's load.

    Args:
        wire: Of the engine. One that is not dpkit's tells no token counts.
        engine: Which life of it.
        index: Its rank.
        seq: How many came before: the wire keeps their order and has no number of its own.
    """
    return EngineStats(
        engine=engine,
        index=index,
        seq=seq,
        waiting=wire.num_waiting_reqs,
        running=wire.num_running_reqs,
        kv_cache_usage=wire.kv_cache_usage,
        current_wave=wire.current_wave,
        step_counter=wire.step_counter,
        report=report_from_wire(wire),
    )


def report_from_wire(
    wire: SchedulerStats, *, sent: int | None = None, acknowledged: int | None = None
) -> StepReport | None:
    """Read how much work an engine has; None: another's does not tell.

    Args:
        wire: Of the engine.
        sent: Requests of one client; None: those of the frontend, as they were told.
        acknowledged: Likewise.
    """
    if (told := wire.dpkit) is UNSET:
        return None
    return StepReport(
        step_time_s=told.step_time_s,
        unprefilled_tokens=told.unprefilled_tokens,
        scheduled_tokens=told.scheduled_tokens,
        context_tokens=told.context_tokens,
        requests=wire.num_running_reqs + wire.num_waiting_reqs,
        waiting=wire.num_waiting_reqs,
        generated_tokens=told.generated_tokens,
        kv_tokens_used=told.kv_tokens_used,
        kv_tokens=told.kv_tokens,
        preemptions=told.preemptions,
        steps=told.steps,
        last_step=StepWork(
            decodes=told.decodes,
            prefill_tokens=told.prefill_tokens,
            decode_context=told.decode_context,
            prefill_context=told.prefill_context,
        ),
        sent=told.sent if sent is None else sent,
        acknowledged=told.acknowledged if acknowledged is None else acknowledged,
    )


def statistics_from_wire(wire: SchedulerStats) -> EngineCoreStatistics | None:
    """Read what a dpkit engine has done since its birth; None: another's does not tell."""
    if wire.dpkit is UNSET:
        return None
    return EngineCoreStatistics(
        running=wire.num_running_reqs,
        waiting=wire.num_waiting_reqs,
        kv_cache_usage=wire.kv_cache_usage,
        **dict(zip(_COUNTS, _counts(wire.dpkit), strict=True)),
    )


def ready_response(
    limits: EngineLimits, *, rank: int, count: int, instance_id: str, dtype: str = "float32"
) -> ReadyResponse:
    """Say what an engine can take.

    Args:
        limits: Of the engine. A frontend cuts `max_tokens` to the `max_model_len` that it hears, so
            that is as much as both the model and the pool can do.
        rank: Of the engine.
        count: Engines of the cluster.
        instance_id: Any name.
        dtype: "float32", "bfloat16" or "float16"; vLLM's frontend knows no "auto".
    """
    longest = min(limits.max_model_len or limits.kv_tokens, limits.kv_tokens)
    return ReadyResponse(
        max_model_len=longest,
        num_gpu_blocks=limits.num_blocks,
        block_size=limits.block_size,
        dtype=dtype,
        vllm_version=VLLM_VERSION,
        world_size=1,
        data_parallel_size=count,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=rank,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        instance_id=instance_id,
        supports_lora=False,
        max_loras=0,
        kv_cache_size_tokens=limits.kv_tokens,
        kv_cache_max_concurrency=limits.kv_tokens / longest,
        effective_attention_block_size=limits.block_size,
    )
