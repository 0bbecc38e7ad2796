"""Engines that join and step together: they are told of each other, of waves, and of their ends."""

# ruff: noqa: N802 - tests carry the reports' names

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import ClusterNotStarted, ConfigError
from dpkit.link.together import run_together
from dpkit.names import EngineState
from dpkit.nursery.cluster import Cluster
from dpkit.nursery.events import EventKind
from dpkit.nursery.services import open_services
from dpkit.wire.codec import (
    COORDINATOR_READY,
    ENGINE_DEAD,
    decode_from_coordinator,
    encode_envelope,
    encode_hello,
)
from dpkit.wire.structs import Envelope, SchedulerStats, StartWave
from tests.clusters import is_idle, make_config, told
from tests.joined.lab import (
    SUPERVISION,
    free_address,
    group,
    life_of,
    open_engine,
    open_joined,
    open_puppet,
    serves,
)
from tests.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.joined.lab import Puppet

WAVES = "[coordinator]\nwave_coordination = true\ninterval = '10ms'\n"
TOGETHER = f'{SUPERVISION}, strategy = "one_for_all"'
VLLM = 'join_timeout = "10s", dead_after = "10s", abort_timeout = "10s"'
MEET = 'rendezvous = "10.0.0.2:29560", ' + VLLM


def ranks(address: str, *, count: int = 2, vllm: str = MEET, supervision: str = TOGETHER) -> str:
    return group(address, count=count, vllm=vllm, supervision=supervision)


class Rank:
    """A puppet that heeds a coordinator; every request gets its first token at once."""

    def __init__(self, puppet: Puppet, settings: str | None = None) -> None:
        self.puppet = puppet
        self.calls: list[StartWave] = []
        self._settings = settings
        puppet.begins = True

    async def live(self) -> None:
        """Come up as vLLM's engines do, which wait for their coordinator, and obey."""
        puppet = self.puppet
        puppet.hello()
        await puppet.connect()
        puppet.introduce()
        assert await puppet.subscribe() == [COORDINATOR_READY]
        puppet.handshake.send_nowait([encode_hello("READY", False, True, self._settings)])
        with suppress(trio.ClosedResourceError):  # it was told to leave
            await run_together(
                partial(puppet.input.pump, puppet.obey), partial(puppet.source.pump, self._hear)
            )

    def _hear(self, frames: list[bytes]) -> None:
        word = decode_from_coordinator(frames)
        if isinstance(word, StartWave):
            self.calls.append(word)

    def tell(self, *, start: int | None = None, complete: int | None = None) -> None:
        """Tell the coordinator of a wave."""
        word = Envelope(self.puppet.rank, start_wave=start, wave_complete=complete)
        self.puppet.coordinator.send_nowait(encode_envelope(word))

    def count(self, *, running: int, step: tuple[int, int]) -> None:
        """Tell the coordinator how much there is to do, as of which wave and step."""
        wave, number = step
        stats = SchedulerStats(num_running_reqs=running, current_wave=wave, step_counter=number)
        counts = Envelope(self.puppet.rank, scheduler_stats=stats)
        self.puppet.coordinator.send_nowait(encode_envelope(counts))


@asynccontextmanager
async def open_ranks(address: str, count: int = 2, *settings: str) -> AsyncIterator[list[Rank]]:
    """Ranks that live until the block ends."""
    async with AsyncExitStack() as stack:
        puppets = [await stack.enter_async_context(open_puppet(address, n)) for n in range(count)]
        said = settings or ("same",) * count
        made = [Rank(puppet, of) for puppet, of in zip(puppets, said, strict=True)]
        async with open_services(grace=1) as services:
            for rank in made:
                services.start_soon(rank.live, name=f"puppet {rank.puppet.rank}")
            yield made


@asynccontextmanager
async def open_group(count: int = 2) -> AsyncIterator[tuple[Cluster, list[Rank]]]:
    """A cluster, and that many ranks that serve in it."""
    address = free_address()
    async with (
        open_ranks(address, count) as made,
        open_joined(ranks(address, count=count), settings=WAVES) as cluster,
    ):
        yield cluster, made


def address_of(cluster: Cluster) -> str:
    """Where its engines join."""
    return str(cluster.config.engines[0].vllm.handshake)


def waves_of(cluster: Cluster) -> tuple[int, bool]:
    """The wave that the coordinator of the cluster speaks of, and whether it runs."""
    now = cluster.statistics().coordinator
    return now.current_wave, now.engines_running


# -- How they join ---------------------------------------------------------------------------------


