"""What users of other engines reported, tried on this one. Names begin with the report's number.

H: scheduler and KV cache; D: cancellation. Each report is linked in the test.
"""

# ruff: noqa: N802 - a report's number is written as its list writes it

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.errors import RequestRejected
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.core import EngineCore
    from dpkit.messages import Batch, EngineOutput, GenerateRequest

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]


def finish(core: EngineCore, batch: Batch) -> list[EngineOutput]:
    return core.apply(batch, core.model.execute(batch, None))


def schedule(core: EngineCore) -> Batch:
    batch = core.schedule()
    assert batch is not None
    return batch


def schedule_and_finish(core: EngineCore) -> Batch:
    batch = schedule(core)
    finish(core, batch)
    return batch


def ids(batch: Batch) -> set[str]:
    return {row.request_id for row in batch.rows}


def run(core: EngineCore) -> dict[str, int]:
    """Step until idle, which must leave nothing behind; the number of tokens of each request."""
    counts: dict[str, int] = {}
    while core.has_requests():
        for output in core.step():
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
    assert_idle(core)
    return counts


def assert_idle(core: EngineCore) -> None:
    core.check()
    statistics = core.statistics()
    assert (statistics.running, statistics.waiting) == (0, 0)
    assert statistics.free_blocks == statistics.num_blocks


def test_H01_a_request_above_the_pool_is_refused_and_blocks_nobody(
    make_core: MakeCore, ask: Ask
) -> None:
    """https://github.com/vllm-project/vllm/issues/39734."""
    core = make_core(num_blocks=100, block_size=16, max_model_len=100_000)
    core.add(ask("big", 1900, max_tokens=20))
    for i in range(5):
        core.add(ask(f"small{i}", 20))
    [refusal] = core.take_outputs()
    assert isinstance(refusal.error, RequestRejected)
    assert "1919 tokens, 319 more than the KV cache's 1600 (100 blocks)" in str(refusal.error)
    assert run(core) == {f"small{i}": 8 for i in range(5)}


def test_H02_under_pressure_the_oldest_advances_in_every_step(
    make_core: MakeCore, ask: Ask
) -> None:
    """https://github.com/vllm-project/vllm/issues/15996."""
    core = make_core(num_blocks=20, block_size=4, max_num_batched_tokens=16)
    alive: list[str] = []
    for step in itertools.count():
        if step < 200:
            core.add(ask(f"r{step}", 1 + step % 30, max_tokens=1 + step % 40))
            alive.append(f"r{step}")
        elif not alive:
            break
        batch = schedule(core)
        assert alive[0] in ids(batch)
        for output in finish(core, batch):
            if output.finish_reason is not None:
                alive.remove(output.request_id)
    assert_idle(core)


