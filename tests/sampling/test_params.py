"""Sampling parameters: what is taken, and in which words the rest is refused."""

from __future__ import annotations

import math
import pickle
from contextlib import suppress
from typing import Any

import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from dpkit.sampling import SamplingParams

WHOLE = "a whole number from"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, f"max_tokens must be {WHOLE} 1 to 2147483647, not 0"),
    ({"max_tokens": True}, f"max_tokens must be {WHOLE} 1 to 2147483647, not True"),
    ({"max_tokens": "9"}, f"max_tokens must be {WHOLE} 1 to 2147483647, not '9'"),
    ({"min_tokens": -1}, f"min_tokens must be {WHOLE} 0 to max_tokens, which is 128, not -1"),
    (
        {"min_tokens": 9, "max_tokens": 8},
        f"min_tokens must be {WHOLE} 0 to max_tokens, which is 8, not 9",
    ),
    ({"temperature": -0.1}, "temperature must be a number from 0 to 100, not -0.1"),
    ({"temperature": math.nan}, "temperature must be a number from 0 to 100, not nan"),
    ({"temperature": math.inf}, "temperature must be a number from 0 to 100, not inf"),
    ({"temperature": None}, "temperature must be a number from 0 to 100, not None"),
    ({"top_k": -1}, f"top_k must be {WHOLE} 0 to 2147483647, not -1"),
    ({"top_k": 2**70}, f"top_k must be {WHOLE} 0 to 2147483647, not {2**70}"),
    ({"top_p": 0.0}, "top_p must be a number above 0, at most 1, not 0.0"),
    ({"top_p": 1.1}, "top_p must be a number above 0, at most 1, not 1.1"),
    ({"min_p": 1.1}, "min_p must be a number from 0 to 1, not 1.1"),
    ({"seed": 0.5}, "seed must be None or a whole number of at most 64 bits, not 0.5"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a number from 0.01 to 100, not 0.0"),
    ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, not 2.1"),
    ({"frequency_penalty": -3}, "frequency_penalty must be a number from -2 to 2, not -3"),
    ({"logit_bias": {5: 101}}, "logit_bias must be from -100 to 100, not 101 for token 5"),
    ({"logit_bias": {5: math.nan}}, "logit_bias must be from -100 to 100, not nan for token 5"),
    (
        {"logit_bias": {"5": 1}},
        "logit_bias must map token ids, from 0 on, to numbers, not ('5', 1)",
    ),
    ({"logit_bias": 5}, "logit_bias must map token ids, from 0 on, to numbers, not 5"),
    ({"stop": ""}, "stop must be strings that are not empty, not ''"),
    ({"stop": ["a", 5]}, "stop must be strings that are not empty, not 5"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids, from 0 on, not -1"),
    ({"stop_token_ids": "a"}, "stop_token_ids must be token ids, from 0 on, not 'a'"),
    ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
    ({"logprobs": 21}, f"logprobs must be None or {WHOLE} 0 to 20, not 21"),
    ({"logprobs": True}, f"logprobs must be None or {WHOLE} 0 to 20, not True"),
    ({"prompt_logprobs": -1}, f"prompt_logprobs must be None or {WHOLE} 0 to 20, not -1"),
    ({"echo": 1}, "echo must be True or False, not 1"),
    ({"n": 0}, f"n must be {WHOLE} 1 to 128, not 0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[str(v)[:40] for v, _ in REFUSED])
def test_what_is_out_of_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"must") as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_every_field_has_a_value_that_is_refused() -> None:
    refused = {name for values, _ in REFUSED for name in values}
    assert refused == {attribute.name for attribute in fields(SamplingParams)}


def test_the_ends_of_every_range_are_taken() -> None:
    SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0, top_k=1, top_p=1, min_p=1, seed=-(2**63)
    )
    SamplingParams(
        temperature=100.0, repetition_penalty=100, presence_penalty=-2, frequency_penalty=2.0
    )
    SamplingParams(logit_bias={0: -100, 1: 100.0}, logprobs=0, prompt_logprobs=20, n=128)


def test_collections_are_kept_so_that_nobody_can_change_them() -> None:
    bias = {7: 1.5, 3: -2}
    sampling = SamplingParams(logit_bias=bias, stop=["a", "b"], stop_token_ids=[1, 2])
    bias[7] = 9
    assert dict(sampling.logit_bias) == {7: 1.5, 3: -2}
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (1, 2))
    assert hash(sampling) == hash(evolve(sampling))
    assert pickle.loads(pickle.dumps(sampling)) == evolve(sampling) == sampling  # noqa: S301


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_none_of_them_is_said_by_none_too() -> None:
    """A front end that decodes JSON gets null."""
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**nothing) == SamplingParams()


@given(
    st.sampled_from([attribute.name for attribute in fields(SamplingParams)]),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.one_of(st.integers(), st.text(max_size=2)), max_size=3),
        st.dictionaries(st.integers(-2, 9), st.floats(), max_size=2),
    ),
)
def test_any_value_is_taken_or_gives_a_value_error_and_no_other(name: str, value: Any) -> None:
    with suppress(ValueError):
        SamplingParams(**{name: value})
