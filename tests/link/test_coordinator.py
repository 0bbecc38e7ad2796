"""The coordinator on the wire: who is told what, who comes and goes, and what nonsense does."""

from __future__ import annotations

import logging
import math
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import zmq

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.engine.waves import AHEAD, Ballot, EngineWaves
from dpkit.link.coordinator import open_coordinator, serve_coordinator
from dpkit.messages import EngineId, EngineStats, Snapshot
from dpkit.wire.codec import (
    ENGINE_DEAD,
    SUBSCRIBE,
    CoordinatorReady,
    ScaleElastic,
    encode_envelope,
    encode_hello,
    encode_publish,
    encode_scale,
)
from dpkit.wire.coordinator import CoordinatorAddresses
from dpkit.wire.structs import (
    CoordinatorPublish,
    Envelope,
    SchedulerStats,
    StartWave,
    UtilityAnswer,
)
from dpkit.wire.zsocket import open_context, open_zsocket
from tests.link.coordination import (
    open_again,
    open_client,
    open_engine,
    open_served,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from dpkit.wire.zsocket import Context
    from tests.link.coordination import Engine

READY = CoordinatorReady()


@pytest.fixture
async def context() -> AsyncGenerator[Context]:
    async with open_context() as opened:
        yield opened


# -- Engines subscribe -----------------------------------------------------------------------------


async def test_all_are_told_ready_once_the_last_has_come(context) -> None:
    async with open_served(context, 3) as coordinator, AsyncExitStack() as stack:
        engines: list[Engine] = []
        for rank in range(3):
            assert not any(engine.hears.drain_nowait(print) for engine in engines)
            entered = open_engine(context, coordinator.addresses, rank)
            engines.append(await stack.enter_async_context(entered))
            await settle(lambda: coordinator.statistics().engines == len(engines))
        for engine in engines:
            assert await engine.hear() == READY


async def test_one_that_comes_later_is_told_and_so_are_all(context) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as first,
    ):
        assert await first.hear() == READY
        async with open_engine(context, coordinator.addresses) as again:
            assert await again.hear() == READY
            assert await first.hear() == READY


async def test_one_that_has_gone_is_waited_for_again(context) -> None:
    async with open_served(context, 2, waves=True) as coordinator:
        async with open_engine(context, coordinator.addresses, 0):
            await settle(lambda: coordinator.statistics().engines == 1)
        await settle(lambda: coordinator.statistics().engines == 0)
        async with open_engine(context, coordinator.addresses, 1) as second:
            await settle(lambda: coordinator.statistics().engines == 1)
            second.start_wave(0)
            assert await second.hear() == StartWave(0, 1), "and not READY"
            async with open_engine(context, coordinator.addresses, 0) as first:
                assert await first.hear() == READY


async def test_one_that_comes_while_a_wave_runs_is_called_to_it(context) -> None:
    async with (
        open_served(context, 2, waves=True) as coordinator,
        open_engine(context, coordinator.addresses, 0) as first,
    ):
        first.start_wave(3)  # as after a coordinator has been lost that had called nobody yet
        assert await first.hear() == StartWave(3, 0)
        async with open_engine(context, coordinator.addresses, 1) as second:
            assert await second.hear() == READY
            assert await second.hear() == StartWave(3, None)


async def test_engines_that_need_not_wait_for_each_other_do_not(context) -> None:
    async with (
        open_served(context, 4, await_engines=0) as coordinator,
        open_engine(context, coordinator.addresses, 3) as engine,
    ):
        assert await engine.hear() == READY


# -- Counts ----------------------------------------------------------------------------------------


async def test_every_client_is_told_what_each_engine_says(context) -> None:
    async with (
        open_served(context) as coordinator,
        open_engine(context, coordinator.addresses, 0) as first,
        open_engine(context, coordinator.addresses, 1) as second,
        open_client(context, coordinator.addresses.front) as here,
        open_client(context, coordinator.addresses.front) as there,
    ):
        first.tell(3, 2, 0.25)
        second.tell(0, 7, 0.5)
        for client in (here, there):
            await client.wait_loads((3, 2, 0.25), (0, 7, 0.5))
        first.tell(0)
        for client in (here, there):
            await client.wait_loads((0, 0, 0.0), (0, 7, 0.5))


