"""Reports of class L that concern a config which changes while the cluster runs."""

# ruff: noqa: N802 - the reports' numbers are capitals

from __future__ import annotations

import trio

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.idle import check_idle

TWO_GROUPS = """
    [[engines]]
    name = "stays"
    model = "echo"
    [[engines]]
    name = "goes"
    model = "echo"
    count = 3
"""
OTHERS = TWO_GROUPS.replace("goes", "comes").replace("count = 3", "count = 1")


async def test_L07_tasks_of_engines_that_left_are_gone(autojump_clock: object) -> None:
    async with open_cluster(parse_config(TWO_GROUPS)) as cluster:
        tasks = trio.lowlevel.current_statistics().tasks_living
        await cluster.apply(parse_config(OTHERS))
        await trio.sleep(1)
        names = [engine.engine.name for engine in cluster.statistics().engines]
        assert names == ["stays-0", "comes-0"]
        per_engine = (tasks - trio.lowlevel.current_statistics().tasks_living) / 2
        assert per_engine == int(per_engine) > 0, "two engines fewer, and all that was theirs"
        await cluster.apply(parse_config(TWO_GROUPS))
        await trio.sleep(1)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        check_idle(cluster)


async def test_L08_the_same_file_again_changes_nothing(autojump_clock: object) -> None:
    async with open_cluster(parse_config(TWO_GROUPS)) as cluster:
        before = [engine.engine for engine in cluster.statistics().engines]
        assert not await cluster.apply(parse_config(TWO_GROUPS))
        assert [engine.engine for engine in cluster.statistics().engines] == before
