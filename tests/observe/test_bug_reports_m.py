"""What others' users have reported of metrics: each is a promise here, by the report's number."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.errors import DeadlineExceeded, EngineLost, RequestRejected
from dpkit.names import Cause, FinishReason
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.observe import Metrics
from tests.clusters import told
from tests.nursery.lab import Timed, settle
from tests.nursery.test_changes import Mortal, configs, kill
from tests.observe.lab import assert_never_down, open_observed, scrape
from tests.serve.desk import CHAT, COMPLETIONS, ECHO

if TYPE_CHECKING:
    from trio.testing import MockClock

FOUR = ECHO.replace("count = 2", "count = 4")


async def test_M01_each_engine_has_its_rows_and_they_only_grow(autojump_clock: MockClock) -> None:
    """Restarts, engines that go and come back, a reload: whatever becomes of engines."""
    with configs(Mortal()) as make:
        async with open_cluster(make(4)) as cluster:
            metrics = Metrics(cluster)
            before, ends = scrape(metrics), 0

            async def ask_each() -> None:
                async with trio.open_nursery() as nursery:
                    for engine in cluster.engines:
                        if engine.state == "ready":
                            nursery.start_soon(ask, engine.name)

            async def ask(engine: str) -> None:
                await cluster.client.complete("abcd", engine=engine)

            def look(tokens: int) -> None:
                nonlocal before
                now = scrape(metrics)
                assert_never_down(before, now)
                assert now.get("vllm:generation_tokens_total") == tokens
                assert now.get("vllm:prompt_tokens_total") == tokens - ends
                before = now

            await ask_each()
            ends += 4
            look(20)
            assert set(before.series("vllm:generation_tokens_total").values()) == {5}
            await kill(cluster, "engine-2")
            await trio.sleep(60)
            look(20)
            assert before.get("dpkit:engine_restarts_total", engine="2") == 1
            await cluster.scale("engine", 2)
            await settle()
            look(20)
            assert not before.series("vllm:num_requests_running", engine="3"), "it is gone"
            assert before.get("vllm:generation_tokens_total", engine="3") == 5, "what it did is not"
            await cluster.scale("engine", 4)
            await ask_each()
            ends += 4
            look(40)
            assert before.get("vllm:generation_tokens_total", engine="3") == 10
            await cluster.apply(make(4, "scheduler={max_num_seqs=9}"))
            look(40)
            await ask_each()
            ends += 4
            look(60)
            assert before.get("dpkit:engine_restarts_total") == 1
            assert before.get("vllm:request_success_total", finished_reason="stop") == 12
            assert before.get("vllm:inter_token_latency_seconds_count") == 12 * 4


async def test_M02_rows_of_all_ranks_are_told_by_rank(autojump_clock: MockClock) -> None:
    async with open_observed(FOUR) as (desk, metrics):
        for _ in range(8):
            await desk.ask(COMPLETIONS, prompt="ab")
        now = scrape(metrics)
        for rank in map(str, range(4)):
            assert now.get("vllm:prompt_tokens_total", engine=rank) == 4
            assert now.get("dpkit:engine_info", engine=rank, name=f"e-{rank}") == 1
        assert now.get("dpkit:picks_total") == 8


async def test_M03_several_clients_are_told_as_one(autojump_clock: MockClock) -> None:
    with configs() as make:
        async with open_cluster(make(4), clients=3) as cluster:
            metrics = Metrics(cluster)
            async with trio.open_nursery() as nursery:
                for client in cluster.clients:
                    for _ in range(4):
                        nursery.start_soon(client.complete, "abcdefgh")
                await trio.sleep(0.55)
                now = scrape(metrics)
                assert now.get("dpkit:requests_inflight") == 12
                assert now.get("vllm:num_requests_running") == 12
                assert len(now.series("vllm:num_requests_running")) == 4
            now = scrape(metrics)
            assert now.get("dpkit:requests_admitted_total") == 12
            assert now.get("vllm:time_to_first_token_seconds_count") == 12
            assert now.get("dpkit:requests_inflight") == 0


async def test_M05_a_life_that_follows_is_looked_at(autojump_clock: MockClock) -> None:
    with configs(Mortal()) as make:
        async with open_cluster(make(1)) as cluster:
            metrics = Metrics(cluster)
            await kill(cluster, "engine-0")
            now = scrape(metrics)
            assert now.get("dpkit:engine_state", state="starting") == 1
            assert now.get("dpkit:engine_state") == 1
            await trio.sleep(60)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cluster.client.complete, "abcdefgh")
                await trio.sleep(0.35)
                now = scrape(metrics)
                assert now.get("vllm:num_requests_running") == 1, "not the zeros of who is gone"
                assert now.get("vllm:kv_cache_usage_perc") > 0
                assert now.get("dpkit:engine_state", state="ready") == 1


async def test_M06_who_is_down_since_when_and_why(autojump_clock: MockClock) -> None:
    config = parse_config(f"""
        [[engines]]
        name = "e"
        model = "{__name__}:Fragile"
        count = 4
        supervision = {{ intensity = 0 }}
    """)
    async with open_observed(config) as (desk, metrics):
        began = datetime.now(UTC)
        await trio.sleep(100)
        with pytest.raises(EngineLost):
            await desk.cluster.client.complete("a", request_id="kill", engine="e-2")
        await trio.sleep(20)
        said = json.loads((await desk.get("/statistics")).body)
        [down] = [each for each in said["engines"] if each["state"] == "down"]
        assert (down["rank"], said["ranks"]["e-2"], down["engine"]) == (2, 2, "e-2")
        assert "RuntimeError: killed" in down["last_error"]
        since = {name: datetime.fromisoformat(at) for name, at in said["since"].items()}
        assert since["e-2"] - since["e-1"] == pytest.approx(
            timedelta(seconds=100), abs=timedelta(seconds=5)
        )
        assert abs(since["e-2"] - began) < timedelta(seconds=60), "the time of day"
        now = scrape(metrics)
        assert now.get("dpkit:engine_state", engine="2", state="down") == 1
        assert now.get("dpkit:engine_state_seconds", engine="2") == pytest.approx(20)
        assert now.get("dpkit:engine_state_seconds", engine="1") == pytest.approx(120)


class Fragile(Mortal):
    """As `Mortal`, by a name that a config can have."""


async def test_M07_each_end_is_told_once_with_its_cause(autojump_clock: MockClock) -> None:
    with configs(Mortal()) as make:
        async with open_cluster(make(1, "supervision={intensity=3}")) as cluster:
            metrics, client = Metrics(cluster), cluster.client
            with trio.move_on_after(0.25):
                await client.complete("abcdefgh", request_id="aborted")
            with pytest.raises(DeadlineExceeded):
                await client.complete("abcdefgh", request_id="late", timeout=0.25)
            await client.complete("a", request_id="finished")
            await client.complete("abc", request_id="cut", max_tokens=1)
            with pytest.raises(RequestRejected):
                await client.complete([10**9], request_id="refused")
            await kill(cluster, "engine-0")
            ends = told(cluster, EventKind.REQUEST_ENDED)
            assert {end.request_id: (end.reason, end.cause) for end in ends} == {
                "aborted": (FinishReason.ABORT, Cause.CLIENT),
                "late": (FinishReason.ERROR, Cause.DEADLINE),
                "finished": (FinishReason.STOP, Cause.STOP),
                "cut": (FinishReason.LENGTH, Cause.LENGTH),
                "refused": (FinishReason.ERROR, Cause.REFUSED),
                "kill": (FinishReason.ERROR, Cause.ENGINE_LOST),
            }
            assert len(ends) == 6
            now = scrape(metrics)
            ended = now.series("dpkit:requests_ended_total")
            assert sum(ended.values()) == now.get("dpkit:requests_admitted_total") == 6
            assert {dict(labels)["cause"]: n for (_, labels), n in ended.items()} == {
                end.cause: 1 for end in ends
            }
            assert now.get("vllm:request_success_total") == 6
            assert now.get("vllm:request_success_total", finished_reason="error") == 3
            assert now.get("vllm:e2e_request_latency_seconds_count") == 2, "those that went well"


async def test_M08_engines_that_tell_no_load_are_counted_and_named(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with configs() as make:
        async with open_cluster(make(2, tables="coordinator.publish=false")) as cluster:
            metrics = Metrics(cluster)
            without = "dpkit:engines_without_load"
            for _ in range(3):
                assert scrape(metrics).get(without) == 0
                await cluster.client.complete("a", engine="engine-1")
                await trio.sleep(4)
            assert scrape(metrics).get(without) == 1, "the other one had nothing to tell"
            await cluster.client.complete("a", engine="engine-1")
            await cluster.client.complete("a", engine="engine-1")
            [warning] = [each for each in caplog.records if "never told its load" in each.message]
            assert "engine engine-1 has served for 10 s" in warning.message
            await cluster.scale("engine", 1)
            assert scrape(metrics).get(without) == 0, "it is gone"
    with configs() as make:
        async with open_cluster(make(2)) as cluster:
            metrics = Metrics(cluster)
            for _ in range(3):
                await cluster.client.complete("a", engine="engine-1")
                await trio.sleep(4)
            assert scrape(metrics).get(without) == 0


async def test_M09_requests_latencies_tokens_and_errors_by_engine(
    autojump_clock: MockClock,
) -> None:
    config = f"[[engines]]\nname = 'e'\nmodel = '{__name__}:Plain'\ncount = 2\n"
    async with open_observed(config) as (desk, metrics):
        for number in range(6):
            path = CHAT if number % 2 else COMPLETIONS
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
            asked = asked if number % 2 else {"prompt": "abcd"}
            await desk.ask(path, **asked)
        assert (await desk.refused(COMPLETIONS, prompt="a", model="other"))[0] == 404
        now = scrape(metrics)
        name = f"{__name__}:Plain"
        for rank in "01":
            assert now.get("vllm:request_success_total", engine=rank, model_name=name) == 3
            assert now.get("vllm:time_to_first_token_seconds_count", engine=rank) == 3
            assert now.get("vllm:time_to_first_token_seconds_sum", engine=rank) == pytest.approx(
                0.3
            )
            assert now.get("vllm:generation_tokens_total", engine=rank) > 0
        assert now.get("http_requests_total", status="4xx") == 1
        assert now.get("http_requests_total", handler=CHAT, status="2xx") == 3


class Plain(Timed):
    """100 ms a step, by a name that a config can have."""
