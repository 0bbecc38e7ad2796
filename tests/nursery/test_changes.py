"""Changes to a running cluster: one after the other, as a whole or not at all."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import evolve

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ClusterClosed, ConfigError, EngineLost, RequestRejected, ScalingFailed
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.nursery.reload import make_plan
from dpkit.testing.faults import CRASH, FaultyModel, kill_coordinator
from dpkit.testing.idle import check_idle
from dpkit.testing.wrapper import named
from tests.nursery.lab import Timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dpkit.abc import Model
    from dpkit.config.schema import Config
    from dpkit.messages import Batch, StepResult
    from dpkit.nursery.cluster import Cluster


@contextmanager
def configs(model: Model | None = None) -> Iterator[Callable[..., Config]]:
    """Makes configs of one model: the count, its group's settings, and other tables."""
    with named(Timed() if model is None else model) as name:

        def make(count: int = 1, group: str = "", tables: str = "") -> Config:
            return parse_config(f'{tables}\n[[engines]]\nmodel="{name}"\ncount={count}\n{group}\n')

        yield make


def engines(cluster: Cluster) -> list[str]:
    return [str(each.engine) for each in cluster.statistics().engines]


def running() -> list[str]:
    """The busy loops that there are."""

    def walk(task: trio.lowlevel.Task) -> Iterator[str]:
        yield task.name
        for nursery in task.child_nurseries:
            for child in nursery.child_tasks:
                yield from walk(child)

    root = trio.lowlevel.current_root_task()
    assert root is not None
    return sorted(n.removeprefix("life of ") for n in walk(root) if n.startswith("life of "))


ONCE = "supervision={intensity=0}"


