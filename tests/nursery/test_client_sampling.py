"""What the client does for sampling: stop strings, several choices, echo, logprobs, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import evolve, fields

from dpkit.engine.models.echo import EchoModel
from dpkit.errors import EngineLost, RequestRejected
from dpkit.messages import EngineOutput, SamplingParams, TokenLogprob
from dpkit.names import FinishReason
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.nursery.mailbox import Mailbox
from dpkit.nursery.requests import RequestOptions
from dpkit.testing.idle import check_idle
from dpkit.testing.sweep import sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config
    from dpkit.messages import Batch, StepResult
    from dpkit.testing.mark import Mark

STEP_S = 0.1


class Timed(EchoModel):
    """Each step lasts 100 ms; a request named "bomb" blows its engine up at its third token."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        if any(row.request_id == "bomb" and row.output_index == 2 for row in batch.rows):
            raise ValueError("boom")
        return evolve(super().execute(batch, cache), duration_s=STEP_S)


@pytest.fixture
def timed(make_config: Callable[..., Config]) -> Config:
    return make_config(f"{__name__}:Timed", count=1)


def _steps(cluster: Cluster) -> int:
    return sum(each.core.steps for each in cluster.statistics().engines)


def _certain(letters: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=ord(c), logprob=0.0, rank=1) for c in letters)


# --- stop strings


async def test_a_text_ends_before_its_stop_string(autojump_clock: object, timed: Config) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("one, two. three", stop=[".", "three"]) as stream:
            outputs = [output async for output in stream]
        completion = stream.completion()
        assert stream.text == completion.text == "one, two"
        assert completion.finish_reason is FinishReason.STOP
        assert bytes(completion.token_ids) == b"one, two."  # what was paid for, stop and all
        assert [output.finish_reason for output in outputs[:-1]] == [None] * 8
        await trio.testing.wait_all_tasks_blocked()
        check_idle(cluster)


