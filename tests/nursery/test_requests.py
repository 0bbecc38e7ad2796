"""The edge where requests come in: what is wrong is refused there, alone, and in words."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from dpkit import open_cluster
from dpkit.config.load import parse_config
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import DpkitError, RequestRejected
from dpkit.nursery.prompts import Encoder
from dpkit.nursery.requests import RequestMaker, RequestOptions
from dpkit.testing.idle import check_idle
from dpkit.text.bytes import VOCAB_SIZE, ByteDecoder, ByteTokenizer

if TYPE_CHECKING:
    from dpkit.messages import FinishReason, GenerateRequest

HUGE = 10**5000  # Python refuses to write it out
LONG = HUGE, -HUGE, 10**30, -(10**30), 2**63, 2**64

GARBAGE: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from(LONG),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "\x00", b"x", np.int64(3), np.float32(0.5), np.array(1), object()]),
    st.lists(st.integers(-1, 300) | st.sampled_from(LONG) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers(-1, 300), st.floats(), max_size=2),
)

MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), GARBAGE, max_size=3), max_size=2
)


def maker(tokenizer: Any = None) -> RequestMaker:
    return RequestMaker(tokenizer or ByteTokenizer(), random.Random(0), "test")


def serve(request: GenerateRequest) -> FinishReason | None:
    """What an engine makes of a request, which must not be its end."""
    model = EchoModel()
    limits = resolve_limits(
        model.spec,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        block_size=16,
        num_blocks=64,
        memory=None,
        prefix_cache=True,
    )
    core = EngineCore(model, limits=limits)
    core.add(request)
    reason = None
    while core.has_requests() and reason is None:
        outputs = list(core.take_outputs())
        if (batch := core.schedule()) is not None:
            outputs += core.apply(batch, model.execute(batch, None))
        reason = next((output.finish_reason for output in outputs), None)
    core.abort([request.request_id])
    core.check()
    return reason


@given(
    prompt=GARBAGE | MESSAGES | st.just("hello"),
    options=st.dictionaries(
        st.sampled_from(sorted(RequestOptions.__optional_keys__)), GARBAGE, max_size=3
    ),
)
def test_whatever_is_asked_an_engine_can_serve_it_or_it_is_rejected(
    prompt: Any, options: dict[str, Any]
) -> None:
    async def ask() -> None:
        try:
            asked = maker().make(prompt, None, {"max_tokens": 4, **options})  # type: ignore[typeddict-item]
        except RequestRejected:
            return
        for each in asked[:2]:
            serve(each.request)

    trio.run(ask, clock=trio.testing.MockClock())


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, 0.5, b"bytes", {"a": 1}, {1, 2}, iter([1, 2]), np.array(7), object()),
        *([True], [1.5], [None], ["a"], [[1, 2]], [-1], [2**31], [HUGE], [1, {"role": "user"}]),
        *([{}], [{"role": "user"}], [{"content": "hi"}], [{"role": 1, "content": "hi"}]),
        *([{"role": "user", "content": None}], [{"role": "user", "content": "\ud800"}], "\udcff"),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
@pytest.mark.parametrize("echo", [False, True])
def test_what_is_no_prompt_is_rejected(prompt: Any, echo: bool) -> None:
    with pytest.raises(RequestRejected, match=r"^request test-1: ") as caught:
        maker().make(prompt, None, {"echo": echo})
    assert caught.value.request_id == "test-1"
    assert len(str(caught.value)) < 250


KINDS = "a prompt is text, token ids, or chat messages with role and content"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (5, f"{KINDS}, not 5"),
        (np.array(7), f"{KINDS}, not .*: iteration over a 0-d array"),
        ([1, "a"], f"{KINDS}; it has 'a' where a token id should be"),
        ([-1], "token ids must be 0 or more, in 31 bits, not -1 \\(at index 0\\)"),
        ([5, 2**31], f"token ids must be 0 or more, in 31 bits, not {2**31} \\(at index 1\\)"),
        ([{"role": 1, "content": "hi"}], "a chat message needs 'role' as text, not 1"),
        ([{"role": "user"}], "a chat message has no 'content': {'role': 'user'}"),
        ("\udcff", "the prompt is no Unicode text: half of a surrogate pair at character 0"),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_what_is_wrong_with_a_prompt_is_said(prompt: Any, said: str) -> None:
    with pytest.raises(RequestRejected, match=f"^request test-1: {said}"):
        maker().make(prompt, None, {})


def test_what_is_beyond_the_vocabulary_is_no_text() -> None:
    encoder = Encoder(ByteTokenizer(), VOCAB_SIZE)
    assert encoder.decode([104, VOCAB_SIZE - 1]) == "h"
    said = r"token ids must be 0 to 256, not 257 \(at index 1\)$"
    with pytest.raises(RequestRejected, match=said):
        encoder.decode([104, VOCAB_SIZE])


def test_a_sampling_of_another_type_is_said() -> None:
    sampling: Any = {"temperature": 1}
    with pytest.raises(RequestRejected, match=r"sampling must be SamplingParams, not \{'temp"):
        maker().make("hello", sampling, {})


@pytest.mark.parametrize(
    "prompt", [range(3), (0, 1, 2), np.arange(3), [np.int64(0), 1, np.uint8(2)]], ids=repr
)
def test_whole_numbers_of_any_type_are_token_ids(prompt: Any) -> None:
    [asked] = maker().make(prompt, None, {})
    assert asked.request.prompt_token_ids == (0, 1, 2)
    assert {type(token_id) for token_id in asked.request.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("engine", 0),
        ("cache_salt", None),
        ("cache_salt", b"salt"),
        ("timeout", "1"),
        ("timeout", True),
        ("timeout", math.nan),
        ("timeout", -HUGE),
        ("priority", "high"),
        ("priority", 0.5),
        ("tenant", 7),
        ("resume", 1),
        ("request_id", 7),
        ("seed", HUGE),
        ("max_tokens", HUGE),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_option_of_the_wrong_type_is_named(option: str, value: Any) -> None:
    options: Any = {option: value}
    with pytest.raises(RequestRejected, match=rf"{option} must be "):
        maker().make("hello", None, options)


def test_a_time_out_beyond_all_numbers_is_none() -> None:
    async def ask() -> None:
        [asked] = maker().make("hello", None, {"timeout": HUGE})
        assert asked.request.deadline is None

    trio.run(ask)


class _Broken(ByteTokenizer):
    """Encodes to whatever it was given, or raises it."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def encode(self, text: str) -> Any:  # noqa: ARG002
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class _Undecodable(ByteTokenizer):
    def decoder(self, prompt_token_ids: Any = ()) -> ByteDecoder:
        raise OverflowError(prompt_token_ids)


