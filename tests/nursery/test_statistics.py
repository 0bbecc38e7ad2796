"""What a cluster tells of its work: every engine's, every request's, and in every report."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import trio
import trio.testing

import dpkit
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import EngineId

# A step of h100-8b takes 6.6 ms and a little more per token; a prompt of 4 blocks is one chunk.
CONFIG = dpkit.parse_config("""
    [[engines]]
    model = "cost:h100-8b"
    scheduler.max_num_seqs = 1
    scheduler.max_num_batched_tokens = 40
""")


async def test_reports_tell_the_work_that_counts_do_not(autojump_clock) -> None:
    async with dpkit.open_cluster(CONFIG) as cluster:
        client = cluster.client
        async with client.generate([7] * 64, max_tokens=100) as first, client.generate([8] * 30):
            await trio.lowlevel.checkpoint()
            [engine] = cluster.statistics().engines
            assert engine.report.step_time_s == 0.0

            await trio.sleep(0.007)  # one step: 40 of the first prompt's 64 tokens
            [engine] = cluster.statistics().engines
            assert engine.report.unprefilled_tokens == 24 + 30
            assert engine.report.context_tokens == 40
            assert 0.0066 < engine.report.step_time_s < 0.008

            async for _ in first:
                break
            [engine] = cluster.statistics().engines
            assert engine.report.unprefilled_tokens == 30, "the first decodes by now"
            assert engine.report.context_tokens == 64


async def test_every_request_under_way_is_told_of(autojump_clock) -> None:
    async with dpkit.open_cluster(CONFIG) as cluster:
        client = cluster.client
        async with client.generate("abc", max_tokens=500, request_id="a"):
            await trio.sleep(1)
            async with client.generate("defg", max_tokens=50, request_id="b"):
                first, second = client.statistics().requests
                assert (first.request_id, first.engine) == ("a", EngineId("engine-0"))
                assert first.prompt_tokens == 3
                assert 100 < first.output_tokens < 500, "a second of steps"
                assert (second.request_id, second.prompt_tokens) == ("b", 4)
                assert (second.output_tokens, second.retries) == (0, 0)
                assert second.age_s == 0.0
                assert first.age_s == 1.0
        assert client.statistics().requests == ()


async def test_refusals_and_ejections_are_told(autojump_clock) -> None:
    config = dpkit.parse_config("""
        [[engines]]
        model = "cost:h100-8b"
        count = 2
        [admission]
        max_inflight = 1
        max_queued = 1
    """)
    async with dpkit.open_cluster(config) as cluster, trio.open_nursery() as nursery:
        for tenant in ("ada", "grace"):
            nursery.start_soon(partial(cluster.client.complete, "hi", tenant=tenant))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(dpkit.Overloaded):
            await cluster.client.complete("one too many")
        admission = cluster.client.statistics().admission
        assert (admission.queued, admission.refused) == (1, 1)
        assert sum(admission.queued_by_tenant.values()) == 1
        health = cluster.statistics().health
        assert (health.serving, health.ejected, health.probes) == (2, 0, 0)
        assert cluster.statistics().events_lost == 0
        nursery.cancel_scope.cancel()


async def test_the_event_log_tells_the_time_of_day(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    config = dpkit.parse_config(f"""
        [[engines]]
        model = "echo"
        [log]
        events = "{path}"
    """)
    began = datetime.now(UTC)
    async with dpkit.open_cluster(config) as cluster:
        await cluster.client.complete("hi", request_id="a")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["engine_ready", "request_ended"]
    assert lines[1]["request_id"] == "a"
    began -= timedelta(seconds=1)  # the events' clock is another one, which may be slewed
    assert all(began <= datetime.fromisoformat(line["time"]) for line in lines)
    assert lines[0]["at"] <= lines[1]["at"]


class CrashesAtStepSix(EchoModel):
    """Fails once."""

    steps = 0

    def execute(self, batch, cache):
        CrashesAtStepSix.steps += 1
        if CrashesAtStepSix.steps == 6:
            raise RuntimeError("boom")
        return super().execute(batch, cache)


async def test_totals_count_all_lives_of_an_engine(autojump_clock) -> None:
    CrashesAtStepSix.steps = 0
    config = dpkit.parse_config(f"""
        [[engines]]
        model = "{__name__}:CrashesAtStepSix"
        [admission]
        resume = true
    """)
    async with dpkit.open_cluster(config) as cluster:
        done = await cluster.client.complete("ten tokens")
        assert done.text == "ten tokens"
        [engine] = cluster.statistics().engines
        assert engine.restarts == 1
        assert engine.core.output_tokens == 6, "the present life's"
        assert engine.totals.output_tokens == len(done.token_ids) == 11
        assert engine.totals.requests == 2, "lost once, and finished once"
