"""What an engine promises, one promise a test; reports of peers' users keep their numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.engine.limits import EngineLimits
from dpkit.errors import InternalError, ModelFailed, RequestRejected
from dpkit.messages import Batch, GenerateRequest, StepResult
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.core import EngineCore
    from dpkit.messages import EngineOutput

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]


def run(core: EngineCore, outputs: list[EngineOutput] | None = None) -> dict[str, list[int]]:
    """Step until idle; the tokens of each request."""
    texts: dict[str, list[int]] = defaultdict(list)
    for output in outputs or ():
        texts[output.request_id] += output.token_ids
    for _ in range(10_000):
        for output in core.step():
            texts[output.request_id] += output.token_ids
        core.check()
        if not core.has_requests():
            assert core.get_request_counts() == (0, 0)
            assert core.get_kv_cache_usage() == 0.0
            return texts
    raise AssertionError(f"{core} makes no progress")


def echo(request: GenerateRequest) -> list[int]:
    prompt = request.prompt_token_ids
    return [prompt[i % len(prompt)] for i in range(request.sampling.max_tokens)]


def execute(core: EngineCore, batch: Batch | None) -> tuple[Batch, StepResult]:
    assert batch is not None
    return batch, core.model.execute(batch, None)


def ids(batch: Batch | None) -> list[str]:
    return [] if batch is None else [row.request_id for row in batch.rows]


# --- steps


def test_an_idle_engine_has_nothing_to_do(make_core: MakeCore) -> None:
    core = make_core()
    assert core.step() == []
    assert core.schedule() is None
    assert not core.has_requests()
    assert core.statistics().steps == 0
    assert repr(core) == "<EngineCore running=0 waiting=0 <BlockPool free=64/64 findable=0>>"


def test_all_requests_advance_in_one_batch_and_each_gets_its_own_tokens(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core()
    asked = [ask(f"r{i}", 3 + i, max_tokens=5 + i) for i in range(6)]
    for request in asked:
        core.add(request)
    assert core.get_request_counts() == (0, 6)
    batch, result = execute(core, core.schedule())
    assert core.get_request_counts() == (6, 0)
    assert ids(batch) == [f"r{i}" for i in range(6)]
    first = core.apply(batch, result)
    assert run(core, first) == {request.request_id: echo(request) for request in asked}


def test_a_text_ends_at_its_stop_token_which_is_delivered(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("eos", (7, 8), ignore_eos=False))
    core.add(ask("stop", (7, 8, 9), stop_token_ids=(9,)))
    core.add(ask("length", (7, 8), ignore_eos=False, max_tokens=2))
    last = {}
    while core.has_requests():
        for output in core.step():
            last[output.request_id] = (output.token_ids, output.finish_reason)
    assert last == {
        "eos": ((256,), FinishReason.STOP),
        "stop": ((9,), FinishReason.STOP),
        "length": ((8,), FinishReason.LENGTH),
    }


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(max_num_batched_tokens=10)
    core.add(ask("a", 4))
    core.step()
    core.add(ask("b", 13))
    core.add(ask("c", 4))
    shares = []
    for _ in range(3):
        batch, result = execute(core, core.schedule())
        shares.append(
            [(row.request_id, len(row.token_ids), row.output_index) for row in batch.rows]
        )
        core.apply(batch, result)
    assert shares == [
        [("a", 1, 1), ("b", 9, None)],
        [("a", 1, 2), ("b", 4, 0), ("c", 4, 0)],
        [("a", 1, 3), ("b", 1, 1), ("c", 1, 1)],
    ]


def test_no_more_than_max_num_seqs_run(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_seqs=2)
    for i in range(5):
        core.add(ask(f"r{i}"))
    core.step()
    assert core.get_request_counts() == (2, 3)
    run(core)


def test_no_more_run_than_the_budget_has_tokens(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_batched_tokens=2)
    asked = [ask(f"r{i}", 1, max_tokens=3) for i in range(4)]
    for request in asked:
        core.add(request)
    batches = []
    texts: dict[str, list[int]] = defaultdict(list)
    while core.has_requests():
        batch, result = execute(core, core.schedule())
        batches.append(ids(batch))
        for output in core.apply(batch, result):
            texts[output.request_id] += output.token_ids
    assert batches == [["r0", "r1"]] * 3 + [["r2", "r3"]] * 3
    assert texts == {request.request_id: echo(request) for request in asked}


def test_a_step_in_flight_must_be_applied_once_before_the_next(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core()
    core.add(ask("a"))
    batch, result = execute(core, core.schedule())
    with pytest.raises(InternalError, match="step is in flight"):
        core.schedule()
    with pytest.raises(InternalError, match="another batch"):
        core.apply(Batch(rows=batch.rows), result)
    core.apply(batch, result)
    with pytest.raises(InternalError, match="another batch"):
        core.apply(batch, result)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([1], "returned 1 tokens for 2 rows"),
        ([1, 2], "sampled row 1, which ends inside its prompt"),
        ([None, None], "for row 0, not None"),
        ([-1, None], "for row 0, not -1"),
        ([257, None], "an int from 0 to 256 for row 0, not 257"),
        ([1.0, None], "for row 0, not 1.0"),
    ],
)
def test_a_wrong_model_is_named_and_changes_nothing(
    make_core: MakeCore, ask: Ask, sampled: list[Any], message: str
) -> None:
    core = make_core(max_num_batched_tokens=6)
    core.add(ask("a", 4))
    core.add(ask("b", 4))
    batch, result = execute(core, core.schedule())
    with pytest.raises(ModelFailed, match=r"echo\.EchoModel\.execute\(\) .*" + message):
        core.apply(batch, StepResult(sampled=sampled))
    core.apply(batch, result)
    run(core)


# --- prefix cache


def test_a_prefix_is_computed_once_and_found_even_after_its_request_is_gone(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(block_size=4)
    prompt = tuple(range(20))
    core.add(ask("a", prompt, max_tokens=1))
    run(core)
    core.add(ask("b", prompt, max_tokens=1))
    batch, result = execute(core, core.schedule())
    [row] = batch.rows
    assert (row.start, len(row.token_ids)) == (16, 4)  # the last block: one token must be computed
    core.apply(batch, result)
    assert core.statistics().prefix_hit_tokens == 16


def test_what_was_found_in_the_cache_is_told_with_the_first_token_alone(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(block_size=4)
    told: dict[str, list[int | None]] = defaultdict(list)
    for name in ("a", "b"):
        core.add(ask(name, tuple(range(20)), max_tokens=3))
        while core.has_requests():
            for output in core.step():
                told[output.request_id].append(output.cached_tokens)
    assert told == {"a": [0, None, None], "b": [16, None, None]}


def test_a_reset_forgets_all_prefixes_unless_a_request_holds_blocks(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core()
    core.add(ask("a", 16))
    core.step()
    assert not core.reset_prefix_cache()
    while core.has_requests():
        core.step()
    assert core.reset_prefix_cache()
    core.check()
    core.add(ask("a", 16))
    batch = core.schedule()
    assert batch is not None
    assert batch.num_tokens == 16
    core.end()
    core.check()


def test_output_is_found_too_by_the_next_turn(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(block_size=2)
    core.add(ask("a", (1, 2, 3), max_tokens=4))
    run(core)
    core.add(ask("b", (1, 2, 3, 1, 2, 3, 1, 9)))
    batch, result = execute(core, core.schedule())
    assert batch.rows[0].start == 6  # the output's last token was never computed
    core.apply(batch, result)


@pytest.mark.parametrize(("salt", "prefix_cache"), [("tenant", True), ("", False)])
def test_nothing_is_shared_across_salts_or_without_the_cache(
    make_core: MakeCore, ask: Ask, salt: str, prefix_cache: bool
) -> None:
    core = make_core(prefix_cache=prefix_cache)
    first = ask("a", 20)
    core.add(first)
    run(core)
    core.add(
        GenerateRequest(request_id="b", prompt_token_ids=first.prompt_token_ids, cache_salt=salt)
    )
    batch, result = execute(core, core.schedule())
    assert batch.rows[0].start == 0
    core.apply(batch, result)
    assert core.statistics().prefix_hit_tokens == 0


def test_who_comes_back_with_all_but_one_token_cached_is_among_the_decodes(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(block_size=3, num_blocks=4)
    for name, length, max_tokens in [("a", 5, 3), ("b", 3, 9), ("c", 3, 5)]:
        core.add(ask(name, (0,) * length, max_tokens=max_tokens))
    for _ in range(3):
        core.step()
    assert core.statistics().preemptions == 2  # both, and "a" has ended
    batch, result = execute(core, core.schedule())
    shares = [(row.request_id, row.start, len(row.token_ids)) for row in batch.rows]
    assert shares == [("c", 3, 1), ("b", 3, 2)]
    core.apply(batch, result)


# --- preemption


def test_the_newest_is_preempted_keeps_its_output_and_goes_on_before_those_who_wait(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(block_size=4, num_blocks=4, max_num_batched_tokens=64)
    asked = [ask(f"r{i}", 7, max_tokens=6) for i in range(3)]
    core.add(asked[0])
    core.add(asked[1])
    outputs = [*core.step(), *core.step()]
    core.add(asked[2])
    outputs += core.step()  # r0 takes no block, r1's tables are full: r1 gives way
    batch = core.schedule()
    assert ids(batch) == ["r0"]
    assert core.get_request_counts() == (1, 2)
    outputs += core.apply(*execute(core, batch))
    assert run(core, outputs) == {request.request_id: echo(request) for request in asked}
    assert core.statistics().preemptions >= 1


def test_a_step_that_preempts_admits_nobody(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(block_size=1, num_blocks=6)
    core.add(ask("a", (1, 2), max_tokens=4))
    core.add(ask("b", (1, 2), max_tokens=4))
    core.step()  # both hold two blocks of the same prompt
    core.add(ask("c", (5,), max_tokens=1))
    outputs: list[EngineOutput] = []
    while core.statistics().preemptions == 0:
        batch = core.schedule()
        assert batch is not None
        outputs += core.apply(*execute(core, batch))
    assert ids(batch) == ["a"]
    run(core)


def test_peak_usage_and_counts_tell_what_happened(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(block_size=4, num_blocks=8)
    core.add(ask("a", 12, max_tokens=4))
    core.add(ask("b", 4, max_tokens=9))
    core.add(ask("gone", 4))
    core.add(ask("refused", ()))
    core.abort(["gone"])
    run(core)
    statistics = core.statistics()
    assert statistics.peak_kv_usage == 6 / 8
    assert (statistics.free_blocks, statistics.num_blocks) == (8, 8)
    assert (statistics.prompt_tokens, statistics.output_tokens) == (16, 13)
    assert (statistics.requests_finished, statistics.requests_aborted) == (2, 1)
    assert (statistics.requests_refused, statistics.steps) == (1, 9)


# --- refusals


def test_what_can_never_fit_is_refused_at_once_saying_by_how_much(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(block_size=4, num_blocks=4, max_model_len=20)
    core.add(ask("pool", 10, max_tokens=8))
    core.add(ask("length", 13, max_tokens=8))
    core.add(ask("empty", ()))
    core.add(ask("vocab", (0, 257)))
    core.add(ask("negative", (0, -1)))
    core.add(ask("alone", (257,)))
    core.add(ask("short", 1, max_tokens=20))
    assert not core.has_requests()
    errors = {}
    for output in core.take_outputs():
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, RequestRejected)
        assert output.error.request_id == output.request_id
        errors[output.request_id] = str(output.error).removeprefix("cannot serve request: ")
    assert errors == {
        "pool": "10 prompt tokens and max_tokens = 8 need room for 17 tokens, "
        "1 more than the KV cache's 16 (4 blocks)",
        "length": "13 prompt tokens and max_tokens = 8 are 1 more than the model's 20 positions",
        "empty": "the prompt is empty; give at least one token",
        "vocab": "token ids must be 0 to 256, not 0 to 257",
        "negative": "token ids must be 0 to 256, not -1 to 0",
        "alone": "token ids must be 0 to 256, not 257",
        "short": "1 prompt token and max_tokens = 20 are 1 more than the model's 20 positions",
    }
    assert core.take_outputs() == []


def test_what_fits_exactly_is_served(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(block_size=4, num_blocks=4, max_model_len=17)
    core.add(ask("a", 10, max_tokens=7))
    assert run(core) == {"a": echo(ask("a", 10, max_tokens=7))}
    core = make_core(block_size=1, num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1)
    for i in range(3):
        core.add(ask(f"r{i}", 1, max_tokens=1))
    assert len(run(core)) == 3
    assert core.statistics().peak_kv_usage == 1.0


def test_the_client_that_left_hears_of_no_refusal(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("a", ()))
    core.abort(["a", "a", "unknown"])
    assert core.step() == []


# --- the integrity check


def test_the_integrity_check_finds_queues_that_lie(make_core: MakeCore, ask: Ask) -> None:
    core = make_core(max_num_seqs=1)
    core.add(ask("a"))
    core.add(ask("b"))
    core.step()
    core.check()
    scheduler = core._scheduler
    scheduler.waiting["b"].block_ids = [3]
    with pytest.raises(InternalError, match="waits and holds blocks"):
        core.check()
    scheduler.running["b"] = scheduler.waiting.pop("b")
    with pytest.raises(InternalError, match="runs and is waiting"):
        core.check()


def test_the_integrity_check_finds_a_wrong_count_of_waiting_tokens(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(max_num_seqs=1)
    core.add(ask("a"))
    core.check()
    core._scheduler._waiting_tokens += 1
    with pytest.raises(InternalError, match="tokens wait, by a wrong count"):
        core.check()


@pytest.mark.parametrize(
    ("count", "said"),
    [
        ("context_tokens", "5 tokens are cached, by a wrong count"),
        ("generated_tokens", "2 tokens were made, by a wrong count"),
    ],
)
def test_the_integrity_check_finds_a_wrong_count_of_what_reports_tell(
    make_core: MakeCore, ask: Ask, count: str, said: str
) -> None:
    core = make_core(max_num_seqs=1)
    core.add(ask("a", 4))
    core.step()
    core.check()
    setattr(core._scheduler, count, getattr(core._scheduler, count) + 1)
    with pytest.raises(InternalError, match=said):
        core.check()


def test_the_integrity_check_finds_a_prefill_that_does_not_run(
    make_core: MakeCore, ask: Ask
) -> None:
    core = make_core(max_num_seqs=1)
    core.add(ask("a", 4))
    core.schedule()
    core.check()
    core._scheduler._prefilling["b"] = core._scheduler.running["a"]
    with pytest.raises(InternalError, match=r"\['a', 'b'\] prefill; \['a'\] run"):
        core.check()


# --- limits


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "max_model_len"]
)
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    limits: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "block_size": 1,
        "num_blocks": 1,
    }
    with pytest.raises(ValueError, match=name):
        EngineLimits(**(limits | {name: 0}))
