"""What the engine itself does for sampling: when a text may end, and whose logprobs are told."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve, field, frozen
from msgspec.structs import replace

from dpkit.abc import Model
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ModelFailed, RequestRejected
from dpkit.messages import (
    Batch,
    BatchRow,
    EngineOutput,
    GenerateRequest,
    ModelSpec,
    StepResult,
    TokenLogprob,
)
from dpkit.names import FinishReason
from dpkit.text.bytes import EOS_TOKEN_ID, ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeCore = Callable[..., EngineCore]
    Ask = Callable[..., GenerateRequest]


@frozen
class Telling(Model):
    """Tells of each token the place at which it was scored, and remembers which rows it saw."""

    inline = True
    spec = ModelSpec(tells_logprobs=True)
    rows: list[BatchRow] = field(factory=list)

    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def execute(self, batch: Batch, cache: Any) -> StepResult:  # noqa: ARG002 - it has none
        prompts = {}
        for index, row in enumerate(batch.rows):
            self.rows.append(replace(row, output_token_ids=tuple(row.output_token_ids)))
            places = range(row.start + 1, row.start + 1 + len(row.token_ids))
            assert all(place in places for place in row.scored)
            if row.scored:
                prompts[index] = [_told(row.prompt_token_ids[p], -p) for p in row.scored]
        return StepResult(
            sampled=[None if r.output_index is None else r.output_index for r in batch.rows],
            logprobs={
                index: _told(row.output_index, -1000 - row.output_index)
                for index, row in enumerate(batch.rows)
                if row.output_index is not None and row.sampling.logprobs is not None
            },
            prompt_logprobs=prompts,
        )


def _told(token_id: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=1)


def make_telling(**limits: Any) -> EngineCore:
    defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 64}
    return EngineCore(Telling(), limits=EngineLimits(**(defaults | limits)))


def run(core: EngineCore) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = defaultdict(list)
    while core.has_requests():
        for output in core.step():
            outputs[output.request_id].append(output)
        core.check()
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


# --- min_tokens


def test_nothing_ends_a_text_before_it_has_min_tokens(make_core: MakeCore, ask: Ask) -> None:
    core = make_core()
    core.add(ask("eos", (7, 8), ignore_eos=False, min_tokens=5))
    core.add(ask("stop", (7, 8), stop_token_ids=(8,), min_tokens=3))
    core.add(ask("exactly", (7, 8), stop_token_ids=(8,), min_tokens=1))
    core.add(ask("length", (7, 8), ignore_eos=False, min_tokens=8))
    outputs = run(core)
    assert tokens(outputs["eos"]) == [7, 8, 7, 8, 7, EOS_TOKEN_ID]
    assert tokens(outputs["stop"]) == [7, 8, 7, 8]
    assert tokens(outputs["exactly"]) == [7, 8]
    assert tokens(outputs["length"]) == [7, 8] * 4
    assert {name: each[-1].finish_reason for name, each in outputs.items()} == {
        "eos": FinishReason.STOP,
        "stop": FinishReason.STOP,
        "exactly": FinishReason.STOP,
        "length": FinishReason.LENGTH,
    }


@pytest.mark.parametrize(
    ("sampling", "banned"),
    [
        ({"ignore_eos": False}, {EOS_TOKEN_ID}),
        ({"ignore_eos": False, "stop_token_ids": (3, 4)}, {EOS_TOKEN_ID, 3, 4}),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, {3}),
        ({"ignore_eos": True}, set()),
    ],
)
def test_a_model_is_told_what_would_end_the_text_too_early(
    make_core: MakeCore, ask: Ask, sampling: dict[str, Any], banned: set[int]
) -> None:
    core = make_core()
    core.add(ask("r", 1, min_tokens=2, max_tokens=4, **sampling))
    seen = []
    while (batch := core.schedule()) is not None:
        seen.append(set(batch.rows[0].banned_token_ids))
        core.apply(batch, core.model.execute(batch, None))
    assert seen[:2] == [banned, banned]
    assert seen[2:] == [set()] * len(seen[2:])


def test_a_model_sees_the_output_so_far_even_after_a_preemption(ask: Ask) -> None:
    core = make_telling(num_blocks=5)
    for name in "ab":
        core.add(ask(name, 5, max_tokens=12))
    run(core)
    assert core.statistics().preemptions > 0
    for row in core.model.rows:  # type: ignore[attr-defined]
        if row.output_index is not None:
            assert row.output_token_ids == tuple(range(row.output_index))


# --- logprobs


def test_logprobs_come_with_their_tokens_and_only_to_those_who_ask(ask: Ask) -> None:
    core = make_telling()
    core.add(ask("asks", 3, max_tokens=3, logprobs=0))
    core.add(ask("not", 3, max_tokens=3))
    outputs = run(core)
    assert [output.logprobs for output in outputs["asks"]] == [
        (_told(index, -1000 - index),) for index in range(3)
    ]
    assert all(output.logprobs == () for output in outputs["not"])
    assert all(output.prompt_logprobs == () for each in outputs.values() for output in each)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 4, 64])
@pytest.mark.parametrize("num_blocks", [11, 64])
def test_prompt_logprobs_come_once_and_whole_whatever_the_chunks_the_cache_and_preemption(
    ask: Ask, max_num_batched_tokens: int, num_blocks: int
) -> None:
    core = make_telling(max_num_batched_tokens=max_num_batched_tokens, num_blocks=num_blocks)
    prompt = tuple(range(50, 67))
    for _ in range(2):  # the second time, the cache holds the whole prompt
        for name in "abc":
            core.add(ask(name, prompt, max_tokens=7, prompt_logprobs=0))
        core.add(ask("not", prompt, max_tokens=7))
        outputs = run(core)
        for name in "abc":
            first, *rest = outputs[name]
            assert first.prompt_logprobs == tuple(_told(50 + p, -p) for p in range(1, 17))
            assert all(output.prompt_logprobs == () for output in rest)
        assert outputs["not"][0].prompt_logprobs == ()
    assert core.statistics().prefix_hit_tokens > 0  # those who don't ask still hit


def test_no_prompt_token_is_scored_twice(ask: Ask) -> None:
    core = make_telling(max_num_batched_tokens=4, num_blocks=9, prefix_cache=False)
    core.add(ask("old", 8, max_tokens=20))
    core.add(ask("new", 24, max_tokens=2, prompt_logprobs=0))
    run(core)
    rows = [row for row in core.model.rows if row.request_id == "new"]  # type: ignore[attr-defined]
    assert [place for row in rows for place in row.scored] == list(range(1, 24))
    assert [row.start for row in rows].count(0) > 1  # preempted inside its prompt


def test_a_prompt_of_one_token_has_no_logprobs_and_does_not_miss_them(ask: Ask) -> None:
    core = make_telling()
    core.add(ask("r", (7,), max_tokens=2, prompt_logprobs=5))
    assert run(core)["r"][0].prompt_logprobs == ()


@pytest.mark.parametrize("model", [EchoModel(), CostModel("h200-8b")], ids=["echo", "cost"])
def test_a_model_without_doubts_tells_certainty(make_core: MakeCore, ask: Ask, model: Any) -> None:
    core = make_core(model=model)
    core.add(ask("r", (7, 8, 9), max_tokens=1, logprobs=3, prompt_logprobs=0))
    [output] = run(core)["r"]
    assert output.logprobs == (TokenLogprob(token_id=7, logprob=0.0, rank=1, top=((7, 0.0),)),)
    assert output.prompt_logprobs == (
        TokenLogprob(token_id=8, logprob=0.0, rank=1),
        TokenLogprob(token_id=9, logprob=0.0, rank=1),
    )


# --- refusals


class Mute(EchoModel):
    """Echo that keeps its certainty to itself."""

    spec = evolve(EchoModel.spec, tells_logprobs=False)


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"logprobs": 0}, "logprobs was asked for, and this model tells none; leave it out"),
        (
            {"prompt_logprobs": 1},
            "prompt_logprobs was asked for, and this model tells none; leave it out",
        ),
        ({"logit_bias": {257: 1.0}}, "logit_bias must name tokens 0 to 256, not 257"),
        ({"stop_token_ids": (3, 999)}, "stop_token_ids must name tokens 0 to 256, not 999"),
    ],
)
def test_what_a_model_cannot_do_is_refused_at_once(
    make_core: MakeCore, ask: Ask, sampling: dict[str, Any], problem: str
) -> None:
    core = make_core(model=Mute())
    core.add(ask("r", 3, **sampling))
    [refusal] = core.take_outputs()
    assert isinstance(refusal.error, RequestRejected)
    assert str(refusal.error) == f"cannot serve request: {problem}"
    assert not core.has_requests()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": {}}, "told no logprob for row 0, which asks for it"),
        ({"prompt_logprobs": {}}, "told 0 prompt logprobs for row 0, not 2"),
        ({"logprobs": 5}, "must give `logprobs` as a mapping, not int"),
        ({"logprobs": {0: 5.0}}, "must tell row 0 a TokenLogprob, not float"),
        ({"prompt_logprobs": None}, "must give `prompt_logprobs` as a mapping, not NoneType"),
        ({"prompt_logprobs": {0: 5}}, "must tell prompt logprobs as a sequence, not int"),
        ({"prompt_logprobs": {0: [1, 2]}}, "must tell row 0 a TokenLogprob, not int"),
        ({"sampled": None}, "must give `sampled` as a sequence, not NoneType"),
        ({"sampled": iter([1])}, "must give `sampled` as a sequence, not list_iterator"),
        ({"sampled": "a"}, "must give `sampled` as a sequence, not str"),
        ({"sampled": [np.int64(1)]}, r"must sample an int .* not np.int64\(1\)"),
    ],
)
def test_a_model_whose_result_does_not_fit_is_named(
    make_core: MakeCore, ask: Ask, changes: dict[str, Any], message: str
) -> None:
    core = make_core()
    core.add(ask("r", 3, logprobs=1, prompt_logprobs=1))
    batch = core.schedule()
    assert batch is not None
    result = core.model.execute(batch, None)
    with pytest.raises(ModelFailed, match=r"echo\.EchoModel\.execute\(\) " + message):
        core.apply(batch, evolve(result, **changes))
    core.apply(batch, result)


def test_an_end_token_outside_the_vocabulary_is_nothing_to_ban(ask: Ask) -> None:
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_blocks=64)
    model = EchoModel()
    model.spec = evolve(model.spec, eos_token_ids=frozenset({EOS_TOKEN_ID, 999}))
    core = EngineCore(model, limits=limits)
    core.add(ask("r", 1, ignore_eos=False, min_tokens=2, max_tokens=4))
    batch = core.schedule()
    assert batch is not None
    assert set(batch.rows[0].banned_token_ids) == {EOS_TOKEN_ID}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_token_ids": (True,)}, "prompt_token_ids must hold ints, not bool"),
        ({"prompt_token_ids": (1, 1.5)}, "prompt_token_ids must hold ints, not float"),
        ({"prompt_token_ids": ("a",)}, "prompt_token_ids must hold ints, not str"),
        ({"prompt_token_ids": (np.int64(1),)}, "prompt_token_ids must hold ints, not int64"),
        ({"prompt_token_ids": np.array([1, 2])}, "prompt_token_ids must be a tuple, not ndarray"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a tuple, not NoneType"),
        ({"prompt_token_ids": (10**30,)}, f"must be 0 to 256, not {10**30}"),
        ({"output_token_ids": (None,)}, "output_token_ids must hold ints, not NoneType"),
        ({"output_token_ids": [1]}, "output_token_ids must be a tuple, not list"),
        ({"sampling": None}, "sampling must be a SamplingParams, not NoneType"),
        ({"cache_salt": 5}, "cache_salt must be a str, not int"),
        ({"cache_salt": b"s"}, "cache_salt must be a str, not bytes"),
    ],
    ids=str,
)
def test_a_request_of_wrong_types_is_refused_and_harms_nobody(
    make_core: MakeCore, ask: Ask, changes: dict[str, Any], problem: str
) -> None:
    core = make_core()
    core.add(ask("good"))
    core.add(evolve(ask("bad"), **changes))
    [refusal] = core.take_outputs()
    assert refusal.request_id == "bad"
    assert isinstance(refusal.error, RequestRejected)
    assert problem in str(refusal.error)
    assert [output.request_id for output in core.step()] == ["good"]
