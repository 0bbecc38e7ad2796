"""A request's tokens depend on nothing but the request: not on company, chunks, blocks or luck."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from dpkit.messages import SamplingParams
from dpkit.testing.tiny import write_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.engine.models.torch.model import TorchModel

_random = random.Random(7)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 1},
    "hot": {"temperature": 1.3, "seed": 2},
    "top-k": {"temperature": 1.0, "seed": 3, "top_k": 20},
    "top-p": {"temperature": 1.0, "seed": 4, "top_p": 0.9},
    "both": {"temperature": 1.0, "seed": -5, "top_k": 50, "top_p": 0.8},
}

ASKED = {
    f"{name}-{length}": (
        [_random.randrange(3, 263) for _ in range(length)],
        SamplingParams(max_tokens=24, ignore_eos=True, **sampling),
    )
    for name, sampling in SAMPLINGS.items()
    for length in (1, 7, 33)
}


@pytest.fixture(scope="module")
def alone(tiny_model: TorchModel, make_engine) -> dict[str, list[int]]:
    """The answer of each request with an engine to itself and its prompt in one piece."""
    answers: dict[str, list[int]] = {}
    for request_id, request in ASKED.items():
        answers |= make_engine(tiny_model, prefix_cache=False).answer({request_id: request})
    return answers


def test_the_answers_are_worth_comparing(alone) -> None:
    assert len({tuple(answer) for answer in alone.values()}) == len(ASKED)
    assert all(len(answer) == 24 for answer in alone.values())
    assert len(set(alone["hot-7"])) > 5


@pytest.mark.parametrize("max_num_seqs", [2, 5, 64])
def test_batch_mates_change_nothing(tiny_model, make_engine, alone, max_num_seqs: int) -> None:
    assert make_engine(tiny_model, max_num_seqs=max_num_seqs).answer(ASKED) == alone


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 16])
def test_chunks_change_nothing(tiny_model, make_engine, alone, max_num_batched_tokens) -> None:
    engine = make_engine(tiny_model, max_num_batched_tokens=max_num_batched_tokens)
    assert engine.answer(ASKED) == alone


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_block_sizes_change_nothing(tiny_model, make_engine, alone, block_size: int) -> None:
    engine = make_engine(tiny_model, block_size=block_size, num_blocks=2048 // block_size)
    assert engine.answer(ASKED) == alone


def test_preemption_changes_nothing(tiny_model, make_engine, alone) -> None:
    engine = make_engine(tiny_model, block_size=4, num_blocks=40)
    assert engine.answer(ASKED) == alone
    assert engine.core.statistics().preemptions > 5


def test_prefix_hits_change_nothing(tiny_model, make_engine, alone) -> None:
    engine = make_engine(tiny_model, block_size=4, num_blocks=1024)
    assert engine.answer(ASKED) == alone
    assert engine.answer(ASKED) == alone
    assert engine.core.statistics().prefix_hit_tokens == len(SAMPLINGS) * (4 + 32)


def test_the_seed_changes_the_answer(tiny_model, make_engine, alone) -> None:
    prompt, sampling = ASKED["hot-7"]
    other = evolve(sampling, seed=99)
    assert make_engine(tiny_model).answer({"x": (prompt, other)})["x"] != alone["hot-7"]


def test_no_seed_is_seed_zero(tiny_model, make_engine) -> None:
    """A client draws one, so that a retry repeats it; an engine that gets none still can go on."""
    prompt, sampling = ASKED["hot-7"]
    asked = {"none": (prompt, evolve(sampling, seed=None)), "0": (prompt, evolve(sampling, seed=0))}
    answers = make_engine(tiny_model).answer(asked)
    assert answers["none"] == answers["0"]


def test_both_file_formats_say_the_same(tmp_path: Path, load, make_engine, alone) -> None:
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", tie_word_embeddings=False))
    assert make_engine(model).answer(ASKED) == alone


def test_an_end_token_ends_the_answer(tiny_model, make_engine, alone) -> None:
    prompt, sampling = ASKED["hot-7"]
    third = alone["hot-7"][2]
    stopping = evolve(sampling, stop_token_ids=(third,))
    answer = make_engine(tiny_model).answer({"x": (prompt, stopping)})["x"]
    assert answer == alone["hot-7"][: alone["hot-7"].index(third) + 1]