async def test_all_are_told_where_they_meet_and_have_one_coordinator() -> None:
    async with open_group(3) as (_, made):
        inits = [rank.puppet.inits for rank in made]
        assert [len(each) for each in inits] == [1, 1, 1]
        for (init,) in inits:
            assert init.parallel_config == {
                "data_parallel_master_ip": "10.0.0.2",
                "data_parallel_master_port": 29560,
                "_data_parallel_master_port_list": [29564, 29563, 29562, 29561, 29560],
                "_coord_store_port": 0,
                "data_parallel_size": 3,
            }
        one, *others = [init.addresses for (init,) in inits]
        for other in others:
            assert other.coordinator_input == one.coordinator_input
            assert other.coordinator_output == one.coordinator_output
            assert not {*other.inputs, *other.outputs} & {*one.inputs, *one.outputs}


async def test_nobody_is_answered_before_all_have_said_hello() -> None:
    address = free_address()
    async with (
        open_puppet(address) as zero,
        open_puppet(address, 1) as one,
        open_starting(ranks(address)) as start,
        trio.open_nursery() as nursery,
    ):
        zero.hello()
        with trio.move_on_after(0.2) as waiting:
            await zero.handshake.receive()
        assert waiting.cancelled_caught
        nursery.start_soon(Rank(zero).live)  # started anew, as it had waited for long enough
        await trio.sleep(0.2)  # heard: once all are answered, to begin anew is a fault
        nursery.start_soon(Rank(one).live)
        await start()
        nursery.cancel_scope.cancel()


async def test_one_that_has_left_again_has_not_called() -> None:
    address = free_address()
    async with (
        open_puppet(address) as gone,
        open_puppet(address, 1) as one,
        open_starting(ranks(address)) as start,
        trio.open_nursery() as nursery,
    ):
        gone.hello()
        await trio.sleep(0.2)
        gone.leave()
        await trio.sleep(0.3)
        one.hello()
        with trio.move_on_after(0.2) as waiting:
            await one.handshake.receive()
        assert waiting.cancelled_caught
        nursery.start_soon(Rank(one).live)
        await trio.sleep(0.2)  # heard: once all are answered, to begin anew is a fault
        async with open_puppet(address) as zero:
            nursery.start_soon(Rank(zero).live)
            await start()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_starting(
    toml: str, *, clients: int = 1
) -> AsyncIterator[Callable[[], Awaitable[Cluster]]]:
    """A cluster that starts; what is given waits until it has. Ends with the block."""
    async with trio.open_nursery() as nursery:
        send, receive = trio.open_memory_channel[Cluster](1)

        async def serve() -> None:
            async with open_joined(toml, settings=WAVES, clients=clients) as cluster:
                await send.send(cluster)
                await trio.sleep_forever()

        async def start() -> Cluster:
            with trio.fail_after(10):
                return await receive.receive()

        nursery.start_soon(serve)
        with send, receive:
            yield start
            nursery.cancel_scope.cancel()


async def test_who_waits_for_others_is_named_and_so_are_they() -> None:
    address = free_address()
    impatient = MEET.replace('join_timeout = "10s"', 'join_timeout = "200ms"')
    async with open_puppet(address) as zero:
        zero.hello()
        with pytest.raises(ClusterNotStarted) as caught:
            async with open_joined(ranks(address, vllm=impatient), settings=WAVES):
                pass
        assert "has said HELLO, and is answered once all that step together" in str(
            caught.value.__cause__
        )


async def test_I09_ranks_with_different_settings_do_not_start_and_say_so() -> None:
    address = free_address()
    impatient = MEET.replace('join_timeout = "10s"', 'join_timeout = "1s"')
    async with open_ranks(address, 2, "abc", "xyz"):
        with pytest.raises(ClusterNotStarted) as caught:
            async with open_joined(ranks(address, vllm=impatient), settings=WAVES):
                pass
    said = str(caught.value.__cause__)
    assert "engines that step together must be started with the same settings" in said
    assert "parallel_config_hash is abc at rank 0, xyz at rank 1" in said


