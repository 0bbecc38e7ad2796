"""What ends the life of an engine that joined, what does not, and what becomes of its requests."""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq

from dpkit.errors import DpkitError, EngineLost, RequestRejected, TryLater
from dpkit.names import Cause, EngineState
from dpkit.nursery.events import EventKind
from dpkit.nursery.services import open_services
from dpkit.wire.codec import COORDINATOR_READY, ENGINE_DEAD, encode_envelope
from dpkit.wire.structs import (
    Envelope,
    FinishCode,
    RequestError,
    SchedulerStats,
    WireOutput,
)
from tests.clusters import is_idle, slot_of, told
from tests.joined.lab import (
    free_address,
    group,
    life_of,
    open_joined,
    open_living,
    open_puppet,
    serves,
)
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.stream import OutputStream
    from tests.joined.lab import Puppet

SECOND = '[[engines]]\nname = "l"\nmodel = "echo"\n'
QUICK = 'dead_after = "200ms", abort_timeout = "200ms", join_timeout = "10s"'


@asynccontextmanager
async def open_pair(vllm: str = QUICK, settings: str = "") -> AsyncIterator[tuple[Cluster, Puppet]]:
    """A cluster of one engine that joined and obeys, and a local one to go on with."""
    address = free_address()
    async with (
        open_puppet(address) as puppet,
        open_living(puppet),
        open_joined(group(address, vllm=vllm), SECOND, settings=settings) as cluster,
    ):
        yield cluster, puppet


def address_of(cluster: Cluster) -> str:
    """Where its engines join."""
    return str(cluster.config.engines[0].vllm.handshake)


@asynccontextmanager
async def open_stream(
    cluster: Cluster, puppet: Puppet, **options: Any
) -> AsyncIterator[tuple[OutputStream, str]]:
    """A request that has got its first token from the puppet, and its id on the wire."""
    puppet.begins = True
    async with cluster.client.generate("?", engine="v-0", **options) as stream:
        await stream.__anext__()
        puppet.begins = False
        yield stream, puppet.requests[-1].request_id


def garbage(puppet: Puppet, _: str) -> None:
    puppet.say_frames([b"\xc1 is no MessagePack"])


def wave(puppet: Puppet, _: str) -> None:
    puppet.say_frames(encode_envelope(Envelope(0, wave_complete=1)))


def negative(puppet: Puppet, wire_id: str) -> None:
    puppet.say_frames(encode_envelope(Envelope(0, [WireOutput(wire_id, (-1,))])))


def dead(puppet: Puppet, _: str) -> None:
    puppet.die()


def gone(puppet: Puppet, _: str) -> None:
    puppet.leave()


def anew(puppet: Puppet, _: str) -> None:
    puppet.introduce()


def oversized(puppet: Puppet, _: str) -> None:
    puppet.say_frames([bytes(2**17)])


def terminated(puppet: Puppet, wire_id: str) -> None:
    """As vLLM's engines end at SIGTERM."""
    last = WireOutput(wire_id, (), finish_reason=FinishCode.ABORT)
    puppet.say(last, finished=[wire_id])


def mute(puppet: Puppet, _: str) -> None:
    puppet.answers = False


ENDS: dict[Callable[[Puppet, str], None], str] = {
    garbage: "WireError: cannot read an output",
    wave: "WireError: engine v-0 spoke of waves to a client",
    negative: "WireError: cannot read an output",
    dead: "EngineLost: engine v-0 met an error",
    gone: "WireError: engine v-0 dropped its connection",
    anew: "WireError: engine v-0 broke the protocol: it is ready, and introduces itself anew",
    oversized: "WireError: engine v-0 dropped its connection, or was dropped for a message of more",
    terminated: "EngineLost: engine v-0 is shutting down, by no order from here",
    mute: "EngineLost: engine v-0 is silent: it has not answered to is_scheduler_paused within 0.2",
}


