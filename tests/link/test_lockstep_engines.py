"""Engines in processes of their own that step together: real votes, waves, pauses and losses."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.link.group import LOST_WITH_ITS_GROUP
from dpkit.wire.structs import FinishCode
from dpkit.wire.zsocket import open_context
from tests.link.lab import LIMITS, ask
from tests.link.ranks import (
    keep_coordinator,
    open_ballot_zygote,
    open_ranks,
    open_running_coordinator,
    rules_of,
)
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.balancer.coordinator import CoordinatorRules
    from tests.link.ranks import Ranks

pytest.importorskip("torch")


async def one_wave(ranks: Ranks, rules: CoordinatorRules, *, rank: int, name: str) -> None:
    """Have one rank get a request, and wait until all sleep again."""
    wave = rules.statistics().current_wave
    ranks.say(rank, ask(name, prompt=(1, 2, 3), max_tokens=9, ignore_eos=True))
    entries = await ranks.ended(name)
    assert [token for entry in entries for token in entry.new_token_ids] == [1, 2, 3] * 3
    await until(lambda: rules.statistics().current_wave == wave + 1)
    assert not rules.statistics().engines_running


async def test_a_group_goes_through_waves_and_pauses_and_ends_in_order() -> None:
    async with open_context() as context, open_ballot_zygote() as zygote:
        rules = rules_of(3)
        async with (
            open_running_coordinator(context, rules) as coordinator,
            open_ranks(zygote, coordinator, [LIMITS] * 3) as ranks,
        ):
            for wave in range(3):
                await one_wave(ranks, rules, rank=2 - wave, name=f"w{wave}")
            stats = [each.scheduler_stats for each in ranks.heard if each.scheduler_stats]
            assert {each.current_wave for each in stats} == {0, 1, 2}

            ranks.call(0, "pause_generation", "wait")
            ranks.call(1, "pause_generation", "wait")
            ranks.say(0, ask("refused"))
            (refused,) = await ranks.ended("refused")
            assert refused.error is not None
            assert refused.error.code == "engine_paused"
            ranks.say(2, ask("served", max_tokens=3, ignore_eos=True))
            assert (await ranks.ended("served"))[-1].finish_reason is FinishCode.LENGTH
            assert ranks.answered == []
            ranks.call(2, "pause_generation", "wait")
            await until(lambda: sorted(ranks.answered) == [0, 1, 2])

            ranks.call_all("resume_scheduler")
            await until(lambda: len(ranks.answered) == 6)
            await one_wave(ranks, rules, rank=1, name="resumed")
            ranks.say(0, ask("left", max_tokens=250, ignore_eos=True))
            await until(lambda: ranks.entries("left"))
            for worker in ranks.workers:
                worker.send_signal(signal.SIGTERM)
            assert [await worker.wait() for worker in ranks.workers] == [0, 0, 0]
            ended = (await ranks.ended("left"))[-1].finish_reason
            assert ended in {FinishCode.ABORT, FinishCode.LENGTH}  # steps of an echo are quick


async def test_a_coordinator_that_comes_after_one_that_was_lost_learns_the_wave(
    tmp_path: Path,
) -> None:
    keep = partial(keep_coordinator, bind=f"ipc://{tmp_path}")
    async with open_context() as context, open_ballot_zygote() as zygote:
        lost, rules = rules_of(2), rules_of(2)
        async with trio.open_nursery() as nursery:
            coordinator, scope = await nursery.start(keep, context, lost)
            async with open_ranks(zygote, coordinator) as ranks:
                await one_wave(ranks, lost, rank=1, name="a")
                await one_wave(ranks, lost, rank=1, name="b")
                scope.cancel()
                coordinator, scope = await nursery.start(keep, context, rules)
                await until(lambda: rules.statistics().current_wave == 2)
                await until(lambda: coordinator.statistics().engines == 2)
                await one_wave(ranks, rules, rank=0, name="c")
            scope.cancel()


async def test_a_rank_that_is_stopped_or_killed_ends_all() -> None:
    async with open_context() as context, open_ballot_zygote() as zygote:
        for signum, limit, words in (
            (signal.SIGSTOP, 0.5, "not taken within 0.5 s (coordinator.vote_timeout)"),
            (signal.SIGKILL, 60.0, "broke off: another rank has gone"),
        ):
            async with (
                open_running_coordinator(context, rules_of(3)) as coordinator,
                open_ranks(zygote, coordinator, [LIMITS] * 3, vote_timeout=limit) as ranks,
            ):
                ranks.workers[1].send_signal(signum)
                ranks.say(0, ask("a", max_tokens=100, ignore_eos=True))
                *_, last = await ranks.ended("a")
                assert last.finish_reason is FinishCode.ERROR
                assert last.error is not None
                assert (last.error.code, last.error.retryable) == ("engine_lost", True)
                assert "the vote at step 1 of wave 0" in last.error.message
                assert words in last.error.message
                await ranks.wait_dead(2)
                assert [await ranks.workers[rank].wait() for rank in (0, 2)] == [
                    LOST_WITH_ITS_GROUP
                ] * 2
                ranks.workers[1].kill()