async def test_a_rank_that_does_not_get_ready_is_named_by_those_that_are() -> None:
    address = free_address()
    impatient = MEET.replace('join_timeout = "10s"', 'join_timeout = "500ms"')
    async with (
        open_puppet(address) as zero,
        open_puppet(address, 1) as one,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(come_so_far, zero, True)
        nursery.start_soon(come_so_far, one, False)
        with pytest.raises(ClusterNotStarted) as caught:
            async with open_joined(ranks(address, vllm=impatient), settings=WAVES):
                pass
        nursery.cancel_scope.cancel()
    said = str(caught.value.__cause__)
    assert "is ready, and of those that it steps together with, rank 1 is not" in said


async def come_so_far(puppet: Puppet, gets_ready: bool) -> None:
    """Join, but for READY perhaps."""
    puppet.hello()
    await puppet.connect()
    puppet.introduce()
    if gets_ready:
        puppet.ready()
    await trio.sleep_forever()


# -- Waves -----------------------------------------------------------------------------------------


async def test_I02_the_first_request_at_any_rank_wakes_the_others_and_waves_are_told() -> None:
    async with open_group() as (cluster, (zero, one)):
        for wave in range(3):
            async with cluster.client.generate("?", engine="v-1") as stream:
                await stream.__anext__()
                request = await one.puppet.wait_for_request(wave + 1)
                assert request.current_wave == wave
                one.tell(start=wave)
                await until(lambda: len(zero.calls) > wave)  # noqa: B023 - awaited at once
                assert zero.calls[-1] == StartWave(wave, 1)
                await until(lambda: waves_of(cluster) == (wave, True))  # noqa: B023 - likewise
                one.puppet.finish(request.request_id, 66)
                await stream.read_all()
            zero.tell(complete=wave)
            await until(lambda: waves_of(cluster) == (wave + 1, False))  # noqa: B023 - likewise
        assert len(one.calls) == 3  # which it ignores: it has begun them


async def test_counts_reach_the_view_by_the_coordinator_and_none_goes_back_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loads(rank: int) -> object:
        return cluster._rules.load(rank)

    async with open_group() as (cluster, (zero, one)):
        zero.count(running=3, step=(0, 1))
        await until(lambda: loads(0) == (0, 3, 0.0))
        one.count(running=2, step=(0, 7))
        await until(lambda: loads(1) == (0, 2, 0.0))
        # Beside outputs vLLM tells no step.
        zero.puppet.say(running=5)
        await until(lambda: loads(0) == (0, 5, 0.0))
        assert cluster.statistics().coordinator.out_of_order == 0
        assert "came after" not in caplog.text
        zero.count(running=0, step=(0, 8))
        one.count(running=0, step=(0, 8))
        await until(lambda: loads(0) == loads(1) == (0, 0, 0.0))


async def test_an_abort_reaches_its_rank_alone_and_its_wave_goes_on() -> None:
    async with open_group() as (cluster, (zero, one)):
        async with cluster.client.generate("?", engine="v-1") as stream:
            await stream.__anext__()
            one.tell(start=0)
            await until(lambda: waves_of(cluster) == (0, True))
        await until(lambda: one.puppet.aborted)
        assert not zero.puppet.aborted
        assert not told(cluster, EventKind.ENGINE_LOST)
        zero.tell(complete=0)
        await until(lambda: waves_of(cluster) == (1, False))


async def test_garbage_at_their_coordinator_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with open_group() as (cluster, (zero, one)):
        for frames in ([b"\xc1"], [b""], [b"GET / HTTP/1.1"], [ENGINE_DEAD]):
            one.puppet.coordinator.send_nowait(frames)
        one.tell(start=2**63)
        one.tell(start=0)
        await until(lambda: zero.calls == [StartWave(0, 1)])
        zero.tell(complete=0)
        await until(lambda: waves_of(cluster) == (1, False))
        assert not told(cluster, EventKind.ENGINE_LOST)
        assert "cannot understand what was said to it" in caplog.text


# -- Ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leave", "die"])
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_rank_that_is_lost_takes_its_group_along_and_all_come_back_at_wave_0(
    lost: int, how: str
) -> None:
    async with open_group() as (cluster, made):
        address = address_of(cluster)
        async with cluster.client.generate("?", resume=True) as stream:
            await stream.__anext__()
            made[0].tell(start=4)
            await until(lambda: waves_of(cluster) == (4, True))
            getattr(made[lost].puppet, how)()
            await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == 2)
            for rank in made:
                rank.puppet.leave()
            async with open_ranks(address) as again:
                await until(lambda: all(serves(cluster, f"v-{n}", 1) for n in (0, 1)))
                assert waves_of(cluster) == (0, False)
                former, present = made[0].puppet.addresses[0], again[0].puppet.addresses[0]
                assert former.coordinator_output != present.coordinator_output
                await until(lambda: again[0].puppet.requests or again[1].puppet.requests)
                (rank,) = [each for each in again if each.puppet.requests]
                (request,) = rank.puppet.requests
                assert request.current_wave == 0
                rank.puppet.finish(request.request_id, 66)
                await stream.read_all()
                assert stream.text == "AAB"
                await until(lambda: is_idle(cluster))