@pytest.mark.parametrize("end", ENDS)
async def test_what_ends_a_life_loses_its_requests_and_no_others(
    end: Callable[[Puppet, str], None],
) -> None:
    async with open_pair(QUICK + ', max_message = "64KiB"') as (cluster, puppet):
        with pytest.raises(EngineLost, match=r"engine v-0 was lost (while it held|to) request"):
            async with open_stream(cluster, puppet) as (stream, wire_id):
                end(puppet, wire_id)
                assert (await cluster.client.complete("on the other one")).text
                await stream.read_all()
        assert stream.text == "A"
        [lost] = told(cluster, EventKind.ENGINE_LOST)
        assert lost.detail.startswith(ENDS[end])
        assert slot_of(cluster, "v-0").state is EngineState.STARTING
        assert cluster.client.statistics().causes == {Cause.STOP: 1, Cause.ENGINE_LOST: 1}


async def test_E05_an_engine_that_hangs_is_found_out_without_any_request() -> None:
    async with open_pair() as (cluster, puppet):
        puppet.answers = False
        since = trio.current_time()
        await until(lambda: told(cluster, EventKind.ENGINE_LOST))
        assert told(cluster, EventKind.ENGINE_LOST)[0].at - since >= 0.2
        assert not serves(cluster, "v-0")


async def test_E03_one_that_speaks_and_does_not_listen_is_lost_too() -> None:
    """As vLLM's engines are whose input thread has died."""
    async with open_pair() as (cluster, puppet):
        with pytest.raises(EngineLost, match="is silent"):
            async with open_stream(cluster, puppet) as (stream, wire_id):
                puppet.answers = False
                while True:
                    puppet.token(wire_id, 65)
                    await stream.__anext__()
                    await trio.sleep(0.01)


async def test_one_that_answers_in_time_is_left_alone() -> None:
    async with open_pair() as (cluster, puppet):
        puppet.answers = False
        await trio.sleep(0.15)
        puppet.answers = True
        life = life_of(cluster, "v-0")
        await until(lambda: "is_scheduler_paused" in puppet.calls)
        puppet.answer(life._connection._question, "is_scheduler_paused")  # type: ignore[union-attr]
        await trio.sleep(0.3)
        assert serves(cluster, "v-0")
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_what_was_not_answered_goes_elsewhere() -> None:
    async with open_pair() as (cluster, puppet):
        async with open_services(grace=1) as services:

            async def die() -> None:
                await puppet.wait_for_request()
                puppet.die()

            services.start_soon(die)
            completion = await cluster.client.complete("hello")
        assert completion.text == "hello"
        assert completion.engine.name == "l-0"
        assert cluster.client.statistics().retried == 1


async def test_a_life_that_is_lost_has_its_requests_aborted_if_there_is_still_somebody() -> None:
    """Who says what cannot be read may compute on, for nobody."""
    async with open_pair() as (cluster, puppet):
        with pytest.raises(EngineLost):
            async with open_stream(cluster, puppet) as (stream, wire_id):
                garbage(puppet, wire_id)
                await stream.read_all()
        await until(lambda: wire_id in puppet.aborted)


async def test_the_rank_comes_back_and_late_frames_of_its_former_life_reach_nobody() -> None:
    async with (
        open_pair() as (cluster, puppet),
        open_puppet(address_of(cluster)) as again,
    ):
        with pytest.raises(EngineLost):
            async with open_stream(cluster, puppet, request_id="r") as (stream, wire_id):
                puppet.input.close()
                await stream.read_all()
        async with open_living(again):
            await until(lambda: serves(cluster, "v-0", 1))
            assert not {*puppet.addresses[0].inputs} & {*again.addresses[0].inputs}
            assert not {*puppet.addresses[0].outputs} & {*again.addresses[0].outputs}
            async with open_stream(cluster, again, request_id="r") as (stream, second_id):
                # By the old socket, and by a new one to the old address: nobody is there.
                puppet.token(wire_id, 66)
                puppet.token(second_id, 66)
                late = await puppet.open(zmq.PUSH, puppet.addresses[0].outputs[0])
                late.send_nowait(encode_envelope(Envelope(0, [WireOutput(second_id, (66,))])))
                await trio.sleep(0.05)
                again.finish(second_id, 67)
                await stream.read_all()
            assert stream.text == "AC"
            assert len(told(cluster, EventKind.ENGINE_LOST)) == 1