async def test_no_snapshot_is_older_than_what_has_come(context, mock_clock) -> None:
    """Counts that come between two snapshots wake nobody, and are in the next one."""
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        await client.wait_waiting(0)
        engine.tell(1)
        await settle(lambda: coordinator.statistics().received == 1)
        await trio.testing.wait_all_tasks_blocked(0.01)
        engine.tell(2)
        await settle(coordinator._sockets.from_engines._is_readable)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert coordinator.statistics().received == 1, "nobody has looked"
        mock_clock.jump(0.02)
        await client.wait_waiting(2)
        assert {load[0] for told in client.heard for load in told.loads or ()} == {0, 2}


async def test_a_flood_keeps_nobody_from_hearing(context) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        await client.wait_waiting(0)
        for number in range(10_000):
            engine.tell(number + 1)
        await client.wait(lambda: client.waiting != [0])
        await client.wait_waiting(10_000)
        assert coordinator.statistics().received == 10_000


async def test_a_client_that_comes_later_hears_at_once(context, mock_clock) -> None:
    """On a clock that stands still: it waits for no interval."""
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
    ):
        await settle(lambda: coordinator.statistics().rules.published == 1)
        engine.tell(5)
        await settle(lambda: coordinator.statistics().received == 1)
        mock_clock.jump(0.02)
        await settle(lambda: coordinator.statistics().rules.published == 2)
        for _ in range(2):
            async with open_client(context, coordinator.addresses.front) as client:
                await client.wait_waiting(5)
                assert len(client.heard) == 1
        assert coordinator.statistics().rules.published == 2


