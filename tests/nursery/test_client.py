"""What a client's user may count on: one request, from its prompt to whatever ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.errors import ClusterClosed, ClusterFailed, EngineLost, InternalError, RequestRejected
from dpkit.messages import EngineId, EngineOutput, SamplingParams, StepResult
from dpkit.names import FinishReason
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config
    from dpkit.messages import Batch
    from dpkit.nursery.stream import OutputStream

STEP_S = 0.1


class Timed(EchoModel):
    """Each step lasts 100 ms."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=STEP_S)


class Crashing(Timed):
    """Its third step on a batch that holds the request "bomb" raises."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        for row in batch.rows:
            if row.request_id == "bomb" and row.output_index == 2:
                raise ValueError("boom")
        return super().execute(batch, cache)


@pytest.fixture
def timed(make_config: Callable[..., Config]) -> Config:
    return make_config(f"{__name__}:Timed")


@pytest.fixture
def crashing(make_config: Callable[..., Config]) -> Config:
    """Two engines, of which neither may fail, as the cluster needs both."""
    return make_config(f"{__name__}:Crashing", "supervision.intensity=0", "cluster.min_ready=2")


async def _read(stream: OutputStream) -> str:
    """All that is still to come."""
    return "".join([output.text async for output in stream])


async def _ask_and_sleep(config: Config, seen: list[Any]) -> None:
    """Leave in `seen` the cluster and the stream of a request that ends with a crash, unread."""
    async with open_cluster(config) as cluster:
        stream = cluster.client.generate("hello", request_id="bomb", engine="engine-0")
        seen += [cluster, stream]
        await stream.__aenter__()
        await trio.sleep_forever()


async def _settle() -> None:
    """Let every engine take its next step."""
    await trio.sleep(STEP_S)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_stream_gives_outputs_as_they_come(autojump_clock: object, timed: Config) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("hello", max_tokens=3) as stream:
            got = [
                (round(trio.current_time(), 6), output.text, output.finish_reason)
                async for output in stream
            ]
        assert got == [(0.1, "h", None), (0.2, "e", None), (0.3, "l", FinishReason.LENGTH)]
        assert stream.text == "hel"
        assert stream.token_ids == list(b"hel")
        await _settle()
        check_idle(cluster)


async def test_complete_gives_the_whole_with_its_times(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        completion = await cluster.client.complete("hello", request_id="r", engine="engine-1")
    assert completion.text == "hello"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.engine == EngineId("engine-1")
    assert completion.request_id == "r"
    assert completion.ttft_s == pytest.approx(0.1)
    assert completion.latency_s == pytest.approx(0.6), "five letters and the end"


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), tuple(b"hello")], ids=type)
async def test_a_prompt_is_text_or_tokens(
    autojump_clock: object, timed: Config, prompt: str | list[int]
) -> None:
    async with open_cluster(timed) as cluster:
        assert (await cluster.client.complete(prompt)).text == "hello"


async def test_a_chat_goes_through_the_models_template(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        stream = cluster.client.generate([{"role": "user", "content": "hello"}])
    assert bytes(stream.request.prompt_token_ids) == b"user: hello\nassistant: "


async def test_options_replace_fields_of_the_sampling(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        stream = cluster.client.generate(
            "hello",
            SamplingParams(max_tokens=5, top_k=7, seed=3),
            max_tokens=2,
            request_id="mine",
            cache_salt="salt",
        )
    assert stream.request.sampling == SamplingParams(max_tokens=2, top_k=7, seed=3)
    assert stream.request.request_id == "mine"
    assert stream.request.cache_salt == "salt"


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}], ids=repr
)
async def test_a_sampling_option_out_of_range_is_refused_at_once(
    autojump_clock: object, timed: Config, bad: dict[str, Any]
) -> None:
    async with open_cluster(timed) as cluster:
        with pytest.raises(RequestRejected, match=f"bad sampling option: .*{next(iter(bad))}"):
            cluster.client.generate("hello", **bad)


@pytest.mark.parametrize("sampling", [None, SamplingParams(top_k=3)])
@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "; did you mean 'temperature'?"), ("", "")]
)
async def test_an_unknown_option_is_a_type_error_that_names_it_and_the_nearest(
    name: str, near: str, sampling: SamplingParams | None, autojump_clock: object, timed: Config
) -> None:
    options: dict[str, Any] = {name: 1.0}
    async with open_cluster(timed) as cluster:
        with pytest.raises(TypeError) as caught:
            cluster.client.generate("hello", sampling, **options)
        assert str(caught.value) == f"there is no option {name!r} of a request{near}"


async def test_a_pin_goes_where_it_says_or_names_what_there_is(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        for name in ("engine-1", "engine-1", "engine-0"):
            assert (await cluster.client.complete("hi", engine=name)).engine.name == name
        with pytest.raises(RequestRejected, match="'engine-9', which does not exist; the engines"):
            await cluster.client.complete("hi", engine="engine-9")
        check_idle(cluster)


async def test_a_refusal_says_by_how_much(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    config = make_config(f"{__name__}:Timed", "kv.num_blocks=2", "kv.block_size=4")
    async with open_cluster(config) as cluster:
        with pytest.raises(RequestRejected, match="2 more than the KV cache's 8") as caught:
            await cluster.client.complete("hello", max_tokens=6)
        assert caught.value.request_id is not None
        assert trio.current_time() == 0
        check_idle(cluster)
        statistics = cluster.client.statistics()
        assert (statistics.started, statistics.finished, statistics.aborted) == (1, 1, 0)


async def test_an_id_in_flight_is_refused_and_may_come_back_afterwards(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("hello", request_id="r") as stream:
            with pytest.raises(RequestRejected, match="'r' is in flight already"):
                await cluster.client.complete("other", request_id="r")
            assert (await stream.__anext__()).text == "h", "the first is not disturbed"
        # Left unfinished, and asked again at once, before the engine has seen the abort.
        assert (await cluster.client.complete("again", request_id="r")).text == "again"
        await _settle()
        check_idle(cluster)


async def test_two_clients_may_use_one_id_one_after_the_other_only(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed, clients=2) as cluster:
        first, second = cluster.clients
        async with first.generate("hello", request_id="r", engine="engine-0") as stream:
            await stream.__anext__()
            async with second.generate("other", request_id="r", engine="engine-0") as refused:
                with pytest.raises(RequestRejected, match="'r' is in flight already"):
                    await refused.__anext__()
            async with second.generate("other", request_id="r", engine="engine-0") as waiting:
                # Leaving aborts the first client's request, not the second's queued one.
                stream.close()
                assert (await waiting.__anext__()).text == "o"
        await _settle()
        check_idle(cluster)


async def test_a_stream_may_be_read_by_another_task(autojump_clock: object, timed: Config) -> None:
    async with open_cluster(timed) as cluster:
        texts = []

        async def read(stream: OutputStream) -> None:
            texts.extend([output.text async for output in stream])

        async with cluster.client.generate("hello") as stream, trio.open_nursery() as nursery:
            nursery.start_soon(read, stream)
        assert "".join(texts) == "hello"


async def test_a_stream_closed_under_its_reader_lets_it_go(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("hello") as stream, trio.open_nursery() as nursery:

            @nursery.start_soon
            async def close() -> None:
                await trio.sleep(0.25)
                stream.close()
                stream.close()

            with pytest.raises(trio.ClosedResourceError):
                await _read(stream)
            assert trio.current_time() == 0.25
            assert stream.text == "he"
        assert cluster.client.statistics().aborted == 1
        await _settle()
        check_idle(cluster)


async def test_a_stream_must_be_entered_and_only_once(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        stream = cluster.client.generate("hello")
        with pytest.raises(RuntimeError, match="enter the stream with `async with`"):
            await stream.__anext__()
        with pytest.raises(RuntimeError, match="enter it with `async with`"):
            _ = stream.engine
        async with stream:
            with pytest.raises(InternalError, match="has not finished"):
                stream.completion()
            with pytest.raises(RuntimeError, match="was started already"):
                await stream.__aenter__()


async def test_a_finished_stream_ends_again_and_again(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster, cluster.client.generate("hi") as stream:
        for _ in range(2):
            assert [output async for output in stream] or stream.text == "hi"
    assert repr(stream) == f"<OutputStream {stream.request_id}: stop, 3 tokens>"


async def test_a_failed_stream_fails_again_and_again(autojump_clock: object, timed: Config) -> None:
    async with (
        open_cluster(timed) as cluster,
        cluster.client.generate("hello", stop_token_ids=[300]) as stream,
    ):
        with pytest.raises(RequestRejected) as first:
            await stream.read_all()
        for ask in (stream.read_all, stream.__anext__):
            with pytest.raises(RequestRejected) as again:
                await ask()
            assert again.value is first.value
        with pytest.raises(RequestRejected):
            stream.completion()


async def test_outputs_after_the_release_are_dropped_and_counted(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("hello", engine="engine-0") as stream:
            await stream.__anext__()
        output = EngineOutput(request_id=stream.request_id, token_ids=(1,))
        cluster._flights[0].deliver(EngineId("engine-0"), output)
        assert cluster.client.statistics().late_outputs == 1
        assert stream.text == "h"


async def test_a_step_under_way_gives_nothing_to_who_left_nor_to_who_reuses_the_id(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        async with cluster.client.generate("first", request_id="r", engine="engine-0") as stream:
            await stream.__anext__()
            await trio.sleep(STEP_S / 2)  # the next step is under way
        completion = await cluster.client.complete("second", request_id="r", engine="engine-0")
        assert completion.text == "second"
        assert stream.text == "f"
        assert cluster.client.statistics().late_outputs == 0
        check_idle(cluster)


async def test_outputs_of_another_life_never_reach_a_request(
    autojump_clock: object, timed: Config
) -> None:
    async with (
        open_cluster(timed) as cluster,
        cluster.client.generate("hi", request_id="r", engine="engine-0") as stream,
    ):
        late = EngineOutput(request_id="r", token_ids=(1,), finish_reason=FinishReason.LENGTH)
        cluster._flights[0].deliver(EngineId("engine-0", epoch=7), late)
        async for _ in stream:
            pass
        assert stream.text == "hi"
        assert cluster.client.statistics().late_outputs == 1


async def _finish_times(cluster: Cluster, slow_s: float) -> tuple[list[float], list[int]]:
    """When three neighbours finish beside a reader who sleeps, and what that one gets."""
    times, deltas = [], []
    started = trio.current_time()

    async def neighbour() -> None:
        completion = await cluster.client.complete("abcdefgh", engine="engine-0")
        assert completion.text == "abcdefgh"
        times.append(trio.current_time() - started)

    async with (
        cluster.client.generate("abcdefgh", engine="engine-0") as stream,
        trio.open_nursery() as nursery,
    ):
        await trio.sleep(STEP_S / 2)  # the neighbours come while its first step is under way
        for _ in range(3):
            nursery.start_soon(neighbour)
        async for output in stream:
            deltas.append(len(output.token_ids))
            await trio.sleep(slow_s)
        assert stream.completion().latency_s == pytest.approx(0.9), "its reading is its own affair"
    assert stream.text == "abcdefgh"
    return times, deltas


async def test_a_slow_reader_coalesces_and_delays_nobody(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        times, deltas = await _finish_times(cluster, 0)
        assert times == [pytest.approx(1.0)] * 3
        assert deltas == [1] * 9
        times, deltas = await _finish_times(cluster, 0.42)
        assert times == [pytest.approx(1.0)] * 3
        assert deltas == [1, 4, 4]


async def test_a_crash_ends_the_cluster_with_the_first_cause(
    autojump_clock: object, crashing: Config
) -> None:
    seen: list[Any] = []
    with pytest.raises(ClusterFailed, match=r"engine engine-0 failed: ValueError: boom") as caught:
        await _ask_and_sleep(crashing, seen)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__notes__ == ["in engine engine-0, step 3"]
    assert trio.current_time() == pytest.approx(0.2)
    _check_books(seen[0])


async def test_tokens_that_came_before_a_crash_are_read_with_its_error(
    autojump_clock: object, crashing: Config
) -> None:
    seen: list[Any] = []
    with pytest.raises(ClusterFailed):
        await _ask_and_sleep(crashing, seen)
    with pytest.raises(EngineLost):
        await _read(seen[1])
    assert seen[1].text == "he"
    assert seen[1].finish_reason is FinishReason.ERROR


async def _read_bomb(cluster: Cluster, seen: list[OutputStream]) -> None:
    async with cluster.client.generate("hello", request_id="bomb", engine="engine-0") as stream:
        seen.append(stream)
        await _read(stream)


async def test_what_was_read_before_a_crash_stays_readable(
    autojump_clock: object, crashing: Config
) -> None:
    seen: list[OutputStream] = []
    with pytest.raises(EngineLost, match="engine engine-0 was lost while it held") as caught:
        async with open_cluster(crashing) as cluster:
            await _read_bomb(cluster, seen)
    assert caught.value.engine == EngineId("engine-0")
    assert caught.value.request_id == "bomb"
    assert caught.value.retryable
    assert isinstance(caught.value.__cause__, ValueError)
    (stream,) = seen
    assert stream.text == "he"
    assert stream.finish_reason is FinishReason.ERROR


def _check_books(cluster: Cluster) -> None:
    """Of the clients only: an engine that died keeps whatever it had."""
    for client in cluster.clients:
        assert client.audit() == ()
        assert not client.statistics().inflight


async def test_when_an_engine_dies_no_request_hangs_wherever_it_is(
    autojump_clock: object, crashing: Config
) -> None:
    outcomes: list[str] = []

    async def ask(cluster: Cluster, number: int) -> None:
        try:
            await cluster.client.complete("hello", max_tokens=100, engine=f"engine-{number % 2}")
        except (EngineLost, ClusterClosed) as error:
            outcomes.append(type(error).__name__)

    async with trio.open_nursery() as outside:  # so that the body's cancellation does not reach it

        async def body(cluster: Cluster) -> None:
            for number in range(6):
                outside.start_soon(ask, cluster, number)
            await _read_bomb(cluster, [])

        with pytest.raises(EngineLost):
            async with open_cluster(crashing) as cluster:
                await body(cluster)
    assert sorted(outcomes) == ["ClusterClosed"] * 3 + ["EngineLost"] * 3
    _check_books(cluster)


async def test_a_request_after_the_end_says_so(autojump_clock: object, timed: Config) -> None:
    async with open_cluster(timed) as cluster:
        client = cluster.client
    with pytest.raises(ClusterClosed, match="make requests inside its `async with` block"):
        await client.complete("hello")
    assert client.statistics().started == 0


async def test_a_reader_outside_the_block_is_let_go_when_it_ends(
    autojump_clock: object, timed: Config
) -> None:
    async with trio.open_nursery() as outside:

        async def read(cluster: Cluster) -> None:
            with pytest.raises(ClusterClosed):
                await cluster.client.complete("hello", max_tokens=100)
            assert trio.current_time() == 0.25

        async with open_cluster(timed) as cluster:
            outside.start_soon(read, cluster)
            await trio.sleep(0.25)
    check_idle(cluster)
    assert cluster.client.statistics().aborted == 1


async def test_statistics_tell_what_became_of_every_request(
    autojump_clock: object, timed: Config
) -> None:
    async with open_cluster(timed) as cluster:
        await cluster.client.complete("hello")
        async with cluster.client.generate("hello", engine="engine-0") as stream:
            await stream.__anext__()
            now = cluster.client.statistics()
            assert now.inflight == {EngineId("engine-0"): 1}
            assert (now.started, now.finished, now.aborted) == (2, 1, 0)
            assert repr(cluster.client) == "<Client: 1 in flight, 0 queued>"
        now = cluster.client.statistics()
        assert now.inflight == {}
        assert (now.started, now.finished, now.aborted) == (2, 1, 1)


async def test_cost_presets_take_their_time(
    autojump_clock: object, make_config: Callable[..., Config]
) -> None:
    async with open_cluster(make_config("cost:h20-4b")) as cluster:
        completion = await cluster.client.complete([1] * 1000, max_tokens=11)
    cost = CostModel("h20-4b").cost
    decodes = [
        cost.seconds(decodes=1, prefill_tokens=0, decode_context=1000 + n, prefill_context=0)
        for n in range(1, 11)
    ]
    prefill = cost.seconds(
        decodes=0, prefill_tokens=1000, decode_context=0, prefill_context=500_000
    )
    assert completion.ttft_s == pytest.approx(prefill)
    assert completion.latency_s == pytest.approx(prefill + sum(decodes))
