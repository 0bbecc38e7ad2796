"""Every call of every kind fails once, and a failure says which."""

from __future__ import annotations

import itertools

import pytest
import trio

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import EngineLost
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.failing import (
    REPLAY,
    FailSweepFailed,
    FailSweepStatistics,
    fail_sweep,
    pair_sweep,
)
from dpkit.testing.mark import Case, Mode
from dpkit.testing.points import ALLOCATE, STEP, FailCase, Injected, Points
from dpkit.testing.wrapper import named


async def _copy(points: Points) -> list[str]:
    """Reads twice and writes once, and keeps going where a call fails."""
    done: list[str] = []
    read = points.wrap("read", done.append)
    write = points.wrap("write", done.append)
    for call, what in ((read, "a"), (read, "b"), (write, "c")):
        try:
            call(what)
        except Injected as error:
            done.append(str(error))
        await trio.lowlevel.checkpoint()
    return done


def test_every_call_of_every_kind_fails_once() -> None:
    runs: list[list[str]] = []
    done = fail_sweep(_copy, seeds=[0], check=runs.append)
    assert done == FailSweepStatistics(runs=4, calls={"read": 2, "write": 1})
    assert runs == [
        ["a", "b", "c"],
        ["injected at read 0", "b", "c"],
        ["a", "injected at read 1", "c"],
        ["a", "b", "injected at write 0"],
    ]


def test_only_the_kinds_that_are_asked_for_fail() -> None:
    assert fail_sweep(_copy, seeds=[0, 1], check=lambda _: None, kinds=["write"]).runs == 4


def _never_fails_at_b(done: list[str]) -> None:
    assert "b" in done


def test_a_failure_says_in_one_line_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailSweepFailed) as caught:
        fail_sweep(_copy, seeds=[3], check=_never_fails_at_b)
    assert caught.value.case == FailCase(3, "read", 1)
    assert f"replay: {REPLAY}=3:read:1 " in str(caught.value)
    monkeypatch.setenv(REPLAY, "3:read:1")
    with pytest.raises(FailSweepFailed):
        fail_sweep(_copy, seeds=[], check=_never_fails_at_b)
    monkeypatch.setenv(REPLAY, "3:write:0")
    assert fail_sweep(_copy, seeds=[], check=_never_fails_at_b).runs == 1


def test_a_scenario_that_is_not_deterministic_is_told() -> None:
    calls = itertools.chain([2], itertools.repeat(1))

    async def scenario(points: Points) -> None:
        for _ in range(next(calls)):
            try:
                points.reach("call")
            except Injected:
                return
            await trio.lowlevel.checkpoint()

    with pytest.raises(FailSweepFailed, match="never came to the call that was to fail"):
        fail_sweep(scenario, seeds=[0], check=lambda _: None)


async def _copy_in_a_target(points: Points) -> list[str]:
    done: list[str] = []
    with points.target():
        done += await _copy(points)
    return done


def test_pairs_are_every_call_with_every_step() -> None:
    done = pair_sweep(_copy_in_a_target, seeds=[0], check=lambda _: None, kind="read")
    steps = 4  # the one in which it is marked, and one for each of three checkpoints
    assert done.runs == 1 + 2 * (2 * steps - 1)
    assert pair_sweep(
        _copy_in_a_target, seeds=[0, 1], check=lambda _: None, kind="read", sample=5
    ) == FailSweepStatistics(runs=12, calls=done.calls)


@pytest.mark.parametrize(
    "case",
    [FailCase(1, "step", 2), FailCase(1, "step", 2, Case(1, 3, Mode.AFTER))],
    ids=str,
)
def test_a_case_survives_its_text(case: FailCase) -> None:
    assert FailCase.parse(str(case)) == case


def test_a_models_steps_and_allocations_are_points() -> None:
    async def scenario(points: Points) -> str:
        with named(points.model(EchoModel())) as model:
            config = parse_config(f'[[engines]]\nmodel = "{model}"\n')
            async with open_cluster(config) as cluster:
                try:
                    return (await cluster.client.complete("abc", max_tokens=3)).text
                except EngineLost:
                    return "lost"

    texts: list[str] = []
    done = fail_sweep(scenario, seeds=[0], check=texts.append)
    assert done.calls == {ALLOCATE: 1, STEP: 3}
    # Never; at the start and before the first token, so it is tried again; after it, twice.
    assert texts == ["abc", "abc", "abc", "lost", "lost"]
