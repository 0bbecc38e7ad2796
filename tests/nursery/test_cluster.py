"""A config becomes a running tree, and nothing of it is left afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import trio
import trio.testing
from attrs import evolve

from dpkit._trio import seeded_scheduler
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ClusterFailed, ConfigError, InternalError, ModelNotFound
from dpkit.messages import EngineId, SamplingParams, StepResult
from dpkit.names import EngineState
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.idle import check_idle
from tests.nursery.lab import loop_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dpkit.balancer.view import LoadView
    from dpkit.config.schema import Config
    from dpkit.messages import Batch, BatchRow
    from dpkit.nursery.client import Client

TEN_LINES = """\
[[engines]]
name = "big"
count = 2
model = "echo"

[[engines]]
name = "small"
model = "echo"
kv.num_blocks = 100
"""


def _drawn(row: BatchRow) -> int | None:
    """A letter that depends on nothing but the request's seed and the position."""
    if row.output_index is None:
        return None
    draw = hashlib.sha256(f"{row.sampling.seed}/{row.output_index}".encode()).digest()[0]
    return ord("a") + draw % 26


class Sampling(EchoModel):
    """Samples as a real model does: by the seed of the request."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:  # noqa: ARG002 - it has none
        return StepResult(sampled=[_drawn(row) for row in batch.rows])


class Threaded(EchoModel):
    """Computes in its engine's thread."""

    inline: ClassVar[bool] = False


class NoMemory(EchoModel):
    """Cannot allocate its cache."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        raise MemoryError(f"{num_blocks} blocks of {block_size}")


class Endless(EchoModel):
    """Its steps last an hour."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=3600)