@pytest.mark.parametrize("seed", range(5))
def test_H03_after_any_churn_the_head_of_an_idle_engine_is_admitted(
    make_core: MakeCore, ask: Ask, seed: int
) -> None:
    """https://github.com/vllm-project/vllm-metal/issues/479."""
    rng = random.Random(seed)
    core = make_core(num_blocks=12, block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    names = itertools.count()
    alive: set[str] = set()
    for _ in range(300):
        if rng.random() < 0.5:
            alive.add(name := f"r{next(names)}")
            core.add(ask(name, rng.randint(1, 20), max_tokens=rng.randint(1, 28)))
        batch = core.schedule()
        if rng.random() < 0.3:
            core.abort(gone := rng.sample(sorted(alive), min(3, len(alive))))
            alive.difference_update(gone)
        if batch is not None:
            for output in finish(core, batch):
                if output.finish_reason is not None:
                    alive.remove(output.request_id)
        core.check()
    core.abort(alive)
    assert_idle(core)
    core.add(ask("last", 20, max_tokens=28))
    assert ids(schedule_and_finish(core)) == {"last"}
    assert run(core) == {"last": 27}


def test_H04_whoever_waits_holds_no_block(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/vllm-project/vllm/issues/45388."""
    core = make_core(num_blocks=8, block_size=2)
    for i in range(4):
        core.add(ask(f"r{i}", 3, max_tokens=12))
    while core.has_requests():
        core.step()
        core.check()  # raises if a waiting or preempted request holds one
    assert core.statistics().preemptions > 0


def test_H05_preemptions_per_request_are_bounded(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/inference-sim/inference-sim/issues/963.

    A victim needs all its blocks again, so it comes back only when an older request has ended, and
    at its first admission at most `max_num_seqs - 1` were older.
    """
    core = make_core(num_blocks=16, block_size=4, max_num_seqs=8)
    for i in range(100):
        core.add(ask(f"r{i}", 2 + i % 7, max_tokens=30 + i % 25))
    preempted: dict[str, int] = {}
    before: set[str] = set()
    while core.has_requests():
        batch = schedule(core)
        running = set(core._scheduler.running)
        for name in before - running:
            preempted[name] = preempted.get(name, 0) + 1
        done = {o.request_id for o in finish(core, batch) if o.finish_reason is not None}
        before = running - done
    assert sum(preempted.values()) == core.statistics().preemptions > 20
    assert max(preempted.values()) <= 8
    assert_idle(core)


def test_H06_one_missing_block_costs_at_most_one_preemption(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/16315."""
    core = make_core(num_blocks=24, block_size=2)
    scheduler = core._scheduler
    for i in range(20):
        core.add(ask(f"r{i}", 1 + i % 5, max_tokens=20 + i % 7))
    while core.has_requests():
        running = scheduler.running.values()
        growing = sum(len(r.token_ids) > 2 * len(r.block_ids) for r in running)
        missing = max(0, growing - scheduler.pool.num_free)
        before = core.statistics().preemptions
        schedule_and_finish(core)
        assert core.statistics().preemptions - before <= missing
    assert core.statistics().preemptions > 5
    assert_idle(core)


ABORT_STATES = ["waiting", "chunk", "in_chunk_step", "decoding", "in_decode_step", "preempted"]


def bring(core: EngineCore, ask: Ask, state: str) -> Batch | None:
    """Bring a request "x" into a state, beside an older request; the step in flight, if any."""
    if state == "preempted":
        core.add(ask("old", 11, max_tokens=30))
        core.add(ask("x", 11, max_tokens=30))
        while core.statistics().preemptions == 0:
            core.step()
        return None
    core.add(ask("old", 3, max_tokens=20))
    core.step()
    core.add(ask("x", 24))
    if state == "waiting":
        return None
    if state in {"chunk", "in_chunk_step"}:
        core.step()
    else:
        while core.statistics().prompt_tokens < 27:
            core.step()
    return core.schedule() if state.startswith("in_") else None


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("state", ABORT_STATES)
def test_H09_D02_D06_an_abort_holds_in_every_state_and_frees_all_blocks(
    make_core: MakeCore, ask: Ask, state: str, prefix_cache: bool
) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/16662.

    Also https://github.com/sgl-project/sglang/pull/35255 (an abort between chunks was lost) and
    https://github.com/LMCache/LMCache/issues/3688 (an abort raised and took the engine down).
    """
    core = make_core(
        num_blocks=12, block_size=4, max_num_batched_tokens=12, prefix_cache=prefix_cache
    )
    batch = bring(core, ask, state)
    counts = core.get_request_counts()
    core.abort(["x"])
    core.abort(["x", "x"])
    assert sum(core.get_request_counts()) == sum(counts) - 1  # it is counted out at once
    if batch is not None:
        assert "x" in ids(batch)
        assert {output.request_id for output in finish(core, batch)} == {"old"}
    while core.has_requests():
        batch = schedule(core)
        assert "x" not in ids(batch)
        assert all(output.request_id == "old" for output in finish(core, batch))
    assert_idle(core)
    assert core.statistics().requests_aborted == 1


def test_D02_an_abort_as_the_last_chunk_finishes_holds(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/sgl-project/sglang/pull/35255."""
    core = make_core(max_num_batched_tokens=8)
    core.add(ask("x", 16))
    core.step()
    batch = schedule(core)
    assert batch.rows[0].output_index == 0
    core.abort(["x"])
    assert finish(core, batch) == []
    assert_idle(core)


def test_H10_results_for_requests_that_are_gone_are_ignored(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/vllm-project/vllm/issues/46240."""
    for gone in itertools.permutations(["r0", "r1", "r2"]):
        core = make_core()
        for i in range(3):
            core.add(ask(f"r{i}"))
        batch = schedule(core)
        for count, name in enumerate(gone, start=1):
            core.abort([name])
            core.check()
            assert core.get_request_counts() == (3 - count, 0)
        assert finish(core, batch) == []
        assert_idle(core)


def test_H11_blocks_of_a_step_in_flight_are_handed_out_only_after_it(
    make_core: MakeCore, ask: Ask
) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/14055."""
    core = make_core(num_blocks=4, block_size=4)
    core.add(ask("a", 12, max_tokens=4))
    batch = schedule(core)
    held = list(batch.rows[0].block_ids)
    core.abort(["a"])
    core.add(ask("b", 12, max_tokens=4))
    assert core.get_kv_cache_usage() == 0.75
    assert batch.rows[0].block_ids == held
    core.check()
    finish(core, batch)
    assert core.get_kv_cache_usage() == 0.0
    assert ids(schedule_and_finish(core)) == {"b"}


def test_H12_an_abort_after_the_end_is_nothing(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/tenstorrent/vllm/issues/145."""
    core = make_core()
    core.add(ask("a", max_tokens=1))
    [output] = core.step()
    assert output.finish_reason is FinishReason.LENGTH
    core.abort(["a", "never seen"])
    assert core.statistics().requests_aborted == 0
    assert_idle(core)


def test_H13_a_second_request_with_a_live_id_is_refused(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/vllm-project/vllm/issues/10583."""
    core = make_core()
    core.add(ask("a"))
    core.add(ask("a"))
    [refusal] = core.take_outputs()
    assert "another request with its id" in str(refusal.error)
    assert core.get_request_counts() == (0, 1)
    core.step()
    core.add(ask("a"))
    [refusal] = core.take_outputs()
    assert core.get_request_counts() == (1, 0)
    run(core)


def test_H13_an_id_is_free_again_right_after_its_abort(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/vllm-project/vllm/issues/10583."""
    core = make_core()
    core.add(ask("a", (1, 2, 3)))
    batch = schedule(core)
    core.abort(["a"])
    core.add(ask("a", (4, 5)))
    assert finish(core, batch) == []  # the old one's token is not the new one's
    tokens: list[int] = []
    while core.has_requests():
        tokens += [token for output in core.step() for token in output.token_ids]
    assert tokens == [4, 5] * 4
    core.add(ask("a", (4, 5)))
    batch = schedule(core)
    core.abort(["a"])
    core.add(ask("a"))
    core.abort(["a"])
    finish(core, batch)
    assert_idle(core)


def test_H14_a_long_prompt_never_stalls_those_who_decode(make_core: MakeCore, ask: Ask) -> None:
    """https://github.com/vllm-project/vllm/issues/1026."""
    core = make_core(max_num_batched_tokens=512, num_blocks=2000, block_size=16)
    for i in range(20):
        core.add(ask(f"d{i}", 4, max_tokens=60))
    core.step()
    core.add(ask("long", 16_000, max_tokens=1))
    decoding = {f"d{i}" for i in range(20)}
    steps = 0
    while core.statistics().requests_finished == 0:
        batch = schedule(core)
        assert decoding <= ids(batch)
        assert batch.num_tokens <= 512
        finish(core, batch)
        steps += 1
    assert steps == 33  # 16,000 tokens at 492 a step beside the decodes
    run(core)


def test_D09_who_leaves_the_queue_is_out_at_once_and_never_scheduled(
    make_core: MakeCore, ask: Ask
) -> None:
    """https://github.com/Entrpi/ds4/pull/3."""
    core = make_core(max_num_seqs=1)
    core.add(ask("first"))
    core.step()
    for i in range(20):
        core.add(ask(f"q{i}"))
    gone = {f"q{i}" for i in range(20) if i % 4}
    core.abort(gone)
    assert core.get_request_counts() == (1, 5)
    seen: list[str] = []
    while core.has_requests():
        batch = schedule(core)
        assert gone.isdisjoint(ids(batch))
        seen += [o.request_id for o in finish(core, batch) if o.finish_reason is not None]
    assert seen == ["first", "q0", "q4", "q8", "q12", "q16"]
    assert_idle(core)


def test_D13_three_of_a_batch_leave_and_five_are_not_disturbed(
    make_core: MakeCore, ask: Ask
) -> None:
    """https://github.com/Lightning-AI/LitServe/issues/165."""

    def texts(leavers: list[str]) -> dict[str, list[Any]]:
        core = make_core()
        for i in range(8):
            core.add(ask(f"r{i}", 5, max_tokens=10))
        core.step()
        batch = schedule(core)
        core.abort(leavers)
        finish(core, batch)
        assert ids(schedule_and_finish(core)) == {f"r{i}" for i in range(8)} - set(leavers)
        found: dict[str, list[Any]] = {}
        while core.has_requests():
            for output in core.step():
                found.setdefault(output.request_id, []).append(output)
        assert_idle(core)
        return found

    alone, disturbed = texts([]), texts(["r1", "r4", "r6"])
    assert disturbed == {name: alone[name] for name in ("r0", "r2", "r3", "r5", "r7")}