async def test_a_rank_that_is_back_before_its_end_is_known_is_served_as_soon_as_it_is() -> None:
    """Its HELLO waits; a network that says nothing of the loss costs `dead_after`, and no more."""
    async with (
        open_pair() as (cluster, puppet),
        open_puppet(address_of(cluster)) as again,
        open_living(again),
    ):
        await trio.sleep(0.05)
        assert not again.addresses, "the former serves"
        puppet.answers = False
        await until(lambda: serves(cluster, "v-0", 1))
        assert again.addresses


async def test_N09_engines_that_all_went_and_come_back_are_all_served() -> None:
    address, ranks = free_address(), range(8)
    async with AsyncExitStack() as stack:
        first = [await stack.enter_async_context(open_puppet(address, rank)) for rank in ranks]
        await stack.enter_async_context(open_living(*first))
        config = group(address, count=len(ranks))
        cluster = await stack.enter_async_context(open_joined(config, SECOND))
        for puppet in first:
            puppet.leave()
        await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == len(ranks))
        assert (await cluster.client.complete("hello")).text == "hello"
        again = [await stack.enter_async_context(open_puppet(address, rank)) for rank in ranks]
        async with open_living(*reversed(again)):
            await until(lambda: all(serves(cluster, f"v-{rank}", 1) for rank in ranks))


async def test_E10_a_rank_may_come_back_as_often_as_it_likes() -> None:
    """More often than `intensity` says of other engines: to restart one is to wait for it."""
    async with open_pair() as (cluster, puppet):
        puppet.die()
        for epoch in range(1, 10):
            async with open_puppet(address_of(cluster)) as again, open_living(again):
                await until(lambda epoch=epoch: serves(cluster, "v-0", epoch))  # type: ignore[misc]
                again.die()
        await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == 10)
        assert slot_of(cluster, "v-0").state is EngineState.STARTING


# Aborts, and what an engine may forget.


async def test_D01_an_abort_reaches_the_engine_and_is_acknowledged() -> None:
    async with open_pair() as (cluster, puppet):
        async with open_stream(cluster, puppet) as (_, wire_id):
            pass
        await until(lambda: puppet.aborted == [wire_id])
        await until(lambda: life_of(cluster, "v-0")._connection.is_idle)  # type: ignore[union-attr]
        assert cluster.statistics().engines[0].totals.requests == 1


async def test_a_forgotten_abort_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair() as (cluster, puppet):
        puppet.acknowledges = False
        connection = life_of(cluster, "v-0")._connection
        assert connection is not None
        for _ in range(3):
            async with open_stream(cluster, puppet):
                pass
        assert cluster.client.statistics().inflight == {}
        assert not connection.is_idle, "the engine may still be at it"
        await until(lambda: connection.is_idle)
        assert connection.unacknowledged == 3  # type: ignore[attr-defined]
        assert caplog.text.count("engines.vllm.abort_timeout") == 1
        # And when it remembers after all:
        puppet.say(finished=puppet.aborted)
        puppet.token(puppet.aborted[0], 65, running=0)
        async with open_stream(cluster, puppet) as (stream, wire_id):
            puppet.finish(wire_id)
            await stream.read_all()
        assert serves(cluster, "v-0")


async def test_an_engine_that_forgets_an_abort_keeps_nobody_from_leaving() -> None:
    with trio.fail_after(5):
        async with open_pair() as (cluster, puppet):
            puppet.acknowledges = False
            async with open_stream(cluster, puppet):
                pass
            await cluster.drain()


