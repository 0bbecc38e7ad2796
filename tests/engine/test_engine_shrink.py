"""A step that was too large for the model is taken back, and smaller ones are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkit.errors import InternalError
from dpkit.names import FinishReason
from tests.engine.conftest import _ask, _make_core

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.core import EngineCore
    from dpkit.messages import Batch, GenerateRequest

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]


def _rows(batch: Batch | None) -> dict[str, int]:
    return {} if batch is None else {row.request_id: len(row.token_ids) for row in batch.rows}


def _run(core: EngineCore, most: int = 10**9) -> dict[str, int]:
    """Run to the end with memory for so many tokens a step; output tokens by request."""
    tokens: dict[str, int] = {}
    while (batch := core.schedule()) is not None:
        if batch.num_tokens > most:
            assert core.shrink()
            continue
        for output in core.apply(batch, core.model.execute(batch, None)):
            tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.token_ids)
    core.check()
    return tokens


def test_a_prompt_is_cut_into_smaller_chunks(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("r", 40))
    assert _rows(core.schedule()) == {"r": 40}
    assert core.shrink()
    assert _rows(core.schedule()) == {"r": 20}
    assert core.shrink()
    assert _rows(core.schedule()) == {"r": 10}
    assert core.statistics().steps_halved == 2


def test_the_newest_wait_and_the_oldest_go_on(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    for name in "abcd":
        core.add(ask(name, 1, max_tokens=3))
    batch = core.schedule()
    assert batch is not None
    core.apply(batch, core.model.execute(batch, None))
    assert _rows(core.schedule()) == dict.fromkeys("abcd", 1)
    assert core.shrink()
    assert _rows(core.schedule()) == dict.fromkeys("ab", 1)
    assert core.get_request_counts() == (2, 2)


def test_one_token_cannot_be_halved_and_may_be_tried_again(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("r", 1, max_tokens=1))
    batch = core.schedule()
    assert batch is not None
    assert not core.shrink()
    [output] = core.apply(batch, core.model.execute(batch, None))
    assert output.finish_reason is FinishReason.LENGTH


def test_there_must_be_a_step_to_take_back(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("r"))
    with pytest.raises(InternalError, match=r"shrink\(\) was called while no step is in flight"):
        core.shrink()


def test_who_left_during_the_step_gives_its_blocks_back(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("a", 9))
    core.add(ask("b", 9))
    core.schedule()
    core.abort(["a"])
    assert core.shrink()
    core.check()
    assert _rows(core.schedule()) == {"b": 9}
    core.abort(["b"])
    assert core.shrink()
    assert core.schedule() is None
    core.check()
    assert core.statistics().free_blocks == core.limits.num_blocks


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    most=st.integers(1, 30),
    blocks=st.integers(10, 30),
    seqs=st.integers(1, 6),
    prefix_cache=st.booleans(),
)
def test_whatever_fits_at_last_everybody_is_served(
    prompts: list[int], most: int, blocks: int, seqs: int, *, prefix_cache: bool
) -> None:
    core = _make_core(num_blocks=blocks, max_num_seqs=seqs, prefix_cache=prefix_cache)
    for number, prompt in enumerate(prompts):
        core.add(_ask(f"r{number}", (7,) * prompt))
    assert _run(core, most) == {f"r{number}": 8 for number in range(len(prompts))}
    assert core.statistics().free_blocks == blocks