async def test_what_may_begin_a_stop_string_is_held_back_until_it_is_known(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("xabxaby", stop="aba", max_tokens=7) as stream:
            texts = [output.text async for output in stream]
        assert texts == ["x", "", "", "abx", "", "", "aby"]
        async with cluster.client.generate("xab", stop="aba") as stream:
            texts = [output.text async for output in stream]
        assert texts == ["x", "", "", "ab"]  # with the end: nothing came of it
        assert stream.finish_reason is FinishReason.STOP


async def test_the_engine_stops_at_a_stop_string_though_nobody_reads(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        prompt = "a.bcdefghijklmnopqrstuvwxyz"
        async with cluster.client.generate(prompt, stop=".") as stream:
            await trio.sleep(2.5 * STEP_S)
            assert _steps(cluster) == 2
            assert cluster.client.statistics().inflight == {}  # released at once
            await trio.sleep(10 * STEP_S)
            assert _steps(cluster) == 2
            check_idle(cluster)
            completion = await stream.read_all()
        assert completion.text == "a"
        assert completion.latency_s == pytest.approx(2 * STEP_S)
        statistics = cluster.client.statistics()
        assert (statistics.started, statistics.finished, statistics.aborted) == (1, 1, 0)
        assert statistics.late_outputs == 0


async def test_a_stop_string_in_the_last_token_changes_only_the_reason(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        completion = await cluster.client.complete("ab.c", stop=".", max_tokens=3)
        assert (completion.text, completion.finish_reason) == ("ab", FinishReason.STOP)
        statistics = cluster.client.statistics()
        assert (statistics.finished, statistics.aborted) == (1, 0)
        check_idle(cluster)


async def test_min_tokens_hold_for_stop_strings_too(autojump_clock: object, timed: Config) -> None:
    async with open_cluster(timed) as cluster:
        completion = await cluster.client.complete("a.b.c", stop=".", min_tokens=3)
    assert completion.text == "a.b"


async def test_a_lost_engine_shows_what_was_held_back(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("abc", stop="abcd", request_id="bomb") as stream:
            with pytest.raises(EngineLost, match="boom"):
                await stream.read_all()
        assert (stream.text, stream.finish_reason) == ("ab", FinishReason.ERROR)


# --- n


async def test_choices_are_requests_of_their_own_and_the_first_is_the_plain_one(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        sampling = SamplingParams(seed=7, temperature=1.0)
        plain = cluster.client.generate("hello", sampling, request_id="r")
        streams = cluster.client.generate_many("hello", sampling, request_id="r", n=3)
        again = cluster.client.generate_many("hello", sampling, request_id="r", n=2)
    requests = [stream.request for stream in streams]
    assert requests[0] == plain.request
    assert [request.request_id for request in requests] == ["r", "r.1", "r.2"]
    assert len({request.sampling.seed for request in requests}) == 3
    assert {request.sampling.n for request in requests} == {1}
    assert [stream.request for stream in again] == requests[:2]


def test_the_seeds_of_choices_are_the_same_in_every_process() -> None:
    """A retry elsewhere, or another version, must repeat the same text."""
    from dpkit.messages import GenerateRequest  # noqa: PLC0415 - of this test only
    from dpkit.nursery.requests import choice_of  # noqa: PLC0415

    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(seed=7, n=3)
    )
    seeds = [choice_of(request, index).sampling.seed for index in range(3)]
    assert seeds == [7, 7643869921872156431, 3167967750878333780]


async def test_all_choices_run_at_once_on_all_engines(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config(f"{__name__}:Timed", count=2)) as cluster:
        before = trio.current_time()
        completions = await cluster.client.complete_many("hello", n=4)
        assert trio.current_time() - before < 7.5 * STEP_S  # one takes 6 steps
        assert [completion.text for completion in completions] == ["hello"] * 4
        assert sorted(str(c.engine) for c in completions) == ["engine-0"] * 2 + ["engine-1"] * 2
        await trio.testing.wait_all_tasks_blocked()
        check_idle(cluster)


async def test_choices_share_the_prompts_blocks(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    config = make_config("echo", "kv.block_size=4", "scheduler.max_num_batched_tokens=20", count=1)
    async with open_cluster(config) as cluster:
        await cluster.client.complete_many("a prompt of twenty-six ...", n=3)
        [engine] = cluster.statistics().engines
    assert engine.core.prefix_hit_tokens >= 20


async def test_if_one_choice_fails_all_are_left(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config(f"{__name__}:Timed", count=2)) as cluster:
        blocker = cluster.client.generate("hello", request_id="r.2", max_tokens=50)
        async with blocker:
            with pytest.raises(RequestRejected, match=r"'r\.2' is in flight already"):
                await cluster.client.complete_many("hello", n=4, request_id="r")
            assert sum(cluster.client.statistics().inflight.values()) == 1
            assert (await blocker.read_all()).text == "hello"
        with trio.move_on_after(2.5 * STEP_S):
            await cluster.client.complete_many("hello", n=4)
        assert cluster.client.statistics().inflight == {}
        await trio.sleep(STEP_S)
        await trio.testing.wait_all_tasks_blocked()
        check_idle(cluster)


async def test_one_stream_is_not_given_for_several_choices(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        with pytest.raises(RequestRejected) as caught:
            cluster.client.generate("hello", SamplingParams(n=2), request_id="r")
        assert str(caught.value) == (
            "request r: n = 2 asks for several completions, and generate() and complete() "
            "give one; use generate_many() or complete_many()"
        )
        assert caught.value.request_id == "r"
        with pytest.raises(RequestRejected, match="n = 3 asks for several"):
            await cluster.client.complete("hello", n=3)


# --- echo and logprobs


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("tea å", "tea å"),
        (list("tea å".encode()), "tea å"),
        ([{"role": "user", "content": "tea"}], "user: tea\nassistant: "),
    ],
    ids=["text", "tokens", "chat"],
)
async def test_echo_puts_the_prompt_in_front(
    autojump_clock: object, timed: Config, prompt: Any, text: str
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate(prompt, echo=True, max_tokens=3, stop="z") as stream:
            outputs = [output.text async for output in stream]
        plain = await cluster.client.complete(prompt, max_tokens=3)
    assert outputs[0] == text + plain.text[0]
    assert stream.text == text + plain.text
    assert stream.completion().token_ids == plain.token_ids


async def test_the_echo_is_not_searched_for_stop_strings(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        completion = await cluster.client.complete("a.b", echo=True, stop=".b")
    assert completion.text == "a.ba"


async def test_logprobs_come_one_a_token_to_slow_readers_too(
    autojump_clock: object, timed: Config
) -> None:
    async with (
        open_cluster(timed) as cluster,
        cluster.client.generate("hello", logprobs=0, prompt_logprobs=0) as stream,
    ):
        await trio.sleep(2.5 * STEP_S)
        first = await anext(stream)
        completion = await stream.read_all()
    assert (first.logprobs, first.prompt_logprobs) == (_certain("he"), _certain("ello"))
    assert [told.token_id for told in completion.logprobs] == list(completion.token_ids)
    assert completion.prompt_logprobs == _certain("ello")


async def test_echo_with_logprobs_tells_the_prompts_too(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        both = await cluster.client.complete("hey", echo=True, logprobs=0)
        neither = await cluster.client.complete("hey", echo=True)
        other = cluster.client.generate("hey", echo=True, logprobs=0, prompt_logprobs=5)
    assert (both.prompt_logprobs, both.logprobs[:3]) == (_certain("ey"), _certain("hey"))
    assert neither.prompt_logprobs == neither.logprobs == ()
    assert other.request.sampling.prompt_logprobs == 5


async def test_a_mailbox_merges_logprobs_with_their_tokens() -> None:
    mailbox = Mailbox("r")
    for letter, prompt in ("a", "xyz"), ("b", ""), ("c", ""):
        mailbox.put_nowait(
            EngineOutput(
                request_id="r",
                token_ids=(ord(letter),),
                logprobs=_certain(letter),
                prompt_logprobs=_certain(prompt),
            )
        )
    output = await mailbox.take(lambda whole: whole)
    assert output.token_ids == tuple(b"abc")
    assert (output.logprobs, output.prompt_logprobs) == (_certain("abc"), _certain("xyz"))
    mailbox.put_nowait(EngineOutput(request_id="r", token_ids=(7,)))
    assert (await mailbox.take(lambda whole: whole)).logprobs == ()


# --- options


async def test_a_bad_option_is_refused_with_the_requests_id(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        with pytest.raises(RequestRejected) as caught:
            cluster.client.generate("hello", request_id="r", presence_penalty=3)
    assert str(caught.value) == (
        "request r: bad sampling option: presence_penalty must be a number from -2 to 2, not 3"
    )


def test_every_sampling_field_is_an_option_and_no_other() -> None:
    own = {"request_id", "engine", "cache_salt", "timeout", "priority", "tenant", "resume"}
    named = {attribute.name for attribute in fields(SamplingParams)}
    assert set(RequestOptions.__annotations__) == own | named


# --- cancellation


def test_stop_strings_and_choices_leave_nothing_behind_whenever_cancelled(
    make_config: Callable[..., Config],
) -> None:
    config = make_config("echo", "kv.block_size=4", "kv.num_blocks=8")

    async def scenario(mark: Mark) -> Cluster:
        async with open_cluster(config) as cluster:
            with mark.target():
                await cluster.client.complete_many("ab.cdef", n=3, stop=".c", max_tokens=9)
            await trio.testing.wait_all_tasks_blocked()
            check_idle(cluster)
        return cluster

    sweep(scenario, seeds=range(3), check=check_idle)
