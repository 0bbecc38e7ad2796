"""A request that begins with the output of an earlier life goes on as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from dpkit.errors import RequestRejected
from dpkit.names import FinishReason
from dpkit.text.bytes import EOS_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.core import EngineCore
    from dpkit.messages import EngineOutput, GenerateRequest

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]


def run(core: EngineCore, request: GenerateRequest) -> list[EngineOutput]:
    """All outputs of one request, alone in its engine."""
    core.add(request)
    outputs = core.take_outputs()
    while core.has_requests():
        outputs += core.step()
    core.check()
    return outputs


def tokens(outputs: list[EngineOutput]) -> tuple[int, ...]:
    return tuple(token_id for output in outputs for token_id in output.token_ids)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 9},
        {"max_tokens": 20, "ignore_eos": False},
        {"max_tokens": 20, "min_tokens": 15, "ignore_eos": False},
        {"max_tokens": 20, "stop_token_ids": (3,), "min_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 8}], ids=str)
def test_wherever_it_was_cut_the_text_is_that_of_an_undisturbed_run(
    make_core: MakeCore, ask: Ask, limits: dict[str, Any], sampling: dict[str, Any]
) -> None:
    request = ask("r", (1, 2, 3, 4, 5, 6), **sampling)
    whole = run(make_core(**limits), request)
    for cut in range(len(whole)):
        before = tokens(whole[:cut])
        rest = run(make_core(**limits), evolve(request, output_token_ids=before))
        assert before + tokens(rest) == tokens(whole)
        assert rest[-1].finish_reason is whole[-1].finish_reason


def test_the_tokens_of_an_earlier_life_count_against_max_and_min_tokens(
    make_core: MakeCore, ask: Ask
) -> None:
    request = ask("r", (7, 8), max_tokens=4, min_tokens=3, ignore_eos=False)
    resumed = evolve(request, output_token_ids=(7, 8))
    assert tokens(run(make_core(), resumed)) == (7, EOS_TOKEN_ID)


def test_only_what_was_sampled_here_is_counted_as_output(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    run(core, evolve(ask("r", 6, max_tokens=8), output_token_ids=(1, 2, 3)))
    statistics = core.statistics()
    assert (statistics.prompt_tokens, statistics.output_tokens) == (6, 5)
    assert statistics.requests_finished == 1


def test_logprobs_of_the_prompt_are_not_told_again(make_core: MakeCore, ask: Ask) -> None:
    request = ask("r", (1, 2, 3, 4, 5, 6), max_tokens=8, prompt_logprobs=0, logprobs=0)
    core = make_core()
    first = run(core, request)
    assert len(first[0].prompt_logprobs) == 5
    rest = run(core, evolve(request, output_token_ids=tokens(first[:3])))
    assert all(output.prompt_logprobs == () for output in rest)
    assert all(len(output.logprobs) == 1 for output in rest)
    assert core.statistics().prefix_hit_tokens == 8, "prompt and output of before, from the cache"


def test_a_preempted_resumed_request_keeps_the_output_of_both_lives(
    make_core: MakeCore, ask: Ask
) -> None:
    asked = [ask(f"r{number}", 6, max_tokens=12) for number in range(3)]
    alone = {request.request_id: tokens(run(make_core(), request)) for request in asked}
    core = make_core(num_blocks=8)
    said = {name: list(whole[:3]) for name, whole in alone.items()}
    for request in asked:
        core.add(evolve(request, output_token_ids=tuple(said[request.request_id])))
    while core.has_requests():
        for output in core.step():
            said[output.request_id] += output.token_ids
    assert core.statistics().preemptions > 0
    assert {name: tuple(told) for name, told in said.items()} == alone


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        ((1, 2, 3), "it has 3 output tokens from before, and max_tokens = 3"),
        ((1,), "it has 1 output token from before, and max_tokens = 1"),
        ((1, 9999), "token ids must be 0 to 256, not 1 to 9999"),
    ],
)
def test_an_earlier_life_that_cannot_have_been_is_refused(
    make_core: MakeCore, ask: Ask, before: tuple[int, ...], problem: str
) -> None:
    request = evolve(ask("r", (1, 2), max_tokens=len(before)), output_token_ids=before)
    (output,) = run(make_core(), request)
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, RequestRejected)
    assert problem in str(output.error)