async def test_counts_may_come_from_this_side_of_the_wire(context) -> None:
    heard: list[Snapshot] = []
    async with (
        open_served(context, 2, tell=heard.append) as coordinator,
        open_engine(context, coordinator.addresses, 1) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        engine.tell(2)
        here = EngineId("here-0")
        coordinator.take(
            EngineStats(engine=here, index=0, seq=0, waiting=1, running=0, kv_cache_usage=0.0)
        )
        await client.wait_waiting(1, 2)
        assert heard[-1] == client.heard[-1], "and clients on this side hear the same"


async def test_counts_between_two_lives_are_of_none(context) -> None:
    """Rules that are told of lives: what is still under way from one that has ended is not news."""
    lives: dict[int, EngineId] = {0: EngineId("e", 0), 1: EngineId("f", 0)}
    async with (
        open_served(context, 2, whose=lives.get) as coordinator,
        open_engine(context, coordinator.addresses, 0) as first,
        open_engine(context, coordinator.addresses, 1) as second,
        open_client(context, coordinator.addresses.front) as client,
    ):
        rules = coordinator.rules
        for rank, engine in lives.items():
            rules.on_engine_started(trio.current_time(), engine, rank)
        first.tell(5)
        await client.wait_waiting(5, 0)
        rules.on_engine_left(trio.current_time(), lives.pop(0), 0)
        first.tell(7)
        second.tell(1)
        await client.wait_waiting(0, 1)
        lives[0] = EngineId("e", 1)
        rules.on_engine_started(trio.current_time(), lives[0], 0)
        first.tell(8)
        await client.wait_waiting(8, 1)


# -- Waves -----------------------------------------------------------------------------------------


async def test_a_wave_is_told_to_engines_and_clients_and_a_stale_one_to_nobody(context) -> None:
    async with (
        open_served(context, 2, waves=True) as coordinator,
        open_engine(context, coordinator.addresses, 0) as first,
        open_engine(context, coordinator.addresses, 1) as second,
        open_client(context, coordinator.addresses.front) as client,
    ):
        for engine in (first, second):
            assert await engine.hear() == READY
        await settle(lambda: coordinator.statistics().clients == 1)

        def waves() -> list[tuple[int, bool]]:
            return [
                (told.current_wave, told.engines_running)
                for told in client.heard
                if told.loads is None
            ]

        second.start_wave(0)
        await client.wait(lambda: waves() == [(0, True)])
        second.start_wave(0)  # by a second request, which came before the first was heard of
        first.complete_wave(0)
        await client.wait(lambda: waves() == [(0, True), (1, False)])
        second.start_wave(0)
        second.start_wave(1)
        await client.wait(lambda: waves() == [(0, True), (1, False), (1, True)])
        for engine in (first, second):
            assert [await engine.hear() for _ in range(2)] == [StartWave(0, 1), StartWave(1, 1)]


# -- More engines, fewer engines -------------------------------------------------------------------


async def test_a_client_makes_the_table_longer_and_shorter(context) -> None:
    async with (
        open_served(context, 2) as coordinator,
        open_engine(context, coordinator.addresses, 1) as engine,
        open_engine(context, coordinator.addresses, 3) as later,
        open_client(context, coordinator.addresses.front) as client,
        open_client(context, coordinator.addresses.front) as other,
    ):
        engine.tell(1)
        await client.wait_waiting(0, 1)
        client.subscription.scale(4)
        await client.wait_waiting(0, 1, 0, 0)
        later.tell(3)
        await other.wait_waiting(0, 1, 0, 3)
        client.subscription.scale(1)
        await other.wait_waiting(0)
        assert coordinator.statistics().ignored == 0


async def test_when_fewer_are_left_those_that_are_there_need_not_wait(context) -> None:
    async with (
        open_served(context, 3) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        await settle(lambda: coordinator.statistics().engines == 1)
        await client.wait_waiting(0, 0, 0)
        client.subscription.scale(1)
        assert await engine.hear() == READY


async def test_a_coordinator_that_is_started_anew_is_told_how_many_there_are(context) -> None:
    async with open_served(context, 2) as coordinator:
        addresses = coordinator.addresses
    async with open_client(context, addresses.front) as client:
        async with open_again(context, addresses):
            await client.wait_waiting(0, 0)
            client.subscription.scale(3)
            await client.wait_waiting(0, 0, 0)
        client.heard.clear()
        async with open_again(context, addresses):
            await client.wait_waiting(0, 0, 0)


def take_turns(ranks: list[EngineWaves], says: Engine) -> None:
    """Have ranks do one step, find that nobody has work, and say so to the coordinator."""
    for rank in ranks:
        assert rank.step()
    tally = Ballot.tally(rank.ballot(has_work=False) for rank in ranks)
    for word in [word for rank in ranks for word in rank.count(tally)]:
        assert word.wave_complete is not None
        says.complete_wave(word.wave_complete)


async def test_no_client_that_names_a_late_wave_keeps_ranks_from_being_called(context) -> None:
    """However late it is of those that are believed, there are as many behind it."""
    async with (
        open_served(context, 2, waves=True) as coordinator,
        open_engine(context, coordinator.addresses) as first,
        open_engine(context, coordinator.addresses, 1) as second,
    ):
        assert await second.hear() == READY
        ranks = [EngineWaves(rank, speaks=rank == 0, sync_interval=16) for rank in range(2)]
        for stamp in (2**64 - 1, 2**62, AHEAD - 1, 2 * AHEAD - 2, 0, 0):
            ranks[0].note_request(stamp)
            [word] = ranks[0].look(has_work=True)
            assert word.start_wave is not None
            first.start_wave(word.start_wave)
            while not isinstance(call := await second.hear(), StartWave):
                pass  # READY once more
            ranks[1].note_start(call.wave, call.excluded)
            ranks[1].look(has_work=False)
            assert ranks[1].runs, f"{word} called nobody"
            take_turns(ranks, first)
        assert ranks[0].wave == 2 * AHEAD + 1
        assert coordinator.statistics().ignored == 0


# -- Nonsense --------------------------------------------------------------------------------------

COUNTS = encode_envelope(Envelope(0, scheduler_stats=SchedulerStats(num_waiting_reqs=1)))


def packed(wave: object) -> list[bytes]:
    """What an engine may not say, but a message can hold."""
    return encode_envelope(Envelope(0, start_wave=wave))  # type: ignore[arg-type]


ODD_OUTPUTS = {
    "nothing": [b""],
    "bytes": [b"\xc1\xff\x00garbage"],
    "half": [COUNTS[0][: len(COUNTS[0]) // 2]],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "dead": [ENGINE_DEAD],
    "answer": encode_envelope(Envelope(0, utility_output=UtilityAnswer(1))),
    "finished": encode_envelope(Envelope(0, finished_requests=["a"])),
    "another message": [encode_hello("HELLO", True, True)],
    "a publish": [encode_publish(CoordinatorPublish(((0, 0, 0.0),), 0, False))],
    "wave -1": packed(-1),
    "wave 2^64 - 1": packed(2**64 - 1),
    "wave 2^62": packed(2**62),
    "wave x": packed("x"),
    "counts of wave 2^62": encode_envelope(
        Envelope(0, scheduler_stats=SchedulerStats(num_waiting_reqs=2, current_wave=2**62))
    ),
    "end of wave -1": encode_envelope(Envelope(0, wave_complete=-1)),
    "end of wave 2^62": encode_envelope(Envelope(0, wave_complete=2**62)),
}


@pytest.mark.parametrize("frames", ODD_OUTPUTS.values(), ids=ODD_OUTPUTS.keys())
async def test_what_no_engine_should_say_is_counted_and_logged(context, caplog, frames) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        await client.wait_waiting(0)
        with caplog.at_level(logging.WARNING, "dpkit"):
            engine.says.send_nowait(frames)
            engine.says.send_nowait(COUNTS)
            await client.wait_waiting(1)
        assert coordinator.statistics().ignored == 1
        assert len(caplog.messages) == 1
        assert "cannot understand what was said to it" in caplog.messages[0]
        assert coordinator.statistics().rules.current_wave == 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dead", "an engine says that it is dead, and not which one"),
        ("answer", "neither counts nor a wave: what else engines say is for clients"),
        ("wave -1", "there is no wave -1"),
    ],
)
async def test_why_an_engine_is_not_understood_is_in_the_log(context, caplog, what, said) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
    ):
        with caplog.at_level(logging.WARNING, "dpkit"):
            engine.says.send_nowait(ODD_OUTPUTS[what])
            await settle(lambda: coordinator.statistics().ignored > 0)
        assert said in caplog.text


ODD_WORDS = {
    "nothing": [b""],
    "a topic": [b"\x01counts"],
    "bytes": [b"\xc1\xff"],
    "two frames": [b"\x92", b"\x01"],
    "a wave of old": [b"\x92\xa9FIRST_REQ\x01"],
    "no engines": [b"\x92\xb0SCALE_ELASTIC_EP\x00"],
    "too many engines": [b"\x92\xb0SCALE_ELASTIC_EP\xce\x7f\xff\xff\xff"],
    "counts of its own": [encode_publish(CoordinatorPublish(((9, 9, 0.9),), 5, True))],
}


@pytest.mark.parametrize("frames", ODD_WORDS.values(), ids=ODD_WORDS.keys())
@pytest.mark.parametrize("whose", ["front", "back_publish"])
async def test_what_no_subscriber_should_say_is_counted_and_logged(
    context, caplog, frames, whose
) -> None:
    async with open_served(context, 1) as coordinator:
        address = getattr(coordinator.addresses, whose)
        async with open_zsocket(context, zmq.XSUB, connect=address) as odd:
            odd.send_nowait([SUBSCRIBE])
            statistics = coordinator.statistics
            await settle(lambda: statistics().clients + statistics().engines == 1)
            with caplog.at_level(logging.WARNING, "dpkit"):
                odd.send_nowait(frames)
                await settle(lambda: statistics().ignored > 0)
            assert "cannot understand what was said to it" in caplog.messages[0]
            assert ("a subscriber's word is one frame, not 2" in caplog.text) == (len(frames) == 2)
        assert coordinator.rules.engine_count == 1
        assert coordinator.statistics().rules.current_wave == 0


async def test_how_many_engines_there_are_only_clients_say(context) -> None:
    async with (
        open_served(context, 2) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
    ):
        engine.hears.send_nowait([encode_scale(ScaleElastic(9))])
        await settle(lambda: coordinator.statistics().ignored == 1)
        assert coordinator.rules.engine_count == 2


async def test_unknown_ranks_are_counted_and_change_nothing(context, caplog) -> None:
    async with open_served(context, 2) as coordinator, AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(context, coordinator.addresses.front))
        with caplog.at_level(logging.WARNING, "dpkit"):
            for rank in (-1, 2, 65_535, 2**63):
                entered = open_engine(context, coordinator.addresses, rank)
                (await stack.enter_async_context(entered)).tell(9)
            entered = open_engine(context, coordinator.addresses, 1)
            (await stack.enter_async_context(entered)).tell(1)
            await settle(lambda: coordinator.statistics().rules.unknown_engines == 4)
        await client.wait_waiting(0, 1)
        assert coordinator.statistics().ignored == 0
        assert [message.partition(": ")[0] for message in caplog.messages] == [
            "the coordinator heard of an engine that is not in its table"
        ] * 3, "the first, the second, the fourth"


