"""What is told of engines that joined, which speak vLLM's wire and count for themselves."""

from __future__ import annotations

from dpkit.link.foreign import ForeignConnection
from dpkit.observe import Metrics
from dpkit.wire.codec import encode_envelope
from dpkit.wire.structs import Envelope, PrefixCacheStats, SchedulerStats, WireOutput
from tests.joined.lab import life_of
from tests.joined.test_faults import open_pair, open_stream
from tests.observe.lab import scrape
from tests.waiting import until


async def test_an_engine_that_joined_is_measured_and_its_own_counts_are_added_up() -> None:
    async with open_pair() as (cluster, puppet):
        metrics = Metrics(cluster)
        async with open_stream(cluster, puppet) as (stream, wire_id):
            for hits in (32, 16):
                stats = PrefixCacheStats(requests=1, queries=48, hits=hits)
                counts = SchedulerStats(num_running_reqs=1, prefix_cache_stats=stats)
                said = Envelope(0, [WireOutput(wire_id, (66,))], scheduler_stats=counts)
                puppet.say_frames(encode_envelope(said))
                await anext(stream)
            puppet.finish(wire_id, 67)
            await stream.read_all()
        now = scrape(metrics)
        assert now.get("vllm:prefix_cache_queries_total", engine="0") == 96
        assert now.get("vllm:prefix_cache_hits_total", engine="0") == 48
        assert now.get("vllm:generation_tokens_total", engine="0") == 4
        assert now.get("vllm:inter_token_latency_seconds_count", engine="0") == 3
        assert now.get("vllm:iteration_tokens_total_count", engine="0") == 4
        assert now.get("vllm:prompt_tokens_total", engine="0") == 1
        assert now.get("dpkit:engines_unreported") == 2, "the other one had nothing to tell"
        assert now.get("dpkit:engines_without_load") == 0


async def test_an_abort_that_is_never_acknowledged_is_not_measured() -> None:
    async with open_pair() as (cluster, puppet):
        metrics = Metrics(cluster)
        connection = life_of(cluster, "v-0")._connection
        assert isinstance(connection, ForeignConnection)
        async with open_stream(cluster, puppet):
            pass
        await until(lambda: connection.is_idle)
        assert scrape(metrics).get("dpkit:cancel_to_freed_seconds_count", engine="0") == 1
        puppet.acknowledges = False
        async with open_stream(cluster, puppet):
            pass
        await until(lambda: connection.unacknowledged == 1)
        assert scrape(metrics).get("dpkit:cancel_to_freed_seconds_count", engine="0") == 1
        assert scrape(metrics).get("vllm:request_success_total", finished_reason="abort") == 2
