"""A long prompt leaves room in each step: short ones pass it, and nothing is left unused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.core import EngineCore
    from dpkit.messages import Batch, GenerateRequest

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]

STEP = 64


def shares(batch: Batch | None) -> dict[str, int]:
    """Tokens of each request in a step."""
    assert batch is not None
    return {row.request_id: len(row.token_ids) for row in batch.rows}


def step(core: EngineCore) -> dict[str, int]:
    batch = core.schedule()
    assert batch is not None
    core.apply(batch, core.model.execute(batch, None))
    core.check()
    return shares(batch)


@pytest.fixture
def core(make_core: MakeCore) -> EngineCore:
    return make_core(max_num_batched_tokens=STEP, num_blocks=400, long_prefill_share=0.5)


def test_short_prompts_pass_a_long_one(core: EngineCore, ask: Ask) -> None:
    core.add(ask("long", 600, max_tokens=1))
    core.add(ask("short", 30, max_tokens=1))
    core.add(ask("next", 30, max_tokens=1))
    assert step(core) == {"long": 32, "short": 30, "next": 2}
    assert step(core) == {"long": 36, "next": 28}


def test_a_long_prompt_alone_has_the_whole_step(core: EngineCore, ask: Ask) -> None:
    core.add(ask("long", 150, max_tokens=1))
    assert [step(core) for _ in range(3)] == [{"long": 64}, {"long": 64}, {"long": 22}]


def test_what_others_leave_is_the_long_ones(core: EngineCore, ask: Ask) -> None:
    core.add(ask("long", 600, max_tokens=1))
    core.add(ask("short", 3, max_tokens=9))
    assert step(core) == {"long": 61, "short": 3}
    assert step(core) == {"short": 1, "long": 63}


def test_long_prompts_share_one_share_and_the_oldest_has_it(core: EngineCore, ask: Ask) -> None:
    for name in ("a", "b", "c"):
        core.add(ask(name, 300, max_tokens=1))
    core.add(ask("short", 31, max_tokens=1))
    assert step(core) == {"a": 32, "b": 1, "c": 1, "short": 30}
    assert step(core) == {"a": 61, "b": 1, "c": 1, "short": 1}


def test_everybody_who_runs_advances_however_small_the_step(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_batched_tokens=4, num_blocks=400, long_prefill_share=0.25)
    for number in range(4):
        core.add(ask(f"r{number}", 30, max_tokens=1))
    for _ in range(8):
        assert step(core) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}


def test_the_end_of_a_long_prompt_is_a_short_one(core: EngineCore, ask: Ask) -> None:
    core.add(ask("long", 90, max_tokens=1))
    core.add(ask("other", 600, max_tokens=1))
    assert step(core) == {"long": 63, "other": 1}
    assert step(core) == {"long": 27, "other": 37}, "and leaves the share to the next"


def test_without_a_share_long_prompts_go_one_by_one(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_batched_tokens=STEP, num_blocks=400)
    core.add(ask("long", 100, max_tokens=1))
    core.add(ask("short", 3, max_tokens=1))
    assert [step(core) for _ in range(2)] == [{"long": 64}, {"long": 36, "short": 3}]


def test_all_are_done_in_the_end_whatever_the_share(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_batched_tokens=16, num_blocks=40, long_prefill_share=0.3)
    for number in range(20):
        core.add(ask(f"r{number}", 5 + 40 * (number % 3), max_tokens=4))
    while core.has_requests():
        assert sum(step(core).values()) <= 16
    assert core.statistics().requests_finished == 20
    assert core.statistics().free_blocks == 40


def test_a_step_that_was_too_much_is_tried_again_among_long_prompts(
    core: EngineCore, ask: Ask
) -> None:
    core.add(ask("decode", 3))
    core.add(ask("long", 600, max_tokens=1))
    core.add(ask("short", 9))
    step(core)
    assert shares(core.schedule()) == {"decode": 1, "short": 1, "long": 62}
    assert core.shrink()
    core.check()
    assert step(core) == {"decode": 1, "short": 1, "long": 30}
