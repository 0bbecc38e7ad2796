"""A request whose outputs go to a callable: what the sink gets, when, and how often."""

from __future__ import annotations

import functools
import gc
import logging
import random
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import evolve

from dpkit.engine.models.echo import EchoModel
from dpkit.errors import (
    ClusterClosed,
    DeadlineExceeded,
    Draining,
    EngineLost,
    Overloaded,
    RequestRejected,
)
from dpkit.messages import EngineId, EngineOutput
from dpkit.names import Cause, FinishReason
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH, HANG
from dpkit.testing.idle import check_idle
from tests.clusters import told
from tests.nursery.lab import STEP_S, Lab, Timed, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.messages import Batch, StepResult
    from dpkit.nursery.client import Client
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.submission import Submission

ONE_AT_ONCE = "admission = { max_inflight = 1 }"


def _last(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """The last of a whole request's outputs, and the only one that says so."""
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is not None
    return outputs[-1]


def _letters(outputs: Sequence[EngineOutput]) -> str:
    return bytes(t for output in outputs for t in output.token_ids if t < 256).decode()


def _ends(cluster: Cluster) -> list[tuple[str | None, FinishReason | None, Cause | None]]:
    ended = told(cluster, EventKind.REQUEST_ENDED)
    return [(event.request_id, event.reason, event.cause) for event in ended]


class Certain(EchoModel):
    """Tells logprobs, 100 ms a step."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return evolve(super().execute(batch, cache), duration_s=STEP_S)


class Teller:
    """A sink that takes the text of each output at once."""

    def __init__(self, client: Client, prompt: str, **options: Any) -> None:
        self.texts: list[str] = []
        self.last: EngineOutput | None = None
        self.submission = client.submit(prompt, sink=self, **options)

    def __call__(self, output: EngineOutput) -> None:
        self.texts.append(self.submission.take_text())
        if output.finish_reason is not None:
            self.last = output


# What comes.


async def test_a_sink_gets_each_output_when_it_comes(autojump_clock: object) -> None:
    got: list[tuple[float, tuple[int, ...], FinishReason | None]] = []

    def sink(output: EngineOutput) -> None:
        got.append((round(trio.current_time(), 6), output.token_ids, output.finish_reason))

    async with Lab([Timed()]).open() as cluster:
        submission = cluster.client.submit("hello", max_tokens=3, request_id="r", sink=sink)
        assert repr(submission) == "<Submission r: on e0-0>"
        assert submission.engine == EngineId("e0-0")
        await trio.sleep(1)
        assert repr(submission) == "<Submission r: length>"
        assert submission.finish_reason is FinishReason.LENGTH
        assert _ends(cluster) == [("r", FinishReason.LENGTH, Cause.LENGTH)]
        check_idle(cluster)
    assert got == [
        (0.1, (ord("h"),), None),
        (0.2, (ord("e"),), None),
        (0.3, (ord("l"),), FinishReason.LENGTH),
    ]


async def test_a_sink_costs_no_task_and_no_checkpoint(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        tasks = trio.lowlevel.current_statistics().tasks_living
        with trio.testing.assert_no_checkpoints():
            submission = cluster.client.submit("hello", sink=print)
            assert trio.lowlevel.current_statistics().tasks_living == tasks
            assert cluster.client.statistics().inflight == {EngineId("e0-0"): 1}
            submission.close()
            assert cluster.client.statistics().inflight == {}


async def test_logprobs_and_the_prompts_come_with_their_tokens(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab([Certain()]).open() as cluster:
        cluster.client.submit("abc", logprobs=0, prompt_logprobs=0, sink=got.append)
        await trio.sleep(1)
    assert [len(output.logprobs) for output in got] == [len(output.token_ids) for output in got]
    assert [each.token_id for each in got[0].prompt_logprobs] == list(b"bc")


async def test_one_sink_may_serve_many_requests(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab().open() as cluster:
        for name in ("abc", "defg"):
            cluster.client.submit(name, request_id=name, sink=got.append)
        await trio.sleep(1)
    for name in ("abc", "defg"):
        own = [output for output in got if output.request_id == name]
        assert _letters(own) == name
        assert _last(own).finish_reason is FinishReason.STOP


# Text.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"echo": True},
        {"stop": "lo"},
        {"stop": ["l", "ö."], "min_tokens": 3},
        {"stop": "never"},
        {"stop": "ö", "max_tokens": 9},
        {"stop": "or", "echo": True},
        {"max_tokens": 6},  # half of a character is left
        {"stop": "x", "max_tokens": 6},
    ],
    ids=str,
)
async def test_text_taken_by_a_sink_is_the_streams(
    autojump_clock: object, options: dict[str, Any]
) -> None:
    async with Lab([Timed()]).open() as cluster:
        async with cluster.client.generate("hello wörld", **options) as stream:
            texts = [output.text async for output in stream]
            steps = cluster.statistics().engines[0].core.steps
        await settle()
        before = cluster.statistics().engines[0].core.steps
        teller = Teller(cluster.client, "hello wörld", **options)
        await trio.sleep(3)
        assert teller.texts == texts
        assert teller.submission.finish_reason is stream.finish_reason
        assert teller.last is not None
        assert teller.last.finish_reason is stream.finish_reason
        assert cluster.statistics().engines[0].core.steps - before <= steps + 1
        assert teller.submission.take_text() == ""
        [(_, *one), (_, *other)] = _ends(cluster)
        assert one == other
        check_idle(cluster)


async def test_text_may_be_taken_later_or_not_at_all(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        submission = cluster.client.submit("hello wörld", sink=got.append)
        await trio.sleep(2.55 * STEP_S)
        assert submission.take_text() == "he"
        assert submission.take_text() == ""
        await trio.sleep(6 * STEP_S)  # in the middle of a character
        assert submission.take_text() == "llo w"
        await trio.sleep(1)
        assert submission.take_text() == "örld"
        assert submission.take_text() == ""
    assert _letters(got) == "hello wörld"


async def test_an_engine_does_not_run_past_a_stop_string(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        submission = cluster.client.submit("ab.cdefgh", stop=".", request_id="r", sink=got.append)
        await trio.sleep(5)
        assert cluster.statistics().engines[0].core.steps <= 4
        assert submission.take_text() == "ab"
        assert _last(got).finish_reason is FinishReason.STOP
        assert _ends(cluster) == [("r", FinishReason.STOP, Cause.STOP)]
        check_idle(cluster)


class Deaf(Timed):
    """Its tokenizer cannot decode an "x"."""

    def tokenizer(self) -> Any:
        tokenizer = super().tokenizer()
        make = tokenizer.decoder

        def decoder(prompt: Sequence[int] = ()) -> Any:
            made = make(prompt)
            feed = made.feed

            def checked(token_ids: Sequence[int]) -> str:
                if ord("x") in token_ids:
                    raise ValueError("no x, please")
                return feed(token_ids)

            made.feed = checked  # type: ignore[method-assign]
            return made

        tokenizer.decoder = decoder  # type: ignore[method-assign, assignment]
        return tokenizer


@pytest.mark.parametrize("stop", [None, "never"])
async def test_a_tokenizer_that_fails_ends_its_own_request(
    autojump_clock: object, stop: str | None
) -> None:
    async with Lab([Deaf()]).open() as cluster:
        bad = Teller(cluster.client, "abxcd", stop=stop)
        good = Teller(cluster.client, "abcd", stop=stop)
        await trio.sleep(1)
        assert "".join(good.texts) == "abcd"
        assert "".join(bad.texts) == "ab"
        statistics = cluster.client.statistics()
        if stop:  # on arrival: it is told as what ended the request
            assert bad.last is not None
            assert isinstance(bad.last.error, ValueError)
        else:  # when its text was asked for
            assert bad.last is None
            assert bad.submission.finish_reason is FinishReason.ERROR
            with pytest.raises(ValueError, match="no x, please"):
                bad.submission.take_text()
        assert statistics.causes == {Cause.REFUSED: 1, Cause.STOP: 1}
        assert statistics.sinks_failed == 0
        check_idle(cluster)


# Places.


async def test_who_finds_no_room_waits_and_is_served_in_turn(autojump_clock: object) -> None:
    got: dict[str, list[EngineOutput]] = {"a": [], "b": [], "c": []}
    async with Lab([Timed()], settings=ONE_AT_ONCE).open() as cluster:
        a, b, c = [
            cluster.client.submit("xy", request_id=name, sink=got[name].append) for name in got
        ]
        assert (repr(b), b.engine) == ("<Submission b: waiting>", None)
        assert cluster.client.statistics().queued == 2
        await trio.sleep(0.35)  # "xy" and its end
        assert a.finish_reason is FinishReason.STOP
        assert (b.engine, c.engine) == (EngineId("e0-0"), None)
        await trio.sleep(1)
        for outputs in got.values():
            assert _last(outputs).finish_reason is FinishReason.STOP
        assert [name for name, _, _ in _ends(cluster)] == ["a", "b", "c"]
        check_idle(cluster)


async def test_streams_and_submissions_share_a_queue(autojump_clock: object) -> None:
    order: list[str] = []

    def note(output: EngineOutput) -> None:
        if output.finish_reason is not None:
            order.append(output.request_id)

    async with (
        Lab([Timed()], settings=ONE_AT_ONCE).open() as cluster,
        trio.open_nursery() as nursery,
    ):

        async def read(name: str) -> None:
            await cluster.client.complete("a", request_id=name)
            order.append(name)

        for name in ("r1", "s1", "r2", "s2"):
            if name[0] == "r":
                nursery.start_soon(read, name)
                await trio.testing.wait_all_tasks_blocked()
            else:
                cluster.client.submit("a", request_id=name, sink=note)
        await trio.sleep(2)
    assert order == ["r1", "s1", "r2", "s2"]


async def test_a_queue_that_is_full_refuses_at_once_and_one_that_is_slow_tells_the_sink(
    autojump_clock: object,
) -> None:
    settings = 'admission = { max_inflight = 1, max_queued = 1, queue_timeout = "2s" }'
    got: list[EngineOutput] = []
    async with Lab([Timed()], settings=settings).open() as cluster:
        first = cluster.client.submit("long" * 10, sink=lambda _: None)
        cluster.client.submit("b", request_id="b", sink=got.append)
        with pytest.raises(Overloaded, match="1 request waits already"):
            cluster.client.submit("c", sink=got.append)
        await trio.sleep(2.5)
        assert isinstance(_last(got).error, Overloaded)
        assert got[0].finish_reason is FinishReason.ERROR
        first.close()
        assert cluster.client.statistics().causes == {Cause.OVERLOADED: 1, Cause.CLIENT: 1}


# Refusals.


async def test_what_is_refused_is_raised_by_submit_and_the_sink_is_not_called(
    autojump_clock: object,
) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        client = cluster.client
        submit = functools.partial(client.submit, "hello", sink=got.append)
        for options, message in (
            ({"temperature": -1}, "temperature"),
            ({"engine": "nowhere"}, "pinned to engine 'nowhere'"),
            ({"n": 2}, r"n = 2 asks for several completions, and submit\(\) gives one"),
            ({"timeout": 0}, "timeout"),
        ):
            wrong: dict[str, Any] = options
            with pytest.raises(RequestRejected, match=message):
                submit(**wrong)
        running = submit(request_id="r")
        with pytest.raises(RequestRejected, match="'r' is in flight already"):
            submit(request_id="r")
        running.close()
        cluster._flights[0].refuse(Draining)
        with pytest.raises(Draining):
            submit()
    with pytest.raises(ClusterClosed):
        submit()
    assert got == []
    assert cluster.client.audit() == ()


async def _wait_for(_output: EngineOutput) -> None:
    """No sink."""


class AsyncCall:
    """None either."""

    async def __call__(self, _output: EngineOutput) -> None:
        """Is never run."""


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (None, "sink must be a callable that takes an EngineOutput, not None"),
        ("x", "sink must be a callable that takes an EngineOutput, not 'x'"),
        (_wait_for, "sink must be a plain function, and .* is async: .*`generate`"),
        (AsyncCall(), "sink must be a plain function, and .* is async: .*`generate`"),
    ],
)
async def test_what_is_no_plain_callable_is_no_sink(
    autojump_clock: object, sink: Any, message: str
) -> None:
    async with Lab([Timed()]).open() as cluster:
        with pytest.raises(TypeError, match=message):
            cluster.client.submit("hello", sink=sink)
        assert cluster.client.statistics().started == 0


async def test_what_its_engine_refuses_is_told_to_the_sink(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        cluster.client.submit("hello", stop_token_ids=[300], request_id="r", sink=got.append)
        await settle()
        assert isinstance(_last(got).error, RequestRejected)
        assert _ends(cluster) == [("r", FinishReason.ERROR, Cause.REFUSED)]


# Ends.


async def test_a_deadline_is_told_wherever_the_request_is(autojump_clock: object) -> None:
    placed: list[EngineOutput] = []
    queued: list[EngineOutput] = []
    async with Lab([Timed()], settings=ONE_AT_ONCE).open() as cluster:
        cluster.client.submit("abcdefgh", timeout=0.25, sink=placed.append)
        cluster.client.submit("abcdefgh", timeout=0.15, sink=queued.append)
        await trio.sleep(1)
        assert _letters(placed) == "ab"
        assert _letters(queued) == ""
        for outputs in (placed, queued):
            assert _last(outputs).finish_reason is FinishReason.ERROR
            assert isinstance(outputs[-1].error, DeadlineExceeded)
        assert cluster.client.statistics().causes == {Cause.DEADLINE: 2}
        check_idle(cluster)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("crash_at", [0, 1, 4])
async def test_a_lost_engine_is_made_good_for_a_sink_as_for_a_stream(
    autojump_clock: object, crash_at: int, *, resume: bool
) -> None:
    got: list[EngineOutput] = []
    lab = Lab()
    lab.faulty[0].plan = {crash_at: CRASH}
    async with lab.open() as cluster:
        cluster.client.submit("abcdef", resume=resume, request_id="r", sink=got.append)
        await trio.sleep(2)
        statistics = cluster.client.statistics()
        if crash_at == 0 or resume:
            assert _letters(got) == "abcdef"
            assert _last(got).finish_reason is FinishReason.STOP
            assert (statistics.retried, statistics.resumed) == (crash_at == 0, crash_at > 0)
        else:
            assert _letters(got) == "abcdef"[:crash_at]
            assert isinstance(_last(got).error, EngineLost)
            assert _ends(cluster) == [("r", FinishReason.ERROR, Cause.ENGINE_LOST)]
        check_idle(cluster)


@pytest.mark.parametrize("stop", [None, "never"])
async def test_the_text_before_a_loss_is_not_lost(autojump_clock: object, stop: str | None) -> None:
    lab = Lab([Timed()])
    lab.faulty[0].plan = {3: CRASH}
    async with lab.open() as cluster:
        teller = Teller(cluster.client, "abnever", stop=stop)
        await trio.sleep(1)
    assert "".join(teller.texts) == "abn"


async def test_a_drain_waits_for_submissions_and_then_tells_them(autojump_clock: object) -> None:
    short: list[EngineOutput] = []
    hung: list[EngineOutput] = []
    lab = Lab()
    lab.faulty[1].plan = {2: HANG}
    async with lab.open() as cluster:
        cluster.client.submit("ab", engine="e0-0", sink=short.append)
        cluster.client.submit("abcdef", engine="e1-0", sink=hung.append)
        await cluster.drain(deadline=1.0)
        assert _last(short).finish_reason is FinishReason.STOP
        assert _last(hung).finish_reason is FinishReason.ABORT
        assert isinstance(hung[-1].error, Draining)
        assert _letters(hung) == "ab"
        assert cluster.client.statistics().causes == {Cause.STOP: 1, Cause.DRAIN: 1}


async def test_the_clusters_end_is_told_to_whoever_is_still_there(autojump_clock: object) -> None:
    got: dict[str, list[EngineOutput]] = {"placed": [], "queued": [], "closed": []}
    async with Lab([Timed()], settings=ONE_AT_ONCE).open() as cluster:
        submissions = [
            cluster.client.submit("hello", request_id=name, sink=outputs.append)
            for name, outputs in got.items()
        ]
        await trio.sleep(0.15)
        submissions[-1].close()
    for name in ("placed", "queued"):
        assert _last(got[name]).finish_reason is FinishReason.ABORT
        assert isinstance(got[name][-1].error, ClusterClosed)
    assert got["closed"] == []
    assert cluster.client.statistics().causes == {Cause.SHUTDOWN: 2, Cause.CLIENT: 1}
    for submission in submissions:
        submission.close()
    check_idle(cluster)


# Closing.


@pytest.mark.parametrize("when", range(5))
async def test_nothing_comes_after_close(autojump_clock: object, when: int) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        submission = cluster.client.submit("abc", request_id="r", sink=got.append)
        await trio.sleep((when + 0.5) * STEP_S)
        before = list(got)
        submission.close()
        submission.close()
        assert cluster.client.statistics().inflight == {}
        assert sum(cluster.client.statistics().causes.values()) == 1
        await settle()
        assert got == before
        assert repr(submission) == f"<Submission r: {'stop' if when == 4 else 'closed'}>"
        check_idle(cluster)


async def test_closing_leaves_the_queue_to_others(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()], settings=ONE_AT_ONCE).open() as cluster:
        first = cluster.client.submit("long" * 10, sink=got.append)
        second = cluster.client.submit("long" * 10, sink=got.append)
        third = cluster.client.submit("long" * 10, sink=got.append)
        second.close()
        first.close()
        assert third.engine == EngineId("e0-0")
        assert cluster.client.statistics().queued == 0
        third.close()
        await settle()
        check_idle(cluster)
    assert got == []


async def test_closing_an_old_submission_leaves_a_new_one_of_the_same_id_alone(
    autojump_clock: object,
) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        old = cluster.client.submit("hello", request_id="r", sink=got.append)
        await trio.sleep(0.15)
        old.close()
        got.clear()
        cluster.client.submit("world", request_id="r", sink=got.append)
        old.close()
        await trio.sleep(1)
    assert _letters(got) == "world"
    assert _last(got).finish_reason is FinishReason.STOP


async def test_what_has_ended_holds_nobodys_sink(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        teller = Teller(cluster.client, "ab", stop="never")
        submission = teller.submission
        gone = weakref.ref(teller)
        del teller
        await trio.sleep(1)
        gc.collect()
        assert gone() is None
        assert submission.finish_reason is FinishReason.STOP


# A sink that fails.


class Boom(BaseException):
    """Of nobody's kin."""


@pytest.mark.parametrize("error", [ValueError, SystemExit, Boom, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(4))
async def test_a_sink_that_raises_at_any_call_ends_its_own_request_alone(
    autojump_clock: object,
    caplog: pytest.LogCaptureFixture,
    call: int,
    error: type[BaseException],
) -> None:
    got: list[EngineOutput] = []
    good: list[EngineOutput] = []

    def sink(output: EngineOutput) -> None:
        got.append(output)
        if len(got) == call + 1:
            raise error("what it says")

    async with Lab([Timed()]).open() as cluster:
        with caplog.at_level(logging.ERROR):
            submission = cluster.client.submit("abc", request_id="bad", sink=sink)
            cluster.client.submit("abc", sink=good.append)
            await trio.sleep(1)
        assert len(got) == call + 1
        assert _letters(good) == "abc"
        assert _last(good).finish_reason is FinishReason.STOP
        statistics = cluster.client.statistics()
        own = Cause.STOP if call == 3 else Cause.CLIENT
        assert statistics.causes == ({Cause.STOP: 2} if call == 3 else {own: 1, Cause.STOP: 1})
        assert statistics.sinks_failed == 1
        assert statistics.late_outputs == 0
        [event] = told(cluster, EventKind.SINK_FAILED)
        assert event.request_id == "bad"
        assert event.detail == f"{error.__name__}: what it says"
        [record] = caplog.records
        assert "request bad: its sink raised" in record.getMessage()
        assert record.exc_info is not None
        submission.close()
        check_idle(cluster)


@pytest.mark.parametrize("how", ["deadline", "lost", "drain", "shutdown", "queue"])
async def test_a_sink_that_raises_when_it_is_told_of_a_failure_harms_nobody(
    autojump_clock: object, how: str
) -> None:
    good: list[EngineOutput] = []

    def sink(output: EngineOutput) -> None:
        if output.finish_reason is not None:
            raise ValueError(how)

    lab = Lab(settings='admission = { retries = 0, queue_timeout = "1s", max_inflight = 4 }')
    lab.faulty[0].plan = {2: CRASH} if how == "lost" else {}
    async with lab.open() as cluster:
        submit = functools.partial(cluster.client.submit, sink=sink)
        for _ in range(3):
            submit("abcdef", engine="e0-0", timeout=0.25 if how == "deadline" else None)
        cluster.client.submit("abcdefghijkl", engine="e1-0", sink=good.append)
        if how == "queue":
            submit("abcdef", max_tokens=3)
        await trio.sleep(0.35)
        if how == "drain":
            await cluster.drain(deadline=trio.current_time())
        elif how != "shutdown":
            await trio.sleep(2)
            assert _letters(good) == "abcdefghijkl"
    assert _last(good).finish_reason is not None
    assert cluster.client.statistics().sinks_failed >= 3
    assert sum(cluster.client.statistics().causes.values()) == 4 + (how == "queue")
    check_idle(cluster)


# A sink that calls back.


@pytest.mark.parametrize("call", range(4))
async def test_a_sink_may_close_its_own_submission(autojump_clock: object, call: int) -> None:
    got: list[EngineOutput] = []
    made: list[Submission] = []

    def sink(output: EngineOutput) -> None:
        got.append(output)
        if len(got) == call + 1:
            made[0].close()
            made[0].close()

    async with Lab([Timed()]).open() as cluster:
        made.append(cluster.client.submit("abc", sink=sink))
        await trio.sleep(1)
        assert len(got) == call + 1
        statistics = cluster.client.statistics()
        assert statistics.causes == {Cause.STOP if call == 3 else Cause.CLIENT: 1}
        assert statistics.sinks_failed == statistics.late_outputs == 0
        check_idle(cluster)


@pytest.mark.parametrize("call", range(4))
async def test_a_sink_may_close_others_that_the_same_step_serves(
    autojump_clock: object, call: int
) -> None:
    got: dict[str, list[EngineOutput]] = {"a": [], "b": [], "c": []}
    made: dict[str, Submission] = {}

    def sink(output: EngineOutput) -> None:
        got[output.request_id].append(output)
        if output.request_id == "b" and len(got["b"]) == call + 1:
            made["a"].close()
            made["c"].close()

    async with Lab([Timed()]).open() as cluster:
        for name in got:
            made[name] = cluster.client.submit("abc", request_id=name, sink=sink)
        await trio.sleep(1)
        assert _letters(got["b"]) == "abc"
        assert _last(got["b"]).finish_reason is FinishReason.STOP
        assert (len(got["a"]), len(got["c"])) == (call + 1, call)
        expected = {Cause.STOP: 2, Cause.CLIENT: 1} if call == 3 else None
        if expected is not None:
            assert cluster.client.statistics().causes == expected
        check_idle(cluster)


async def test_the_last_call_finds_the_place_of_its_request_free(autojump_clock: object) -> None:
    """A chain: each request is asked for when the one before it has ended, with room for one."""
    said: list[str] = []
    inflight: list[int] = []

    async with Lab(
        [Timed()], settings="admission = { max_inflight = 1, max_queued = 0 }"
    ).open() as (cluster):

        def sink(output: EngineOutput) -> None:
            said.append(_letters([output]))
            if output.finish_reason is not None and len(inflight) < 5:
                inflight.append(sum(cluster.client.statistics().inflight.values()))
                cluster.client.submit("ab", request_id="same", sink=sink)

        cluster.client.submit("ab", request_id="same", sink=sink)
        await trio.sleep(3)
        assert cluster.client.statistics().causes == {Cause.STOP: 6}
        check_idle(cluster)
    assert "".join(said) == "ab" * 6
    assert inflight == [0] * 5


async def test_many_that_fail_at_once_may_all_ask_again(autojump_clock: object) -> None:
    """However many are told at once, nobody's call is nested in everybody's."""
    many, again = 600, 0
    settings = f"admission = {{ max_inflight = 1, max_queued = {2 * many} }}"
    async with Lab([Timed()], settings=settings, blocks=1000).open() as cluster:

        def ask_again(output: EngineOutput) -> None:
            nonlocal again
            if isinstance(output.error, DeadlineExceeded):
                again += 1
                cluster.client.submit("a", timeout=0.2, sink=lambda _: None)

        blocker = cluster.client.submit("long" * 100, sink=lambda _: None)
        for _ in range(many):
            cluster.client.submit("a", timeout=1.0, sink=ask_again)
        # All are late before the timer has had its turn, and a place becomes free.
        trio.lowlevel.current_clock().jump(1.5)  # type: ignore[attr-defined]
        blocker.close()
        await trio.sleep(1)
        assert again == many
        assert cluster.client.statistics().sinks_failed == 0
        assert cluster.client.audit() == ()


async def test_a_sink_may_ask_again_when_its_engine_is_lost(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    lab = Lab()
    lab.faulty[0].plan = {2: CRASH}
    async with lab.open() as cluster:

        def sink(output: EngineOutput) -> None:
            got.append(output)
            if output.error is not None:
                cluster.client.submit("abcdef", sink=sink)

        cluster.client.submit("abcdef", engine="e0-0", sink=sink)
        await trio.sleep(2)
        check_idle(cluster)
    assert _letters(got) == "ab" + "abcdef"


@pytest.mark.parametrize(
    "probe_ends", ["by a token", "by its last token", "by an empty answer", "by being closed"]
)
async def test_who_is_told_because_another_ends_may_close_that_other(
    autojump_clock: object, probe_ends: str
) -> None:
    """A probe that ends lets another be placed, which is too late: its sink closes the probe's."""
    got: list[EngineOutput] = []
    lab = Lab([Timed()])
    async with lab.open() as cluster:
        lab.faulty[0].inject(CRASH)
        with pytest.raises(EngineLost):
            await cluster.client.complete("a", engine="e0-0")
        await trio.sleep(1.1)  # it is back, on probation
        probe = cluster.client.submit("hello", sink=got.append)
        assert probe.engine == EngineId("e0-0", 1)
        late = cluster.client.submit("hello", timeout=0.01, sink=lambda _: probe.close())
        assert late.engine is None
        trio.lowlevel.current_clock().jump(1)  # type: ignore[attr-defined]
        if probe_ends == "by being closed":
            probe.close()
        else:
            reason = None if "a token" in probe_ends else FinishReason.LENGTH
            told = (104,) if "token" in probe_ends else ()
            output = EngineOutput(request_id=probe.request_id, token_ids=told, finish_reason=reason)
            cluster._flights[0].deliver(EngineId("e0-0", 1), output)
        assert late.finish_reason is FinishReason.ERROR
        assert len(got) == ("token" in probe_ends), "its own, which came before"
        # What the test has the engine say last, it has not said: it goes on with that.
        has_ended = probe_ends in {"by its last token", "by an empty answer"}
        assert cluster.audit() == () or has_ended
        ended = Cause.LENGTH if has_ended else Cause.CLIENT
        causes = {Cause.ENGINE_LOST: 1, Cause.DEADLINE: 1, ended: 1}
        assert cluster.client.statistics().causes == causes
        await trio.sleep(10)
        check_idle(cluster)


# All of it together.


@pytest.mark.parametrize("seed", range(5))
async def test_every_end_is_told_once_and_alike_by_sinks_events_and_statistics(
    autojump_clock: object, seed: int
) -> None:
    rng = random.Random(seed)
    settings = 'admission = { max_inflight = 6, max_queued = 10, queue_timeout = "1s" }'
    lab = Lab([Timed()] * 3, settings=settings, supervision='backoff = "500ms", intensity = 1000')
    for faulty in lab.faulty:
        faulty.plan = dict.fromkeys(rng.sample(range(200), 12), CRASH)
    made: dict[str, Submission] = {}

    async with lab.open() as cluster:
        for number in range(150):
            await trio.sleep(0.05)
            name = f"r{number}"
            options: dict[str, Any] = {
                "request_id": name,
                "timeout": rng.choice((None, 0.7)),
                "resume": rng.random() < 0.5,
                "stop": rng.choice((None, "0")),
                "max_tokens": rng.choice((3, 10, 10_000)),
            }
            entry = lab.history.ask(name, resumes=options["resume"])
            leaves_at = rng.choice((1, 2, 5, 100, 100, 100))

            def sink(
                output: EngineOutput,
                entry: Any = entry,
                left: list[int] = [leaves_at],  # noqa: B006
            ) -> None:
                entry.delivered(output.token_ids)
                if output.finish_reason is not None:
                    failed = type(output.error).__name__ if output.error else None
                    entry.ended(failed or str(output.finish_reason))
                    return
                left[0] -= 1
                if left[0] == 0:
                    entry.ended("left")
                    if entry.number % 2:
                        raise ValueError("enough")
                    made[entry.request_id].close()

            try:
                made[name] = cluster.client.submit(f"{number:07}", sink=sink, **options)
            except (Overloaded, RequestRejected) as error:
                entry.ended(type(error).__name__)
        await trio.sleep(20)
        lab.history.check(cluster)
        causes = cluster.client.statistics().causes
        assert len(causes) >= 6, causes
        assert cluster.client.statistics().sinks_failed > 5


def _nothing(_output: EngineOutput) -> None:
    """Do nothing."""


async def test_statistics_and_audit_know_submissions(autojump_clock: object) -> None:
    submit: Callable[..., Submission]
    async with Lab([Timed()], settings=ONE_AT_ONCE).open() as cluster:
        submit = functools.partial(cluster.client.submit, "hello", sink=_nothing)
        made = [submit(request_id="a"), submit(request_id="b")]
        await trio.sleep(0.25)
        [a, b] = cluster.client.statistics().requests
        assert (a.request_id, a.output_tokens, b.engine) == ("a", 2, None)
        assert cluster.audit() == ()
        for submission in made:
            submission.close()
        await settle()
        assert cluster.audit() == ()
