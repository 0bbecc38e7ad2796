"""Engines that step together wait for one another's prompts, so these begin together."""

from __future__ import annotations

from dpkit.balancer.cohorts import PATIENCE
from dpkit.messages import Room
from tests.balancer.test_expected_ttft import Late

RANKS = 4
LONG, SHORT = 500, 100  # of steps of 1,000 tokens


class Together(Late):
    """Four ranks with answers under way."""

    def __init__(self, *, answers: int = 10) -> None:
        room = Room(tokens_per_step=1000, requests=64, kv_tokens=500_000)
        super().__init__(RANKS, room=room)
        self.view.steps_together = True
        self.answers = answers
        for index in range(RANKS):
            for _ in range(answers):
                self.send(1, engine=f"e{index}")
        self.step(1)

    def step(self, number: int, *, left: int = 0) -> None:
        """All have done so many steps; the first one has so much of a prompt after the next."""
        for index in range(RANKS):
            prompt = {"unprefilled_tokens": left + 1000, "scheduled_tokens": 1000}
            told = prompt if left and not index else {}
            self.report(index, steps=number, requests=self.answers, **told)


def sent(decisions: list[int | None]) -> int:
    return sum(each is not None for each in decisions)


def test_prompts_wait_until_most_ranks_have_one_and_then_begin_on_as_many() -> None:
    ranks = Together()
    assert ranks.decide(LONG) == [None]
    assert ranks.decide(LONG, LONG) == [None, None]
    assert ranks.decide(LONG, LONG, LONG) == [None, None, None]
    decisions = ranks.decide(LONG, LONG, LONG)
    assert len(set(decisions) - {None}) == 3, "each on a rank of its own"


def test_where_each_steps_alone_nobody_waits() -> None:
    ranks = Together()
    ranks.view.steps_together = False
    assert sent(ranks.decide(LONG)) == 1


def test_a_short_prompt_makes_the_step_no_longer_and_goes_at_once() -> None:
    ranks = Together()
    assert [sent(ranks.decide(SHORT)) for _ in range(RANKS)] == [1] * RANKS
    assert sent(ranks.decide(SHORT)) == 0, "two of them on one rank do"


def test_beside_a_long_prompt_others_begin_that_are_done_before_it() -> None:
    ranks = Together()
    ranks.step(2, left=3000)
    assert sent(ranks.decide(2900)) == 1
    assert sent(ranks.decide(3100)) == 0


def test_nobody_waits_for_company_longer_than_a_few_steps() -> None:
    ranks = Together()
    waited = 0
    while not sent(ranks.decide(LONG)):
        waited += 1
        ranks.step(1 + waited)
    assert waited == PATIENCE + 1, "counted from the pass that found it waiting"


def test_with_few_answers_under_way_nobody_waits() -> None:
    assert sent(Together(answers=7).decide(LONG)) == 1


def test_engines_that_tell_nothing_of_their_steps_are_not_waited_for() -> None:
    room = Room(tokens_per_step=1000, requests=64, kv_tokens=500_000)
    silent = Late(RANKS, room=room)
    silent.view.steps_together = True
    for index in range(RANKS):
        for _ in range(10):
            silent.send(1, engine=f"e{index}")
    assert sent(silent.decide(2)) == 1


def test_engines_that_begin_anew_count_their_steps_anew_and_nobody_waits_for_the_old_ones() -> None:
    ranks = Together()
    ranks.step(1000)
    assert ranks.decide(LONG) == [None]
    assert ranks.decide(LONG) == [None]
    ranks.step(3)
    assert sent(ranks.decide(LONG)) == 1