async def test_E03_a_rank_that_hangs_is_found_out_and_takes_its_group_along() -> None:
    address = free_address()
    impatient = MEET.replace('dead_after = "10s"', 'dead_after = "300ms"')
    async with (
        open_ranks(address) as (_, one),
        open_joined(ranks(address, vllm=impatient), settings=WAVES) as cluster,
    ):
        one.puppet.answers = False
        await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == 2)
        (first, second) = told(cluster, EventKind.ENGINE_LOST)
        assert "engine v-1 is silent" in first.detail
        assert "engine v-0 was stopped" in second.detail


async def test_one_that_is_restarted_alone_waits_until_the_others_are() -> None:
    async with open_group() as (cluster, (zero, one)):
        address = address_of(cluster)
        one.puppet.leave()
        await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == 2)
        async with (
            open_puppet(address) as first,
            open_puppet(address, 1) as second,
            open_services(grace=1) as services,
        ):
            services.start_soon(Rank(second).live, name="puppet 1")
            await trio.sleep(0.2)  # v-0 serves nobody, and has not been restarted
            assert not second.inits, "it must not be met"
            zero.puppet.leave()
            services.start_soon(Rank(first).live, name="puppet 0")
            await until(lambda: all(serves(cluster, f"v-{n}", 1) for n in (0, 1)))


async def test_whoever_goes_between_hello_and_ready_may_come_back() -> None:
    address = free_address()
    async with open_starting(ranks(address), clients=2) as start:
        for how_far in range(4):
            await come_and_go(address, how_far)
        async with open_ranks(address) as made:
            cluster = await start()
            for client in cluster.clients:
                async with client.generate("?") as stream:
                    await stream.__anext__()
            await until(lambda: sum(len(rank.puppet.aborted) for rank in made) == 2)


async def come_and_go(address: str, how_far: int) -> None:
    """Be two ranks that come so far, and are gone."""
    async with open_puppet(address) as zero, open_puppet(address, 1) as one:
        zero.hello()
        one.hello()
        if how_far > 0:
            with trio.fail_after(5):
                await zero.connect()
                await one.connect()
        if how_far > 1:
            zero.introduce()
        if how_far > 2:
            one.introduce()
            zero.ready()
        zero.leave()
        one.leave()


GARBAGE = [[b""], [b"\xc1"], [b"\x00", b"\xff"], [ENGINE_DEAD], [b"GET / HTTP/1.1\r\n"]]


async def misbehave(address: str, rng: random.Random) -> None:
    """Be two ranks that do this and that, in any order, and are gone."""
    async with open_puppet(address) as zero, open_puppet(address, 1) as one:
        for _ in range(rng.randrange(12)):
            puppet = rng.choice([zero, one])
            sockets = [puppet.handshake, puppet.input, puppet.output, puppet.coordinator]
            what = rng.randrange(8)
            with suppress(trio.WouldBlock, trio.ClosedResourceError):
                if what == 0:
                    rng.choice(sockets).send_nowait(rng.choice(GARBAGE))
                elif what == 1:
                    puppet.ready()
                elif what == 2:
                    puppet.introduce()
                elif what == 3 and puppet.inits:
                    puppet.die()
                elif what == 4 and puppet.inits:
                    with trio.move_on_after(0.02):
                        await puppet.subscribe()
                elif what == 5 and puppet.coordinator is not puppet.handshake:
                    Rank(puppet).tell(start=rng.randrange(3))
                else:
                    zero.hello()
                    one.hello()
                    with trio.move_on_after(0.05):
                        await zero.connect()
                        await one.connect()
        if rng.random() < 0.5:
            zero.leave()
            one.leave()


async def misbehave_again_and_again(times: int, seed: int) -> None:
    address, rng = free_address(), random.Random(seed)
    impatient = VLLM.replace('join_timeout = "10s"', 'join_timeout = "700ms"')
    toml = ranks(address, vllm=f'rendezvous = "10.0.0.2:29560", {impatient}')
    async with open_ranks(address) as made, open_joined(toml, settings=WAVES) as cluster:
        for rank in made:
            rank.puppet.leave()
        for _ in range(times):
            await misbehave(address, rng)
        # Whoever starts an engine anew has first ended the former one; that is known soon after.
        await until(lambda: all(nobody_is_answered(cluster, rank) for rank in (0, 1)))
        async with open_ranks(address) as again:
            await until(lambda: serve_whole(cluster, again), limit=20)
            async with cluster.client.generate("?", engine="v-1") as stream:
                await stream.__anext__()
                request = again[1].puppet.requests[-1]
                again[1].puppet.finish(request.request_id, 66)
                await stream.read_all()
            assert waves_of(cluster) == (0, False)