async def test_whatever_bytes_come_nothing_ends_and_nothing_floods_the_log(context, caplog) -> None:
    draw = random.Random(6)
    rules = CoordinatorRules(2, now=trio.current_time(), wave_coordination=True)
    async with open_coordinator(context, rules) as coordinator:
        with caplog.at_level(logging.WARNING, "dpkit"):
            for _ in range(3000):
                frame = bytearray(draw.choice([COUNTS[0], packed(3)[0], b"\x92\xb0SCALE", b""]))
                for _ in range(draw.randrange(3)):
                    frame.insert(draw.randrange(len(frame) + 1), draw.randrange(256))
                if frame and draw.random() < 0.5:
                    frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
                frames = [bytes(frame)] * draw.choice([1, 1, 1, 2])
                coordinator._on_output(frames)
                coordinator._on_engine(frames)
                coordinator._on_client(frames)
        assert coordinator.statistics().ignored > 3000
        assert len(caplog.messages) < 60
        encode_publish(CoordinatorPublish(rules.publish(trio.current_time()).loads, 0, False))


async def test_counts_that_are_no_numbers_are_none(context) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as client,
    ):
        engine.tell(1, 2, float("nan"))
        await client.wait_loads((1, 2, 0.0))
        engine.tell(2**64 - 1, 2, 7.5)
        await client.wait_loads((2**64 - 1, 2, 1.0))