@pytest.mark.parametrize(
    "tokenizer",
    [
        *(_Broken(each) for each in (None, 5, [1.5], ["a"], [-1], ValueError("no such letter"))),
        _Undecodable(),
    ],
)
def test_a_tokenizer_that_fails_fails_one_request(tokenizer: ByteTokenizer) -> None:
    with pytest.raises(RequestRejected, match=r"^request test-1: "):
        maker(tokenizer).make("hello", None, {})


def test_what_a_tokenizer_says_is_passed_on() -> None:
    said = "the model's tokenizer cannot take this prompt: ValueError: no such letter"
    with pytest.raises(RequestRejected, match=said):
        maker(_Broken(ValueError("no such letter"))).make("hello", None, {})


async def test_a_rejected_request_leaves_nothing_behind(autojump_clock: object) -> None:
    rejected: list[Any] = [None, [-1], "\ud800", [{"role": "user"}]]
    async with open_cluster(parse_config('[[engines]]\nmodel = "echo"\n')) as cluster:
        for prompt in rejected:
            with pytest.raises(DpkitError):
                await cluster.client.complete(prompt)
        assert cluster.client.statistics().started == 0
        assert (await cluster.client.complete("fine")).text == "fine"
        check_idle(cluster)


class Silent(ByteTokenizer):
    """Must not be asked."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError(text[:9])


class Unread(list[int]):
    """Its number is all that may be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError(len(self))


class Lazy(ByteTokenizer):
    """Says more tokens than anybody wants to have."""

    def encode(self, text: str) -> Unread:
        return Unread([7] * len(text))


def test_of_a_prompt_that_is_too_long_as_little_as_can_be_is_looked_at() -> None:
    long = "a" * 2561
    prompt: Any
    for prompt in (long, [{"role": "user", "content": long}]):
        with pytest.raises(RequestRejected, match="2561 characters has more than the 10 tokens"):
            Encoder(Silent()).encode(prompt, 10)
    many: tuple[Any, ...] = ("a" * 11, [{"role": "", "content": ""}], [7] * 11)
    for prompt in many:
        with pytest.raises(RequestRejected, match=r"1\d prompt tokens are \d more than the 10"):
            Encoder(Lazy()).encode(prompt, 10)
    assert Encoder(ByteTokenizer()).encode("a" * 10, 10) == (97,) * 10


async def test_a_prompt_may_be_as_long_as_the_largest_engine_has_room_for() -> None:
    of = "[[engines]]\nname = 'of_{0}'\nmodel = 'echo'\nkv.num_blocks = {0}\n"
    async with open_cluster(parse_config(of.format(4) + of.format(8))) as cluster:
        most = cluster.longest_prompt
        assert most == 8 * 16
        assert (await cluster.client.complete([7] * most, max_tokens=1)).token_ids == (7,)
        with pytest.raises(RequestRejected, match="room for 129 tokens, 1 more than the KV cache"):
            await cluster.client.complete([7] * (most + 1), max_tokens=1)
