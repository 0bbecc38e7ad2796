"""How requests end: deadlines, admission, retries, resumption, drain; and who is told what."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from dpkit.config.load import parse_config
from dpkit.errors import (
    ClusterClosed,
    DeadlineExceeded,
    DpkitError,
    Draining,
    EngineLost,
    Overloaded,
    RequestRejected,
)
from dpkit.messages import EngineId, EngineOutput, SamplingParams
from dpkit.names import Cause, Dtype, FinishReason
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.events import EventKind
from dpkit.testing.faults import CRASH, HANG, FaultyModel
from dpkit.testing.idle import check_idle
from dpkit.testing.tiny import tiny_checkpoint
from dpkit.testing.wrapper import named
from tests.clusters import told
from tests.nursery.lab import Lab, Timed, settle

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster


def _ends(cluster: Cluster) -> list[tuple[str | None, FinishReason | None, Cause | None]]:
    return [
        (event.request_id, event.reason, event.cause)
        for event in told(cluster, EventKind.REQUEST_ENDED)
    ]


# Deadlines: one for all of a request's life.


async def test_a_deadline_in_decode_keeps_what_came_and_frees_the_engine(
    autojump_clock: object,
) -> None:
    async with Lab([Timed()]).open() as cluster:
        with pytest.raises(DeadlineExceeded, match="passed after 3 tokens") as caught:
            async with cluster.client.generate("abcdefgh", timeout=0.35, request_id="r") as stream:
                await stream.read_all()
        assert trio.current_time() == 0.35
        assert (stream.text, stream.finish_reason) == ("abc", FinishReason.ERROR)
        assert (caught.value.request_id, caught.value.http_status) == ("r", 504)
        assert _ends(cluster) == [("r", FinishReason.ERROR, Cause.DEADLINE)]
        await settle()
        check_idle(cluster)


async def test_a_deadline_after_one_token_counts_it_alone(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        with pytest.raises(DeadlineExceeded, match="passed after 1 token; "):
            await cluster.client.complete("abcdefgh", timeout=0.15)
        await settle()
        check_idle(cluster)


async def test_a_deadline_in_prefill_ends_it_between_chunks(autojump_clock: object) -> None:
    lab = Lab([Timed()], scheduler="max_num_batched_tokens = 64")
    async with lab.open() as cluster:
        with pytest.raises(DeadlineExceeded, match="after 0 tokens"):
            await cluster.client.complete([1] * 200, timeout=0.15, max_tokens=3)
        await settle()
        await settle()
        assert len(lab.watched[0].steps) == 2
        check_idle(cluster)


async def test_a_deadline_in_the_queue_never_costs_a_step(autojump_clock: object) -> None:
    lab = Lab([Timed()], settings="admission = { max_inflight = 1 }")
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(cluster.client.complete, "abcdefgh")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded, match="after 0 tokens"):
            await cluster.client.complete("late", timeout=0.25, request_id="late")
        assert trio.current_time() == 0.25
        nursery.cancel_scope.cancel()
    assert not any("late" in rows for _, rows in lab.watched[0].steps)


async def test_a_deadline_that_passes_before_the_stream_is_entered_costs_nothing(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()])
    async with lab.open() as cluster:
        stream = cluster.client.generate("hello", timeout=1)
        await trio.sleep(2)
        with pytest.raises(DeadlineExceeded):
            await stream.__aenter__()
        await settle()
        assert lab.watched[0].steps == []
        check_idle(cluster)


async def test_a_retry_has_what_is_left_of_the_deadline(autojump_clock: object) -> None:
    lab = Lab([Timed()])  # it comes back after a second
    lab.faulty[0].plan = {0: CRASH}
    async with lab.open() as cluster:
        with pytest.raises(DeadlineExceeded):
            await cluster.client.complete("abcdefgh", timeout=1.35)
        assert trio.current_time() == 1.35
        assert cluster.client.statistics().retried == 1
        await settle()
        check_idle(cluster)


async def test_a_hung_engine_costs_a_request_with_a_deadline_no_more_than_that(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()])
    lab.faulty[0].plan = {0: HANG}
    async with lab.open() as cluster:
        with pytest.raises(DeadlineExceeded):
            await cluster.client.complete("abc", timeout=1)
        assert trio.current_time() == 1


# Admission.


async def test_what_has_room_needs_no_queue(autojump_clock: object) -> None:
    settings = "admission = { max_inflight = 2, max_queued = 0 }"
    async with Lab([Timed()], settings=settings).open() as cluster:
        client = cluster.client
        async with client.generate("hello"), client.generate("hello"):
            with pytest.raises(Overloaded) as caught:
                await client.complete("hello")
            assert caught.value.http_status == 429
        assert (await client.complete("hello")).text == "hello"


async def test_a_queue_timeout_is_told_apart_from_a_deadline(autojump_clock: object) -> None:
    settings = 'admission = { max_inflight = 1, queue_timeout = "300ms" }'
    async with Lab([Timed()], settings=settings).open() as cluster:
        client = cluster.client
        async with client.generate("abcdefgh"):
            with pytest.raises(Overloaded, match=r"no engine had room for 0\.3 s") as caught:
                await client.complete("hello", timeout=10, request_id="w")
            assert caught.value.retry_after > 0
            assert trio.current_time() == pytest.approx(0.3)
        assert client.statistics().queued == 0
        assert ("w", FinishReason.ERROR, Cause.OVERLOADED) in _ends(cluster)


async def test_lower_priorities_go_first_whenever_they_come(autojump_clock: object) -> None:
    order: list[str] = []
    settings = "admission = { max_inflight = 1 }"
    async with (
        Lab([Timed()], settings=settings).open() as cluster,
        trio.open_nursery() as nursery,
    ):

        async def ask(name: str, priority: int) -> None:
            async with cluster.client.generate("a", max_tokens=1, priority=priority) as stream:
                order.append(name)
                await stream.read_all()

        for name, priority in (("first", 5), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
            nursery.start_soon(ask, name, priority)
            await trio.testing.wait_all_tasks_blocked()
    assert order == ["first", "e", "c", "b", "d"]


async def test_tenants_share_by_tokens(autojump_clock: object) -> None:
    served: Counter[str] = Counter()
    lab = Lab([Timed()], settings="admission = { max_inflight = 1 }", blocks=2000)
    async with lab.open() as cluster, trio.open_nursery() as nursery:

        async def ask(tenant: str, prompt: int) -> None:
            async with cluster.client.generate(
                [1] * prompt, max_tokens=1, ignore_eos=True, tenant=tenant
            ) as stream:
                served[tenant] += prompt
                await stream.read_all()

        for _ in range(10):
            nursery.start_soon(ask, "large", 1000)
        for _ in range(400):
            nursery.start_soon(ask, "small", 100)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert abs(served["large"] - served["small"]) <= 1100, served


# Retries and resumption.


async def test_a_request_is_placed_anew_once_and_not_for_ever(autojump_clock: object) -> None:
    lab = Lab()
    lab.faulty[0].plan = lab.faulty[1].plan = {0: CRASH}
    async with lab.open() as cluster:
        with pytest.raises(EngineLost) as caught:
            await cluster.client.complete("hello", request_id="r")
        assert caught.value.request_id == "r"
        assert cluster.client.statistics().retried == 1
        assert _ends(cluster) == [("r", FinishReason.ERROR, Cause.ENGINE_LOST)]
        [retry] = told(cluster, EventKind.REQUEST_RETRIED)
        assert retry.request_id == "r"
        check_idle(cluster)


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_as_many_retries_as_the_config_says(autojump_clock: object, retries: int) -> None:
    lab = Lab(settings=f"admission = {{ retries = {retries} }}", supervision="intensity = 1000")
    for faulty in lab.faulty:
        faulty.always = CRASH
    async with lab.open() as cluster:
        with pytest.raises(EngineLost):
            await cluster.client.complete("hello")
        assert cluster.client.statistics().retried == retries
        assert sum(faulty.steps for faulty in lab.faulty) == retries + 1


async def test_who_leaves_while_waiting_for_a_second_place_is_released_once(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()])
    lab.faulty[0].plan = {0: CRASH}
    async with lab.open() as cluster:
        with trio.move_on_after(0.5):
            await cluster.client.complete("hello")
        assert cluster.client.statistics().queued == 0
        assert cluster.audit() == ()
        assert (await cluster.client.complete("hello")).text == "hello"
        check_idle(cluster)


async def test_a_retried_request_goes_before_those_that_wait(autojump_clock: object) -> None:
    order: list[str] = []
    lab = Lab([Timed()], settings="admission = { max_inflight = 1 }")
    lab.faulty[0].plan = {0: CRASH}
    async with lab.open() as cluster, trio.open_nursery() as nursery:

        async def ask(name: str) -> None:
            await cluster.client.complete("a", request_id=name)
            order.append(name)

        for name in "abc":
            nursery.start_soon(ask, name)
            await trio.testing.wait_all_tasks_blocked()
    assert order == ["a", "b", "c"]


@pytest.mark.parametrize("crash_at", range(1, 9))
async def test_a_resumed_text_is_the_undisturbed_one(autojump_clock: object, crash_at: int) -> None:
    lab = Lab()
    lab.faulty[0].plan = {crash_at: CRASH}
    async with lab.open() as cluster:
        stream = cluster.client.generate("abcdefgh", resume=True)
        async with stream:
            assert stream.engine.name == "e0-0"
            completion = await stream.read_all()
        assert completion.text == "abcdefgh"
        assert completion.engine.name == "e1-0"
        assert stream.token_ids[:-1] == list(b"abcdefgh")
        assert cluster.client.statistics().resumed == 1
        assert [event.kind for event in told(cluster, EventKind.REQUEST_RESUMED)] == [
            EventKind.REQUEST_RESUMED
        ]
        check_idle(cluster)


async def test_what_was_cached_is_what_the_first_engine_found(autojump_clock: object) -> None:
    lab = Lab()
    prompt = [7] * 33
    async with lab.open() as cluster:
        client, found = cluster.client, {"e0-0": 32, "e1-0": 16}
        for name, cached in found.items():
            begun = await client.complete(prompt[: cached + 1], max_tokens=1, engine=name)
            assert begun.cached_tokens == 0
        async with client.generate(prompt, max_tokens=8, resume=True) as stream:
            first = stream.engine.name
            lab.faulty[[*found].index(first)].plan = {3: CRASH}
            completion = await stream.read_all()
        assert completion.engine.name != first
        assert completion.cached_tokens == stream.cached_tokens == found[first]
        outputs: list[EngineOutput] = []
        submission = client.submit(
            prompt, max_tokens=2, engine=completion.engine.name, sink=outputs.append
        )
        await trio.sleep(10)
        assert submission.cached_tokens == 32
        assert [output.cached_tokens for output in outputs] == [32, None]


async def test_stop_strings_and_limits_hold_across_a_resumption(autojump_clock: object) -> None:
    for options, expected in (
        ({"stop": "def"}, ("abc", FinishReason.STOP)),
        ({"max_tokens": 6}, ("abcdef", FinishReason.LENGTH)),
    ):
        lab = Lab()
        lab.faulty[0].plan = {4: CRASH}  # after "abcd"
        async with lab.open() as cluster:
            many: dict[str, Any] = options
            completion = await cluster.client.complete("abcdefgh", resume=True, **many)
            assert (completion.text, completion.finish_reason) == expected
            assert cluster.client.statistics().resumed == 1


async def test_what_ends_by_a_stop_string_in_its_last_token_has_one_cause(
    autojump_clock: object,
) -> None:
    async with Lab([Timed()]).open() as cluster:
        completion = await cluster.client.complete(
            "abcdef", stop="cd", max_tokens=4, request_id="r"
        )
        assert (completion.text, completion.finish_reason) == ("ab", FinishReason.STOP)
        assert _ends(cluster) == [("r", FinishReason.STOP, Cause.STOP)]
        assert cluster.client.statistics().causes == {Cause.STOP: 1}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=7),
        SamplingParams(
            max_tokens=8, ignore_eos=True, temperature=0.8, seed=3, repetition_penalty=1.3
        ),
    ],
    ids=["greedy", "seeded", "penalised"],
)
async def test_real_weights_resume_to_the_same_text(sampling: SamplingParams) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    prompt = list(range(5, 25))
    with trio.fail_after(60):
        plain, crashed = [await _tokens(prompt, sampling, fails=fails) for fails in (False, True)]
    assert crashed == plain


async def _tokens(prompt: list[int], sampling: SamplingParams, *, fails: bool) -> list[int]:
    from dpkit.engine.models.torch.model import TorchModel  # noqa: PLC0415 - torch is optional

    weights = TorchModel(tiny_checkpoint(), dtype=Dtype.FLOAT32)
    model = FaultyModel(weights, {3: CRASH} if fails else {})
    with named(model) as name:
        config = parse_config(f"""
            [[engines]]
            model = "{name}"
            count = 2
            kv = {{ block_size = 4, num_blocks = 32 }}
        """)
        async with open_cluster(config) as cluster:
            async with cluster.client.generate(prompt, sampling, resume=True) as stream:
                await stream.read_all()
            assert cluster.client.statistics().resumed == fails
    return stream.token_ids


# One terminal event, and the same one wherever it is told.


async def test_every_end_is_told_once_and_alike_by_reader_events_and_statistics(
    autojump_clock: object,
) -> None:
    rng = random.Random(4)
    settings = 'admission = { max_inflight = 6, max_queued = 10, queue_timeout = "1s" }'
    lab = Lab([Timed()] * 3, settings=settings, supervision='backoff = "500ms", intensity = 1000')
    for faulty in lab.faulty:
        faulty.plan = dict.fromkeys(rng.sample(range(200), 12), CRASH)
    async with lab.open() as cluster:

        async def ask(number: int) -> None:
            await trio.sleep(number * 0.05)
            with trio.move_on_after(rng.choice((0.3, 1e9))):
                await lab.history.complete(
                    cluster.client,
                    f"{number:07}",
                    request_id=f"r{number}",
                    timeout=rng.choice((None, 0.7)),
                    resume=rng.random() < 0.5,
                    stop=rng.choice((None, "0")),
                    max_tokens=rng.choice((3, 10, 10_000)),
                )

        async with trio.open_nursery() as nursery:
            for number in range(150):
                nursery.start_soon(ask, number)
        await settle()
        lab.history.check(cluster)
        causes = Counter(cause for _, _, cause in _ends(cluster))
        assert causes == cluster.client.statistics().causes
        assert len(causes) >= 7, causes
        assert len({request_id for request_id, _, _ in _ends(cluster)}) == causes.total()


# Drain.


async def test_a_drain_finishes_what_is_there_and_refuses_what_comes(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()], settings="admission = { max_inflight = 1 }")
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        for _ in range(3):  # one runs, two wait: all are admitted
            nursery.start_soon(lab.history.complete, cluster.client, "hello")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cluster.drain)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Draining, match="takes no new requests") as caught:
            await cluster.client.complete("hello")
        assert caught.value.retry_after > 0
        assert caught.value.http_status == 503
    assert [entry.outcomes for entry in lab.history.entries] == [["stop"]] * 3
    lab.history.check(cluster)


async def test_at_the_deadline_of_a_drain_the_rest_is_told_and_let_go(
    autojump_clock: object,
) -> None:
    lab = Lab([Timed()])
    lab.faulty[0].plan = {2: HANG}
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(lab.history.complete, cluster.client, "hello")
        await trio.sleep(0.01)
        await cluster.drain(deadline=1.0)
        assert trio.current_time() == 1.0
    assert [entry.outcomes for entry in lab.history.entries] == [["Draining"]]
    assert {cause for _, _, cause in _ends(cluster)} == {Cause.DRAIN}
    lab.history.check(cluster)


async def test_what_a_drain_cuts_off_hears_after_how_much(autojump_clock: object) -> None:
    queued: list[EngineOutput] = []
    async with Lab([Timed()], settings="admission = { max_inflight = 1 }").open() as cluster:
        async with cluster.client.generate("abcdefgh", request_id="a") as stream:
            cluster.client.submit("never", request_id="b", sink=queued.append)
            await cluster.drain(trio.current_time() + 0.25)
            with pytest.raises(Draining) as caught:
                await stream.read_all()
        assert str(caught.value) == (
            "request a: it was cut off after 2 tokens, as the cluster drains and the time to "
            "finish was over; ask another cluster, or this one again when it is back"
        )
        assert caught.value.retry_after > 0
        assert stream.text == "ab"
        assert str(queued[-1].error).startswith("request b: it was cut off after 0 tokens, ")


async def test_what_is_under_way_when_the_cluster_is_left_hears_so(autojump_clock: object) -> None:
    got: list[EngineOutput] = []
    async with Lab([Timed()]).open() as cluster:
        cluster.client.submit("abcdefgh", request_id="a", sink=got.append)
        await trio.sleep(0.15)
    assert isinstance(got[-1].error, ClusterClosed)
    assert str(got[-1].error) == (
        "request a: it was cut off after 1 token, as the cluster was left; "
        "await what is under way inside its `async with` block"
    )


async def test_an_engine_lost_while_the_cluster_drains_still_hands_its_requests_on(
    autojump_clock: object,
) -> None:
    lab = Lab(scheduler="max_num_seqs = 1")
    lab.faulty[0].plan = {1: CRASH}
    async with lab.open() as cluster, trio.open_nursery() as nursery:
        for _ in range(4):  # two on each, of which one waits
            nursery.start_soon(lab.history.complete, cluster.client, "hello")
        await trio.testing.wait_all_tasks_blocked()
        await cluster.drain()
    outcomes = sorted(entry.outcomes[0] for entry in lab.history.entries)
    assert outcomes == ["EngineLost", "stop", "stop", "stop"]


# Refusals are typed, and tell whose fault it is.


async def test_every_refusal_has_its_type_status_and_request(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        for options, kind in (
            ({"engine": "nowhere"}, RequestRejected),
            ({"max_tokens": 10_000}, RequestRejected),
        ):
            many: dict[str, Any] = options
            with pytest.raises(kind) as caught:
                await cluster.client.complete("hello", request_id="r", **many)
            assert isinstance(caught.value, DpkitError)
            assert (caught.value.request_id, caught.value.http_status) == ("r", 400)
            assert not caught.value.retryable
        assert {cause for _, _, cause in _ends(cluster)} == {Cause.REFUSED}


async def test_the_engine_of_a_request_is_named_by_its_life(autojump_clock: object) -> None:
    lab = Lab([Timed()])
    lab.faulty[0].plan = {0: CRASH}
    async with lab.open() as cluster:
        assert (await cluster.client.complete("hello")).engine == EngineId("e0-0", 1)