async def test_outputs_after_an_abort_reach_nobody() -> None:
    async with open_pair() as (cluster, puppet):
        puppet.acknowledges = False
        async with open_stream(cluster, puppet, request_id="r") as (_, wire_id):
            pass
        puppet.token(wire_id, 66)
        puppet.finish(wire_id, 67)
        async with open_stream(cluster, puppet, request_id="r") as (stream, second_id):
            assert second_id != wire_id
            puppet.finish(second_id, 68)
            await stream.read_all()
        assert stream.text == "AD"


async def test_H12_an_engine_may_tell_of_requests_that_it_does_not_have() -> None:
    async with open_pair() as (cluster, puppet):
        puppet.token("nobody's", 65)
        puppet.say(finished=["nobody's either"])
        async with open_stream(cluster, puppet) as (stream, wire_id):
            puppet.finish(wire_id)
            puppet.finish(wire_id)
            await stream.read_all()
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_a_request_that_is_dropped_without_a_word_goes_elsewhere_alone() -> None:
    async with open_pair() as (cluster, puppet):
        async with (
            open_stream(cluster, puppet) as (stream, wire_id),
            open_services(grace=1) as more,
        ):

            async def drop() -> None:
                dropped = await puppet.wait_for_request(2)
                puppet.say(finished=[dropped.request_id])

            more.start_soon(drop)
            await cluster.client.complete("to the other one", engine="l-0")
            second = await cluster.client.complete("hello", max_tokens=9)
            puppet.finish(wire_id)
            await stream.read_all()
        assert second.text == "hello"
        assert serves(cluster, "v-0")


async def test_F04_an_engine_that_drains_finishes_what_it_has_and_gets_nothing_new() -> None:
    """As vLLM's does when it is terminated and has time: it refuses by ending what is new."""
    async with open_pair() as (cluster, puppet):
        async with open_stream(cluster, puppet) as (stream, wire_id):
            async with open_services(grace=1) as services:

                async def refuse() -> None:
                    terminated(puppet, (await puppet.wait_for_request(2)).request_id)

                services.start_soon(refuse)
                texts = [(await cluster.client.complete("hello")).text for _ in range(5)]
            assert texts == ["hello"] * 5
            assert len(puppet.requests) == 2
            assert not told(cluster, EventKind.ENGINE_LOST)
            puppet.finish(wire_id, 66)
            await stream.read_all()
        assert stream.text == "AB"
        [lost] = told(cluster, EventKind.ENGINE_LOST)
        assert lost.detail.startswith("EngineLost: engine v-0 is shutting down")


async def test_an_engine_that_answers_that_it_shuts_down_gets_nothing_new() -> None:
    async with open_pair() as (cluster, puppet):
        async with open_stream(cluster, puppet) as (stream, wire_id):
            puppet.failure = "Server shutting down"
            await until(lambda: life_of(cluster, "v-0")._connection.is_leaving)  # type: ignore[union-attr]
            assert (await cluster.client.complete("hello")).engine.name == "l-0"
            puppet.finish(wire_id, 66)
            await stream.read_all()
        assert stream.text == "AB"
        assert not serves(cluster, "v-0")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError(code="engine_paused", message="later", retryable=True), TryLater),
        (RequestError(code="validation_error", message="no"), RequestRejected),
        (RequestError(code="internal_error", message="oh"), DpkitError),
        (None, DpkitError),
    ],
)
async def test_an_error_of_one_request_is_that_requests(
    error: RequestError | None, kind: type[DpkitError]
) -> None:
    async with open_pair() as (cluster, puppet):
        with pytest.raises(kind):
            async with open_stream(cluster, puppet) as (stream, wire_id):
                last = WireOutput(wire_id, (), finish_reason=FinishCode.ERROR, error=error)
                puppet.say(last, finished=[wire_id])
                await stream.read_all()
        assert serves(cluster, "v-0")
        assert not told(cluster, EventKind.ENGINE_LOST)


# What is known of its load.


