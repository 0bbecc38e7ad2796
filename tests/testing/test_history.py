"""The one checker must see each way in which a promise can be broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.nursery.cluster import open_cluster
from dpkit.testing.history import LEFT, History, PromiseBroken
from dpkit.testing.runs import run_once
from dpkit.testing.wrapper import named

if TYPE_CHECKING:
    from collections.abc import Sequence


async def told(
    delivered: Sequence[int],
    *lives: tuple[int, Sequence[int]],
    outcomes: Sequence[str] = ("length",),
    resumes: bool = False,
) -> History:
    """A history of one request; a life is the place of its first token, and the tokens."""
    history = History()
    entry = history.ask("r", resumes=resumes)
    for number, (start, tokens) in enumerate(lives):
        for place, token in enumerate(tokens, start):
            history.produced(number, "r", place, token)
    entry.delivered(delivered)
    for outcome in outcomes:
        entry.ended(outcome)
    return history


async def test_what_one_life_produced_may_be_delivered_as_far_as_it_goes() -> None:
    for end in range(4):
        (await told([7, 8, 9][:end], (0, [7, 8, 9]))).check()


@pytest.mark.parametrize(
    ("what", "delivered"),
    [
        ("a gap", [7, 9]),
        ("a repeat", [7, 7, 8]),
        ("another order", [8, 7]),
        ("more than there was", [7, 8, 9, 7]),
        ("another's tokens", [1]),
    ],
)
async def test_what_was_not_produced_so_is_told(what: str, delivered: list[int]) -> None:
    history = await told(delivered, (0, [7, 8, 9]))
    with pytest.raises(PromiseBroken, match="P2: r got"):
        history.check()


async def test_two_lives_make_one_text_only_where_it_is_resumed() -> None:
    lives = (0, [7, 8]), (2, [9, 9])
    (await told([7, 8, 9, 9], *lives, resumes=True)).check()
    with pytest.raises(PromiseBroken, match="P2"):
        (await told([7, 8, 9, 9], *lives)).check()


async def test_a_life_may_be_resumed_before_all_it_produced_was_delivered() -> None:
    (await told([7, 9, 9], (0, [7, 8]), (1, [9, 9]), resumes=True)).check()


async def test_a_retried_request_has_the_text_of_one_life() -> None:
    (await told([1, 2], (0, [7]), (0, [1, 2]))).check()


async def test_tokens_of_an_earlier_request_of_the_same_id_are_not_the_laters() -> None:
    history = await told([7], (0, [7, 8]))
    again = history.ask("r")
    again.delivered([7])
    again.ended("length")
    with pytest.raises(PromiseBroken, match=r"P2: r got \[7\], produced were \[\]"):
        history.check()


async def test_an_engine_that_works_on_for_nobody_is_told() -> None:
    history = await told([7], (0, [7, 8]))
    history.produced(0, "r", 2, 9)
    history.check()
    history.produced(0, "r", 3, 9)
    with pytest.raises(PromiseBroken, match="P3: 2 tokens were made of r after its end"):
        history.check()


async def test_a_request_that_is_tried_too_often_is_told() -> None:
    history = await told([7], (0, [7]), (0, [7]), (0, [7]))
    with pytest.raises(PromiseBroken, match="P3: r was tried 3 times, at most 2 were allowed"):
        history.check()


@pytest.mark.parametrize("outcomes", [[], ["length", LEFT]])
async def test_no_outcome_and_two_are_told(outcomes: list[str]) -> None:
    history = await told([], outcomes=outcomes)
    with pytest.raises(PromiseBroken, match="P1: r has the outcomes"):
        history.check()


async def test_a_long_list_of_problems_is_cut() -> None:
    history = History()
    for number in range(8):
        history.ask(f"r{number}")
    with pytest.raises(PromiseBroken, match=r"and 3 more$"):
        history.check()


async def _served() -> tuple[History, list[str]]:
    history = History()
    with named(history.model(EchoModel())) as model:
        config = parse_config(
            f'cluster = {{ seed = 1 }}\n[[engines]]\nmodel = "{model}"\ncount = 2\n'
        )
        async with open_cluster(config) as cluster:
            await history.complete(cluster.client, "abc", max_tokens=2)
            await history.complete(cluster.client, "", max_tokens=2)
            with trio.move_on_after(0) as scope:
                await history.complete(cluster.client, "abc", max_tokens=2)
            assert scope.cancelled_caught
    history.check(cluster)
    return history, [entry.outcomes[0] for entry in history.entries]


async def test_a_clusters_requests_are_recorded_with_their_outcomes(autojump_clock: object) -> None:
    history, outcomes = await _served()
    assert outcomes == ["length", "RequestRejected", LEFT]
    assert history.entries[0].tokens == list(b"ab")


async def test_a_request_that_the_event_log_tells_otherwise_is_told(
    autojump_clock: object,
) -> None:
    history = History()
    config = parse_config('[[engines]]\nmodel = "echo"\n')
    async with open_cluster(config) as cluster:
        entry = await history.complete(cluster.client, "abc", max_tokens=2)
    entry.outcomes[:] = ["EngineLost"]
    with pytest.raises(PromiseBroken, match="ended by EngineLost, the event log says length"):
        history.check(cluster)


def test_equal_runs_have_equal_digests() -> None:
    async def scenario(_: None) -> str:
        history, _outcomes = await _served()
        return history.digest()

    digests = {run_once(scenario, None, scheduler=seeded_scheduler(1)) for _ in range(3)}
    assert len(digests) == 1
