"""Whether an engine in another process works, waits, or is silent, by what it says and when."""

from __future__ import annotations

import math

import pytest
import trio

from dpkit.link.progress import Progress
from dpkit.wire.structs import UtilityAnswer


def answer(call_id: int | None, steps: int, elapsed: float | None) -> UtilityAnswer:
    assert call_id is not None
    return UtilityAnswer(call_id, None, (None, [steps, elapsed]))


async def test_an_engine_that_answers_and_waits_is_at_nothing(autojump_clock: object) -> None:
    progress = Progress()
    assert progress.step_started_at is None
    progress.answered(answer(progress.ask(), 3, None))
    await trio.sleep(100)
    assert progress.step_started_at is None


async def test_one_that_is_silent_has_been_so_since_it_was_last_heard(
    autojump_clock: object,
) -> None:
    progress = Progress()
    await trio.sleep(1)
    progress.heard()
    await trio.sleep(2)
    assert progress.ask() is not None
    await trio.sleep(3)
    assert progress.step_started_at == 1
    assert progress.ask() is None, "one question at a time"


async def test_one_that_is_heard_is_not_silent_however_late_its_answer_is(
    autojump_clock: object,
) -> None:
    progress = Progress()
    progress.ask()
    for second in range(1, 10):
        await trio.sleep(1)
        progress.heard()  # outputs, in front of the answer
        assert progress.step_started_at == second


async def test_a_long_step_began_when_it_says_though_much_else_is_heard(
    autojump_clock: object,
) -> None:
    progress = Progress()
    await trio.sleep(10)
    question = progress.ask()
    progress.heard()
    progress.answered(answer(question, 5, 4.0))
    assert progress.step_started_at == 6
    await trio.sleep(1)
    question = progress.ask()
    progress.heard()  # an abort is acknowledged in the middle of the step
    progress.counted(5)
    assert progress.step_started_at == 6
    progress.answered(answer(question, 5, 5.01))
    assert progress.step_started_at == 6, "the same step began once"


async def test_a_step_that_is_over_is_over_before_the_next_answer(autojump_clock: object) -> None:
    progress = Progress()
    await trio.sleep(10)
    progress.answered(answer(progress.ask(), 5, 4.0))
    progress.counted(6)
    assert progress.step_started_at is None


async def test_answers_to_questions_of_others_are_none(autojump_clock: object) -> None:
    progress = Progress()
    question = progress.ask()
    progress.answered(answer(question and question + 1, 5, 4.0))
    assert progress.step_started_at == 0, "still asked"
    progress.answered(UtilityAnswer(question or 0, "no such method"))
    assert progress.step_started_at is None, "an engine that knows no such question waits"


@pytest.mark.parametrize("elapsed", [-1e300, -math.inf, math.nan, -(2**63)])
async def test_a_step_that_is_said_to_begin_later_has_begun_by_now(
    autojump_clock: object, elapsed: float
) -> None:
    """Else whoever looks when it has taken too long would never look again."""
    progress = Progress()
    await trio.sleep(10)
    question = progress.ask()
    progress.heard()
    progress.answered(answer(question, 5, elapsed))
    assert progress.step_started_at == 10
