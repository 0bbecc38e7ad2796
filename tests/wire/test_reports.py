"""What an engine says of itself arrives; what others do not say is not made up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest
from attrs import evolve
from hypothesis import given, settings
from msgspec.msgpack import encode

from dpkit.engine.limits import EngineLimits
from dpkit.errors import WireError
from dpkit.messages import EngineId, EngineStats
from dpkit.wire import codec
from dpkit.wire.reports import (
    ready_response,
    statistics_from_wire,
    stats_from_wire,
    stats_to_wire,
)
from dpkit.wire.structs import EngineReport, Envelope, SchedulerStats
from tests.wire import messages
from tests.wire.vectors import VECTORS

if TYPE_CHECKING:
    from dpkit.engine.core import EngineCoreStatistics

ENGINE = EngineId("engine-1", 2)
LIMITS = EngineLimits(
    max_num_seqs=4, max_num_batched_tokens=512, block_size=16, num_blocks=100, max_model_len=800
)


def sent(stats: SchedulerStats) -> SchedulerStats:
    """Stats, after their journey."""
    envelope = codec.decode_output(codec.encode_envelope(Envelope(scheduler_stats=stats)))
    assert isinstance(envelope, Envelope)
    assert envelope.scheduler_stats is not None
    return envelope.scheduler_stats


@given(messages.stats, messages.core_statistics)
@settings(max_examples=50)
def test_stats_and_counts_cross_unchanged(stats: EngineStats, core: EngineCoreStatistics) -> None:
    core = evolve(
        core, running=stats.running, waiting=stats.waiting, kv_cache_usage=stats.kv_cache_usage
    )
    assert stats.report is not None
    report = msgspec.structs.replace(  # what vLLM's map and the counts say is said once
        stats.report,
        requests=stats.running + stats.waiting,
        waiting=stats.waiting,
        preemptions=core.preemptions,
        steps=core.steps,
    )
    stats = evolve(stats, report=report)
    wire = sent(stats_to_wire(stats, core))
    assert statistics_from_wire(wire) == core
    assert stats_from_wire(wire, engine=stats.engine, index=stats.index, seq=stats.seq) == stats


def test_vllms_engines_tell_their_queues_and_no_more() -> None:
    envelope = codec.decode_output(VECTORS["coord_counts"].frames)
    assert isinstance(envelope, Envelope)
    assert envelope.scheduler_stats is not None
    stats = stats_from_wire(envelope.scheduler_stats, engine=ENGINE, index=1, seq=7)
    assert stats == EngineStats(
        engine=ENGINE,
        index=1,
        seq=7,
        waiting=5,
        running=2,
        kv_cache_usage=0.25,
        current_wave=3,
        step_counter=9,
    )
    assert statistics_from_wire(envelope.scheduler_stats) is None


@pytest.mark.parametrize(
    ("told", "share"), [(1.5, 1.0), (-0.5, 0.0), (math.nan, 0.0), (math.inf, 1.0), (0.5, 0.5)]
)
def test_shares_are_shares_whatever_was_told(told: float, share: float) -> None:
    envelope = codec.decode_output([encode([0, [], {"kv_cache_usage": told}])])
    assert isinstance(envelope, Envelope)
    assert envelope.scheduler_stats is not None
    assert envelope.scheduler_stats.kv_cache_usage == share


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("place", ["step_time_s", "prefill_context"])
def test_no_step_lasts_for_ever_or_is_endless(place: str, told: float) -> None:
    report: list[float] = [0] * len(EngineReport.__struct_fields__)
    report[EngineReport.__struct_fields__.index(place)] = told
    with pytest.raises(WireError, match=r"Expected `float`"):
        codec.decode_output([encode([0, [], {"dpkit": report}])])


@pytest.mark.parametrize("place", ["queries", "hits"])
def test_no_prefix_is_found_less_than_never(place: str) -> None:
    """Those are added up, and no total goes down."""
    with pytest.raises(WireError, match="Expected `int` >= 0"):
        codec.decode_output([encode([0, [], {"prefix_cache_stats": {place: -1}}])])


def test_an_engine_says_what_it_can_take() -> None:
    response = ready_response(LIMITS, rank=1, count=3, instance_id="engine-1", dtype="bfloat16")
    assert codec.decode_ready_response(codec.encode_ready_response(response)) == response
    assert (response.max_model_len, response.num_gpu_blocks, response.block_size) == (800, 100, 16)
    assert (response.data_parallel_rank, response.data_parallel_size) == (1, 3)
    assert response.vllm_version == "0.33.0"
    assert response.kv_cache_max_concurrency == 2.0


def test_a_frontend_is_told_no_more_positions_than_the_pool_holds() -> None:
    for longest in (None, 10_000):
        limits = evolve(LIMITS, max_model_len=longest)
        assert ready_response(limits, rank=0, count=1, instance_id="").max_model_len == 1600
