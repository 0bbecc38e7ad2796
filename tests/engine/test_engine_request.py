"""The request's state table, walked whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dpkit.engine.request import TRANSITIONS, Request, State, Unfinished
from dpkit.errors import InternalError
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.names import FinishReason

STATES: list[State] = [*Unfinished, *FinishReason]
PATHS: dict[State, list[State]] = {
    Unfinished.WAITING: [],
    Unfinished.RUNNING: [Unfinished.RUNNING],
    Unfinished.PREEMPTED: [Unfinished.RUNNING, Unfinished.PREEMPTED],
    FinishReason.STOP: [Unfinished.RUNNING, FinishReason.STOP],
    FinishReason.LENGTH: [Unfinished.RUNNING, FinishReason.LENGTH],
    FinishReason.ABORT: [FinishReason.ABORT],
}


def request_in(state: State) -> Request:
    request = Request(GenerateRequest(request_id="r", prompt_token_ids=(1, 2)))
    for step in PATHS[state]:
        request.move_to(step)
    return request


def test_every_state_can_be_reached() -> None:
    assert set(PATHS) == set(TRANSITIONS)
    for state in TRANSITIONS:
        assert request_in(state).state is state


def test_a_transition_is_in_the_table_or_raises_and_changes_nothing() -> None:
    for start, end in itertools.product(TRANSITIONS, STATES):
        request = request_in(start)
        if end in TRANSITIONS[start]:
            request.move_to(end)
            assert request.state is end
            continue
        with pytest.raises(InternalError, match=f"'r' cannot go from {start} to {end}") as caught:
            request.move_to(end)
        assert request.state is start
        assert caught.value.request_id == "r"


def test_nothing_follows_an_end_and_abort_is_possible_until_then() -> None:
    for state, following in TRANSITIONS.items():
        assert request_in(state).is_finished == (not following)
        assert (FinishReason.ABORT in following) == bool(following)


def test_output_ends_at_a_stop_token_or_at_max_tokens() -> None:
    def reasons(tokens: list[int], **sampling: Any) -> list[FinishReason | None]:
        ask = GenerateRequest(
            request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(**sampling)
        )
        request = Request(ask, {9})
        return [request.append(token) for token in tokens]

    assert reasons([1, 2, 3], max_tokens=3) == [None, None, FinishReason.LENGTH]
    assert reasons([1, 9], max_tokens=5) == [None, FinishReason.STOP]
    assert reasons([9, 9], max_tokens=2, ignore_eos=True) == [None, FinishReason.LENGTH]
    assert reasons([7], max_tokens=1, stop_token_ids=(7,), ignore_eos=True) == [FinishReason.STOP]


def test_what_was_found_at_first_stays_and_is_of_the_prompt_alone() -> None:
    ask = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), output_token_ids=(4, 5))
    request = Request(ask)
    request.hold([0], 4)
    assert (request.num_cached, request.num_computed) == (3, 4)
    request.hold([1], 2)  # after a preemption
    assert (request.num_cached, request.num_computed, request.block_ids) == (3, 2, [1])