# -- Clients come and go ---------------------------------------------------------------------------


async def test_a_client_that_vanishes_leaves_nothing(context) -> None:
    async with (
        open_served(context, 1) as coordinator,
        open_engine(context, coordinator.addresses) as engine,
        open_client(context, coordinator.addresses.front) as stays,
    ):
        async with open_client(context, coordinator.addresses.front) as goes:
            await goes.wait_waiting(0)
            assert coordinator.statistics().clients == 2
        await settle(lambda: coordinator.statistics().clients == 1)
        engine.tell(1)
        await stays.wait_waiting(1)
        assert coordinator.statistics().ignored == 0


async def test_a_client_hears_shares_whatever_its_coordinator_passes_on(context) -> None:
    """One of vLLM's checks nothing, and a policy that computes with an infinity places nobody."""
    told = (math.inf, math.nan, -math.inf, -0.5, 1.5, 0.25)
    async with (
        open_zsocket(context, zmq.XPUB, bind="tcp://127.0.0.1:*") as publish,
        open_client(context, publish.endpoint) as client,
    ):
        assert await publish.receive() == [SUBSCRIBE]
        loads = tuple((1, 2, usage) for usage in told)
        publish.send_nowait([encode_publish(CoordinatorPublish(loads, 0, False))])
        await client.wait_loads(*((1, 2, usage) for usage in (1.0, 0.0, 0.0, 0.0, 1.0, 0.25)))


async def test_what_a_coordinator_says_amiss_is_passed_over(context, caplog) -> None:
    async with (
        open_zsocket(context, zmq.XPUB, bind="tcp://127.0.0.1:*") as publish,
        open_client(context, publish.endpoint) as client,
    ):
        assert await publish.receive() == [SUBSCRIBE]
        good = encode_publish(CoordinatorPublish(((4, 0, 0.0),), 0, False))
        with caplog.at_level(logging.WARNING, "dpkit"):
            below = encode_publish(CoordinatorPublish(((-1, 0, 0.0),), 0, False))
            for frames in ([b"what?"], [good, good], [b""], [below], [good]):
                publish.send_nowait(frames)
            await client.wait_waiting(4)
        told = client.subscription.statistics()
        assert (told.received, told.ignored, told.connected) == (5, 4, True)
        assert len(caplog.messages) == 3
        assert "a coordinator's publish is one frame, not 2" in caplog.messages[1]


async def test_what_a_client_does_with_a_snapshot_is_its_own_affair(context) -> None:
    """A bug of whoever listens comes out as it is, from where it is listened."""

    def fail(_: Snapshot) -> None:
        raise KeyError("a bug")

    rules = CoordinatorRules(1, now=trio.current_time())
    async with open_coordinator(context, rules, tell=fail) as coordinator:
        with pytest.raises(KeyError, match="a bug"):
            await coordinator.run()


# -- Where it listens ------------------------------------------------------------------------------


async def test_unix_sockets_and_ports_in_a_row_are_addresses(context, tmp_path: Path) -> None:
    async with (
        open_served(context, 1, bind=f"ipc://{tmp_path}") as coordinator,
        open_client(context, f"ipc://{tmp_path}/front") as client,
    ):
        await client.wait_waiting(0)
        assert coordinator.addresses.back_output == f"ipc://{tmp_path}/back_output"
    assert CoordinatorAddresses.at("tcp://[::1]:7000") == CoordinatorAddresses(
        back_publish="tcp://[::1]:7000", back_output="tcp://[::1]:7001", front="tcp://[::1]:7002"
    )


async def test_it_serves_by_itself_in_a_nursery() -> None:
    async with trio.open_nursery() as nursery:
        coordinator = await nursery.start(serve_coordinator, 3)
        async with (
            open_context() as context,
            open_client(context, coordinator.addresses.front) as client,
        ):
            await client.wait_waiting(0, 0, 0)
            assert "0 of 3 engines, 1 clients" in repr(coordinator)
        nursery.cancel_scope.cancel()


async def test_a_number_of_engines_that_there_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="there cannot be 0 engines"):
        await serve_coordinator(0)