async def test_scheduler_stats_reach_the_view_and_old_ones_do_not_stay() -> None:
    async with open_pair(settings="coordinator.interval = '5ms'") as (cluster, puppet):
        loads = cluster._rules.load
        async with open_stream(cluster, puppet) as (_, wire_id):
            stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
            puppet.say_frames(encode_envelope(Envelope(0, [], scheduler_stats=stats)))
            await until(lambda: loads(0) == (2, 3, 0.5))
            puppet.acknowledges = False
        # vLLM's engines tell the end of the last abort without numbers.
        await until(lambda: puppet.aborted == [wire_id])
        puppet.say(finished=[wire_id], running=None)
        await until(lambda: loads(0) == (0, 0, 0.0))
        await until(lambda: is_idle(cluster))


async def test_counts_come_by_the_coordinators_socket_too() -> None:
    """The only way by which vLLM's engines tell them when no output goes with them."""
    async with open_pair(settings="coordinator.interval = '5ms'") as (cluster, puppet):
        loads = cluster._rules.load
        assert await puppet.subscribe() == [COORDINATOR_READY]
        async with open_stream(cluster, puppet):
            stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
            counts = encode_envelope(Envelope(0, [], scheduler_stats=stats))
            puppet.coordinator.send_nowait(counts)
            await until(lambda: loads(0) == (2, 3, 0.5))


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (encode_envelope(Envelope(0, start_wave=0)), "v-0 steps together with others (then write"),
        ([ENGINE_DEAD], "or tells its coordinator what no engine does that steps by itself"),
        ([b"\xc1"], "cannot read an output"),
    ],
)
async def test_who_tells_a_coordinator_of_waves_is_not_what_it_is_taken_for(
    frames: list[bytes], said: str
) -> None:
    async with open_pair() as (cluster, puppet):
        await puppet.subscribe()
        puppet.coordinator.send_nowait(frames)
        await until(lambda: told(cluster, EventKind.ENGINE_LOST))
        assert said in told(cluster, EventKind.ENGINE_LOST)[0].detail


async def test_resuming_elsewhere_is_a_longer_prompt() -> None:
    """VLLM knows no output of an earlier life."""
    address = free_address()
    config = group(address, count=2), "balancer.policy = 'inflight'"
    async with (
        open_puppet(address, 0) as first,
        open_puppet(address, 1) as second,
        open_living(first, second),
        open_joined(config[0], settings=config[1]) as cluster,
        open_services(grace=1) as services,
    ):

        async def play() -> None:
            asked = await first.wait_for_request()
            first.token(asked.request_id, 65, 66)
            await trio.sleep(0.02)
            first.die()
            again = await second.wait_for_request()
            second.finish(again.request_id, 67)

        services.start_soon(play)
        completion = await cluster.client.complete("?", max_tokens=9, min_tokens=5, resume=True)
        assert completion.text == "ABC"
        (again,) = second.requests
        assert again.prompt_token_ids == (63, 65, 66)
        sampling = again.sampling_params
        assert sampling is not None
        assert (sampling.max_tokens, sampling.min_tokens) == (7, 3)
        assert sampling.extra_args is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 10_000}, "more than the model's 1024 positions"),
        ({"temperature": 2.5}, "temperature must be at most 2 for an engine of vLLM's, not 2.5"),
        ({"stop_token_ids": [10_000]}, "stop_token_ids must name tokens 0 to"),
    ],
)
async def test_what_vllm_would_choke_on_is_refused_before_it_is_sent(
    options: dict[str, Any], said: str
) -> None:
    async with open_pair() as (cluster, puppet):
        with pytest.raises(RequestRejected, match=f"cannot serve request: .*{said}"):
            await cluster.client.complete("?", engine="v-0", **options)
        assert not puppet.requests


async def test_a_request_that_is_too_large_names_the_key() -> None:
    async with open_pair(QUICK + ', max_message = "1KiB"') as (cluster, puppet):
        with pytest.raises(
            RequestRejected, match=r"most that an engine that joined reads \(engines\.vllm\.max_m"
        ):
            await cluster.client.complete("?" * 800, engine="v-0")
        assert not puppet.requests
        assert serves(cluster, "v-0")