class Mortal(Timed):
    """Fails at a request called ``kill``."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        if any(row.request_id == "kill" for row in batch.rows):
            raise RuntimeError("killed")
        return super().execute(batch, cache)


async def kill(cluster: Cluster, engine: str) -> None:
    with pytest.raises(EngineLost):
        await cluster.client.complete("x", request_id="kill", engine=engine)
    await trio.testing.wait_all_tasks_blocked()


async def test_changes_wait_for_one_another(autojump_clock: object) -> None:
    with configs() as make:
        async with open_cluster(make()) as cluster:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cluster.scale, "engine", 2)
                nursery.start_soon(cluster.scale, "engine", 2)
                nursery.start_soon(cluster.apply, make(3, "scheduler={max_num_seqs=9}"))
                nursery.start_soon(cluster.scale, "engine", 2)
            await trio.testing.wait_all_tasks_blocked()
            count = cluster.config.engines[0].count
            assert running() == sorted(engines(cluster))
            assert len(engines(cluster)) == count
        check_idle(cluster)


async def test_a_policy_that_cannot_be_made_changes_nothing(autojump_clock: object) -> None:
    with configs() as make:
        async with open_cluster(config := make()) as cluster:
            with pytest.raises(ConfigError, match="nowhere"):
                await cluster.apply(make(3, tables='balancer.policy="nowhere:Policy"'))
            assert cluster.config == config
            assert running() == engines(cluster) == ["engine-0"]


async def test_a_switch_that_fails_sends_the_new_engines_away(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by a bug")

    with configs() as make:
        async with open_cluster(make()) as cluster:
            monkeypatch.setattr(cluster, "_switch", fail)
            with pytest.raises(ZeroDivisionError, match="by a bug"):
                await cluster.apply(make(3))
            await trio.testing.wait_all_tasks_blocked()
            assert running() == engines(cluster) == ["engine-0"]
            assert (await cluster.client.complete("a")).text == "a"
        check_idle(cluster)


async def test_a_cancelled_apply_changes_nothing(autojump_clock: object) -> None:
    with configs(FaultyModel(Timed(), births=dict.fromkeys(range(1, 99), CRASH))) as make:
        group = 'supervision={backoff="10s",intensity=1000}'
        async with open_cluster(config := make(group=group)) as cluster:
            with trio.move_on_after(1) as scope:
                await cluster.apply(make(2, group=group))
            assert scope.cancelled_caught
            assert cluster.config == config
            assert engines(cluster) == ["engine-0"]
            with pytest.raises(RequestRejected, match="does not exist"):
                await cluster.client.complete("a", engine="engine-1")


def test_the_tokenizer_of_clients_cannot_change() -> None:
    def config(model: str) -> Config:
        return parse_config(f'[[engines]]\nmodel="{model}"')

    assert make_plan(config("echo"), config("cost:h20-4b"))
    with pytest.raises(ConfigError, match=r"engine\.model: cannot change"):
        make_plan(config("echo"), config("some.module:Class"))


@pytest.mark.parametrize(
    "setting",
    [
        'log.events="events.jsonl"',
        'log.steps="steps.csv"',
        "coordinator.kv_publish_delta=0.5",
        'cluster.kill_after="1s"',
        'cluster.pre_stop="1s"',
    ],
)
def test_what_would_take_no_effect_is_refused(setting: str) -> None:
    with configs() as make, pytest.raises(ConfigError, match="cannot change"):
        make_plan(make(), make(tables=setting))


@pytest.mark.parametrize("way", ["scale", "apply"])
async def test_a_stuck_engine_that_leaves_keeps_nobody_waiting(way: str) -> None:
    stuck = threading.Event()

    class Hangs(EchoModel):
        inline = False

        def execute(self, batch: Batch, cache: Any) -> StepResult:
            if batch.rows[0].request_id == "hang":
                stuck.wait()
            return super().execute(batch, cache)

    with configs(Hangs()) as make, trio.fail_after(30):
        group, tables = 'supervision={step_timeout="100ms"}', 'cluster.grace="300ms"'
        async with open_cluster(make(2, group, tables)) as cluster:
            with pytest.raises(EngineLost):
                await cluster.client.complete("a", request_id="hang", engine="engine-1")
            if way == "scale":
                await cluster.scale("engine", 1)
            else:
                await cluster.apply(make(1, group, tables))
            assert engines(cluster) == ["engine-0"]
        stuck.set()


@pytest.mark.parametrize("way", ["scale", "apply"])
async def test_a_change_ends_when_the_cluster_closes(autojump_clock: object, way: str) -> None:
    group = 'supervision={backoff="10s",intensity=1000}'
    model = FaultyModel(Timed(), births=dict.fromkeys(range(1, 99), CRASH))
    with configs(model) as make, trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def change() -> None:
                with pytest.raises(ClusterClosed, match="its engines cannot be changed any more"):
                    await (
                        cluster.scale("engine", 2)
                        if way == "scale"
                        else cluster.apply(make(2, group))
                    )

            async with open_cluster(make(1, group)) as cluster:
                nursery.start_soon(change)
                await trio.sleep(1)
        await change()


async def test_there_are_engines_at_each_moment_of_an_apply(autojump_clock: object) -> None:
    with configs() as make:
        async with open_cluster(make(2, tables="admission.max_queued=0")) as cluster:
            done = False

            async def ask() -> None:
                while not done:
                    async with cluster.client.generate("a", max_tokens=1):
                        pass

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                for limit in range(9, 13):
                    group = f"scheduler={{max_num_seqs={limit}}}"
                    await cluster.apply(make(2, group, "admission.max_queued=0"))
                done = True
        check_idle(cluster)


@pytest.mark.parametrize("way", ["scale", "apply"])
async def test_engines_that_are_down_are_not_enough(autojump_clock: object, way: str) -> None:
    with configs(Mortal()) as make:
        async with open_cluster(make(2, ONCE)) as cluster:
            await kill(cluster, "engine-0")
            change = cluster.scale("engine", 1) if way == "scale" else cluster.apply(make(1, ONCE))
            said = r"not down would be left, and cluster\.min_ready is 1"
            with pytest.raises(ConfigError, match=said):
                await change
            assert (await cluster.client.complete("a")).text == "a"
        assert cluster.statistics().engines[0].state is EngineState.DOWN


async def test_no_name_is_left_behind_by_a_failed_scale(autojump_clock: object) -> None:
    model = FaultyModel(Timed(), births={2: CRASH})
    with configs(model) as make:
        async with open_cluster(make(1, ONCE)) as cluster:
            said = r"engine engine-[12] did not come up: .*; the new engines are gone again, the"
            with pytest.raises(ScalingFailed, match=said):
                await cluster.scale("engine", 3)
            for name in ("engine-1", "engine-2"):
                with pytest.raises(RequestRejected, match="does not exist"):
                    await cluster.client.complete("a", engine=name)


async def test_a_cancelled_scale_down_is_one(autojump_clock: object) -> None:
    with configs() as make:
        async with open_cluster(make(2)) as cluster:
            async with cluster.client.generate("abcdefgh", engine="engine-1") as stream:
                with trio.move_on_after(0.25):
                    await cluster.scale("engine", 1)
                assert cluster.config.engines[0].count == 1
                with pytest.raises(RequestRejected, match="does not exist"):
                    await cluster.client.complete("a", engine="engine-1")
                assert (await stream.read_all()).text == "abcdefgh"
            await cluster.scale("engine", 2)
            assert engines(cluster) == ["engine-0", "engine-1#1"]


async def test_what_leaving_engines_do_not_finish_in_time_is_lost(autojump_clock: object) -> None:
    with configs() as make:
        async with (
            open_cluster(make(2)) as cluster,
            cluster.client.generate("abcdefgh", engine="engine-1") as stream,
        ):
            await cluster.scale("engine", 1, deadline=0.25)
            assert trio.current_time() == 0.25
            with pytest.raises(EngineLost, match=r"held request .*: engine engine-1 was retired"):
                await stream.read_all()
            assert stream.text == "ab"


async def test_a_coordinator_that_is_back_knows_who_still_finishes(autojump_clock: object) -> None:
    with configs() as make:
        async with open_cluster(make(2)) as cluster:
            async with (
                cluster.client.generate("x" * 200, max_tokens=200, engine="engine-1") as stream,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(cluster.scale, "engine", 1)
                await trio.testing.wait_all_tasks_blocked()
                kill_coordinator(cluster)
                assert (await stream.read_all()).text == "x" * 200
            await trio.sleep(1)  # it reads what there is ten times a second
            heard = cluster.statistics().coordinator
            assert (heard.unknown_engines, heard.ended_lives > 0) == (0, True)
        assert cluster.statistics().coordinator_restarts == 1
        check_idle(cluster)


async def test_engines_that_restart_together_are_replaced_together(autojump_clock: object) -> None:
    group = 'supervision={strategy="one_for_all"}'
    with configs(Mortal()) as make:
        async with open_cluster(make(2, group)) as cluster:
            await cluster.apply(make(3, group))
            assert engines(cluster) == ["engine-0#1", "engine-1#1", "engine-2"]
            with pytest.raises(ConfigError, match="engine: its engines depend on one another"):
                await cluster.scale("engine", 2)
            await kill(cluster, "engine-2")
            await trio.sleep(5)
            assert engines(cluster) == ["engine-0#2", "engine-1#2", "engine-2#1"]


@pytest.mark.parametrize("count", [True, 2.0, "2", None, 5000])
async def test_a_count_of_another_kind_is_refused(autojump_clock: object, count: Any) -> None:
    why = "must be between 1 and 1024" if count == 5000 else "it must be a whole number"
    with configs() as make:
        async with open_cluster(make()) as cluster:
            with pytest.raises(ConfigError, match=f"cannot scale engine to .*: .*{why}"):
                await cluster.scale("engine", count)
            with pytest.raises(ConfigError, match="cannot scale 'nobody': the groups are engine"):
                await cluster.scale("nobody", 2)
            with pytest.raises(ConfigError, match="deadline must be"):
                await cluster.scale("engine", 2, deadline=math.nan)
            assert engines(cluster) == ["engine-0"]


@pytest.mark.parametrize("deadline", [None, "x", float("nan")])
async def test_a_drain_to_no_moment_changes_nothing(autojump_clock: object, deadline: Any) -> None:
    async with open_cluster(parse_config('[[engines]]\nmodel = "echo"\n')) as cluster:
        with pytest.raises(ConfigError):
            await cluster.drain(deadline)
        assert (await cluster.client.complete("still here")).text == "still here"


async def test_a_file_can_be_applied_by_its_path(autojump_clock: object, tmp_path: Path) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text('[[engines]]\nmodel = "echo"\ncount = 2\n')
    async with open_cluster(parse_config('[[engines]]\nmodel = "echo"\n')) as cluster:
        assert str(cluster.plan(path)) == "engines.engine: 1 → 2 engines"
        await cluster.apply(str(path))
        assert len(cluster.statistics().engines) == 2


async def test_a_change_to_one_engine_speaks_of_one(autojump_clock: object) -> None:
    one = parse_config('[[engines]]\nmodel = "echo"\n')
    async with open_cluster(evolve(one, engines=(evolve(one.engines[0], count=2),))) as cluster:
        assert str(cluster.plan(one)) == "engines.engine: 2 → 1 engine"
        await cluster.scale("engine", 1)
        assert [each.detail for each in cluster.events if each.kind is EventKind.SCALED] == [
            "engine: 1 engine"
        ]