async def test_a_file_of_ten_lines_works(autojump_clock: object, tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(TEN_LINES)
    async with open_cluster(path) as cluster:
        assert (await cluster.client.complete("hello")).text == "hello"
    async with open_cluster(str(path)) as cluster:
        assert (await cluster.client.complete("hello")).text == "hello"


async def test_engines_are_numbered_within_their_group(
    autojump_clock: object, tmp_path: Path
) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(TEN_LINES)
    async with open_cluster(path) as cluster:
        engines = cluster.statistics().engines
        assert [(str(each.engine), each.core.num_blocks) for each in engines] == [
            ("big-0", 4096),
            ("big-1", 4096),
            ("small-0", 100),
        ]
        for each in engines:
            completion = await cluster.client.complete("hi", engine=each.engine.name, max_tokens=2)
            assert completion.engine == each.engine


def test_without_trio_the_way_to_it_is_told(make_config: Callable[..., Config]) -> None:
    async def main() -> None:
        async with open_cluster(make_config()):
            pass

    with pytest.raises(RuntimeError, match=r"no Trio runs: .*see examples/beside_asyncio\.py$"):
        asyncio.run(main())


@pytest.mark.parametrize("config", [{"engines": [{"model": "echo"}]}, None, 3, b"dpkit.toml"])
async def test_what_is_no_config_is_told_apart_from_a_file_that_is_not_there(config: Any) -> None:
    with pytest.raises(TypeError, match=r"the path of a TOML file, .*; parse_config takes TOML"):
        async with open_cluster(config):
            pass


@pytest.mark.parametrize("clients", [0, -1, "2", True, 1.0])
async def test_a_cluster_has_one_client_or_more(
    clients: Any, make_config: Callable[..., Config]
) -> None:
    with pytest.raises(ValueError, match="clients must be a whole number from 1 on"):
        async with open_cluster(make_config(), clients=clients):
            pass


@pytest.mark.parametrize("seed", range(10))
def test_a_start_that_is_cancelled_does_not_wait_for_engines_that_never_lived(
    seed: int, make_config: Callable[..., Config]
) -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with open_cluster(make_config(count=3)):
                pytest.fail("it began")
        assert trio.current_time() == 0

    with seeded_scheduler(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_config_that_is_wrong_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text('[[engines]]\nmodel = "echo"\ncuont = 2\n')
    before = trio.lowlevel.current_statistics().tasks_living
    with pytest.raises(ConfigError, match="cuont"):
        await open_cluster(path).__aenter__()
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_a_model_that_is_not_there_starts_nothing(make_config: Callable[..., Config]) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    with pytest.raises(ModelNotFound, match="has no 'Nowhere'"):
        await open_cluster(make_config(f"{__name__}:Nowhere")).__aenter__()
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_statistics_count_what_the_engines_did(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("cost:h20-4b")) as cluster:
        for name in ("engine-0", "engine-0", "engine-1"):
            await cluster.client.complete([1] * 40, max_tokens=8, engine=name)
        now = cluster.statistics()
    first, second = (each.core for each in now.engines)
    assert (first.requests_finished, first.prompt_tokens, first.output_tokens) == (2, 80, 16)
    assert (second.requests_finished, second.prompt_tokens, second.output_tokens) == (1, 40, 8)
    assert first.prefix_hit_tokens == 32, "the second prompt found two blocks of the first"
    assert first.steps == 16
    assert now.clients[0].finished == 3
    for then, each in zip(cluster.statistics().engines, now.engines, strict=True):
        assert then == evolve(each, state=EngineState.DOWN, since=then.since), (
            "and still answers when it is over"
        )
    check_idle(cluster)


def _view(client: Client) -> LoadView:
    return client._flights._dispatch._view


async def test_snapshots_reach_every_client(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("cost:h20-4b"), clients=3) as cluster:
        async with cluster.clients[0].generate([1] * 4000, max_tokens=500, engine="engine-1"):
            await trio.sleep(1)
            for client in cluster.clients:
                assert _view(client).running == [0, 1]
                assert _view(client).kv_cache_usage[1] == pytest.approx(0.0087, rel=0.1)
        await trio.sleep(1)
        for client in cluster.clients:
            assert _view(client).running == [0, 0]


async def test_a_burst_spreads_evenly(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("cost:h20-4b", count=4)) as cluster:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(cluster.client.complete, "hello", SamplingParams(max_tokens=5))
            await trio.sleep(0.001)
            assert list(cluster.client.statistics().inflight.values()) == [5, 5, 5, 5]
        check_idle(cluster)


async def test_clients_keep_separate_books(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("cost:h20-4b"), clients=2) as cluster:
        first, second = cluster.clients
        async with first.generate("hello", engine="engine-0"):
            assert first.statistics().inflight == {EngineId("engine-0"): 1}
            assert second.statistics().inflight == {}
        assert cluster.client is first


@pytest.mark.parametrize("wave_coordination", ["true", "false"])
async def test_wave_coordination_changes_no_answer(
    autojump_clock: object, make_config: Callable[..., Config], wave_coordination: str
) -> None:
    config = make_config("cost:h20-4b", f"coordinator.wave_coordination={wave_coordination}")
    texts = []
    async with open_cluster(config) as cluster:

        async def ask(number: int) -> None:
            texts.append((await cluster.client.complete(f"{number:05}", max_tokens=5)).text)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, number)
        await trio.sleep(1)
        assert cluster.statistics().coordinator.published
        check_idle(cluster)
    assert sorted(texts) == [f"{number:05}" for number in range(20)]


@pytest.mark.parametrize("publish", ["true", "false"])
async def test_publish_false_silences_the_engines(
    autojump_clock: object, make_config: Callable[..., Config], publish: str
) -> None:
    async with open_cluster(make_config("echo", f"coordinator.publish={publish}")) as cluster:
        await cluster.client.complete("hello")
        await trio.sleep(1)
        assert (cluster.statistics().fanin.received > 0) is (publish == "true")


async def _texts(config: Config) -> list[str]:
    async with open_cluster(config, clients=2) as cluster:
        return [
            (await client.complete("hello", max_tokens=12, temperature=1.0)).text
            for client in cluster.clients
            for _ in range(2)
        ]


async def test_a_seed_repeats_the_sampled_text(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    model = f"{__name__}:Sampling"
    one = await _texts(make_config(model, "cluster.seed=1"))
    assert len(set(one)) == 4, "each request draws its own, whichever client it has"
    assert await _texts(make_config(model, "cluster.seed=1")) == one
    assert await _texts(make_config(model, "cluster.seed=2")) != one
    assert await _texts(make_config(model)) != await _texts(make_config(model))


def _history(config: Config, seed: int) -> list[tuple[float, int, str, str]]:
    """All outputs of twenty concurrent requests, with time and engine."""
    history: list[tuple[float, int, str, str]] = []

    async def ask(cluster: Cluster, number: int) -> None:
        async with cluster.client.generate(f"{number:05}", max_tokens=7) as stream:
            history.extend(
                [
                    (trio.current_time(), number, output.text, stream.engine.name)
                    async for output in stream
                ]
            )

    async def main() -> None:
        async with open_cluster(config) as cluster, trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, cluster, number)

    with seeded_scheduler(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return history


@pytest.mark.parametrize("model", ["echo", "cost:h20-4b"])
def test_under_one_schedule_everything_repeats(
    make_config: Callable[..., Config], model: str
) -> None:
    config = make_config(model, "kv.num_blocks=8", "kv.block_size=4", count=2)
    assert _history(config, 1) == _history(config, 1)
    assert _history(config, 1) != _history(config, 2)


async def test_models_of_ones_own_run_in_threads_that_end_with_the_cluster(
    make_config: Callable[..., Config],
) -> None:
    before = set(threading.enumerate())
    async with open_cluster(make_config(f"{__name__}:Threaded", count=3)) as cluster:
        names = {each.name for each in threading.enumerate() if each.name.startswith("dpkit ")}
        assert names == {"dpkit engine-0", "dpkit engine-1", "dpkit engine-2"}
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(cluster.client.complete, "hello")
        async with cluster.client.generate("hello") as stream:
            await stream.__anext__()
    check_idle(cluster)
    left = {each.name for each in set(threading.enumerate()) - before}
    assert not any(name.startswith("dpkit ") for name in left)


async def test_simulated_models_use_no_thread_at_all(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    """While a thread works, a virtual clock jumps: this deadline would have passed."""
    for model in ("echo", "cost:h20-4b", f"{__name__}:Sampling"):
        with trio.fail_after(3600):
            async with open_cluster(make_config(model)) as cluster:
                await cluster.client.complete("hello", max_tokens=3)
                assert trio.current_time() < 100


async def test_an_engine_that_cannot_start_ends_the_start(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    config = make_config(f"{__name__}:NoMemory", "kv.num_blocks=3")
    with pytest.raises(ClusterFailed, match=r"engine-\d failed: MemoryError: 3 blocks") as caught:
        await open_cluster(config).__aenter__()
    assert isinstance(caught.value.__cause__, MemoryError)


async def test_a_step_longer_than_the_grace_is_cut(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    config = make_config(f"{__name__}:Endless", "cluster.grace=5s")
    async with open_cluster(config) as cluster, cluster.client.generate("hello"):
        await trio.sleep(1)
    assert trio.current_time() == 6


async def test_a_step_within_the_grace_is_finished(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    config = make_config(
        f"{__name__}:Endless", "cluster.grace=3600s", "supervision.step_timeout=2h"
    )
    async with open_cluster(config) as cluster, cluster.client.generate("hello"):
        await trio.sleep(1)
    assert trio.current_time() == 3600
    check_idle(cluster)


async def test_what_is_live_tells_its_state_in_one_line(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with (
        open_cluster(make_config("cost:h20-4b", "cluster.name=mine")) as cluster,
        cluster.client.generate("hello", request_id="r", engine="engine-1") as stream,
    ):
        await stream.__anext__()
        assert repr(cluster) == (
            "<Cluster mine: "
            "<EngineSlot engine-0: ready, 0 restarts, "
            "<BusyLoop engine-0: ready, 0 waiting, 0 running>>, "
            "<EngineSlot engine-1: ready, 0 restarts, "
            "<BusyLoop engine-1: ready, 0 waiting, 1 running>>>"
        )
        assert repr(stream) == "<OutputStream r: on engine-1, 1 tokens>"
    assert "engine-0: down, 0 restarts, <BusyLoop engine-0: ended" in repr(cluster)


async def test_check_idle_lists_all_that_is_left(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("cost:h20-4b", "kv.num_blocks=8")) as cluster:
        async with cluster.client.generate([1] * 40, engine="engine-1", max_tokens=50) as stream:
            await stream.__anext__()
            with pytest.raises(InternalError) as caught:
                check_idle(cluster)
        assert str(caught.value) == (
            "the cluster is not idle: 1 requests are in flight on engine-1; "
            "engine-1 runs 1 and has 0 waiting; engine-1 holds 3 of 8 blocks"
        )
    check_idle(cluster)


async def test_the_audit_names_each_contradiction(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("echo")) as cluster:
        assert cluster.audit() == ()
        charge = cluster.client._ledger.charge("ghost", EngineId("engine-0"))
        loop_of(cluster._slots[1]).core._scheduler.pool._refs[0] = 1
        books, blocks = cluster.audit()
        assert books == "1 requests are charged, 0 are on engines"
        assert blocks.startswith("engine engine-1: ")
        charge.release()
        del loop_of(cluster._slots[1]).core._scheduler.pool._refs[0]
        assert cluster.audit() == ()