def nobody_is_answered(cluster: Cluster, rank: int) -> bool:
    """Whether a rank is still to say HELLO, or waits for the others."""
    said = repr(life_of(cluster, f"v-{rank}"))
    return "has not said HELLO" in said or "is answered once" in said


def serve_whole(cluster: Cluster, made: list[Rank]) -> bool:
    """Whether these ranks, and no former ones, serve."""
    states = {standing.state for standing in cluster.engines}
    return states == {EngineState.READY} and all(rank.puppet.calls for rank in made)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_ranks_have_done_they_serve_once_they_behave(seed: int) -> None:
    await misbehave_again_and_again(10, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_whatever_ranks_have_done_a_hundred_times() -> None:
    for seed in range(100, 120):
        await misbehave_again_and_again(20, seed)


# -- What cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "waves", "error"),
    [
        (ranks("tcp://127.0.0.1:1", vllm=VLLM), WAVES, "meet at the first one; write for example"),
        (ranks("tcp://127.0.0.1:1"), "", "engines meet only if several step together"),
        (ranks("tcp://127.0.0.1:1", count=1), WAVES, "engines meet only if several step together"),
        (
            ranks("tcp://127.0.0.1:1", supervision=f'{SUPERVISION}, strategy = "one_for_one"'),
            WAVES,
            "restart together; write .one_for_all",
        ),
        (
            ranks("tcp://127.0.0.1:1", supervision=f'{SUPERVISION}, strategy = "all_but_one"'),
            WAVES,
            "were told by whoever started them how many they are; write .one_for_all",
        ),
        (
            ranks("tcp://127.0.0.1:1") + "[[engines]]\nmodel = 'echo'\nname = 'more'\n",
            WAVES,
            r"have a single \[\[engines\]\] table",
        ),
        (
            ranks("tcp://127.0.0.1:1", vllm=MEET.replace("29560", "65533")),
            WAVES,
            "expected HOST:PORT, such as '10.0.0.2:29560', got '10.0.0.2:65533'",
        ),
        (
            ranks("tcp://127.0.0.1:1", vllm=MEET.replace("10.0.0.2", "*")),
            WAVES,
            "expected HOST:PORT",
        ),
        (ranks("tcp://127.0.0.1:1", vllm=MEET.replace(":29560", "")), WAVES, "expected HOST:PORT"),
    ],
)
def test_configs_that_cannot_be_are_refused_in_words(toml: str, waves: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make_config(toml, settings=waves)


async def test_their_number_is_not_changed_and_no_other_such_group_comes_later() -> None:
    async with open_group() as (cluster, _):
        address = address_of(cluster)
        with pytest.raises(ConfigError, match="depend on one another"):
            await cluster.scale("v", 3)
        more = make_config(ranks(address, count=3), settings=WAVES)
        with pytest.raises(ConfigError, match=r"cannot be replaced while the cluster runs$"):
            cluster.plan(more)
        other = make_config(
            ranks(free_address(), count=2).replace('name = "v"', 'name = "w"'), settings=WAVES
        )
        with pytest.raises(ConfigError, match="begin with their cluster; start it anew"):
            cluster.plan(other)


# -- dpkit's own engines, in processes that somebody else starts -----------------------------------

ENGINES = '[coordinator]\nwave_coordination = true\n[[engines]]\nmodel = "echo"\ncount = 2\n'


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_dpkits_engines_step_together_and_all_come_back_when_one_is_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    address, place = free_address(), free_address().removeprefix("tcp://")
    config = ranks(address, vllm=MEET.replace("10.0.0.2:29560", place))
    async with AsyncExitStack() as stack:

        async def start(rank: int) -> subprocess.Popen[bytes]:
            return await stack.enter_async_context(open_engine(tmp_path, address, rank, ENGINES))

        both = [await start(0), await start(1)]
        cluster = await stack.enter_async_context(open_joined(config, settings=WAVES))
        for wave in range(3):
            answer = await cluster.client.complete("and so on", engine=f"v-{1 - wave % 2}")
            assert answer.text == "and so on"
            await until(lambda: waves_of(cluster) == (wave + 1, False))  # noqa: B023 - awaited
        both[1].kill()
        await until(lambda: len(told(cluster, EventKind.ENGINE_LOST)) == 2)
        both[0].kill()  # who starts them starts all again
        await start(0)
        await start(1)
        assert (await cluster.client.complete("and again", timeout=30)).text == "and again"
        await until(lambda: waves_of(cluster) == (1, False))
