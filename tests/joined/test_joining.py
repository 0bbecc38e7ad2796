"""Who may join, when, and as what: the handshake of engines that are started elsewhere."""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import ClusterNotStarted, LaunchFailed
from dpkit.names import EngineState
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.desks import Desk
from dpkit.nursery.events import EventKind
from dpkit.nursery.services import open_services
from dpkit.wire.address import AddressFailed
from tests.clusters import make_config, slot_of, told
from tests.joined.lab import (
    LIMITS,
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
    from dpkit.nursery.cluster import Cluster
    from tests.joined.lab import Puppet

LOCAL = '[[engines]]\nname = "l"\nmodel = "echo"\n'
SHORT = 'join_timeout = "300ms", dead_after = "10s", abort_timeout = "10s"'


async def ask(cluster: Cluster, puppet: Puppet, *, name: str | None = None) -> None:
    """Have one request served."""
    puppet.begins = True
    name = f"v-{puppet.rank}" if name is None else name
    async with cluster.client.generate("?", engine=name) as stream:
        await stream.__anext__()
        puppet.finish(puppet.requests[-1].request_id, 66)
        await stream.read_all()
    assert stream.text == "AB"


async def test_an_engine_joins_is_asked_what_it_can_do_and_serves() -> None:
    address = free_address()
    async with (
        open_puppet(address) as puppet,
        open_living(puppet),
        open_joined(group(address)) as cluster,
    ):
        assert puppet.calls.count("get_supported_tasks") == 1
        assert life_of(cluster, "v-0").limits == LIMITS, "by its own word"
        await ask(cluster, puppet)
        assert cluster.statistics().engines[0].totals.requests == 1
        assert cluster.statistics().engines[0].core.output_tokens == 2


async def test_ranks_come_in_any_order_and_count_from_0_in_each_group() -> None:
    one, two = free_address(), free_address()
    groups = [group(one, count=2), group(two, name="w", count=1)]
    async with (
        open_puppet(one, 1) as last,
        open_puppet(one, 0) as first,
        open_puppet(two, 0) as other,
        open_living(last, other, first),
        open_joined(*groups) as cluster,
    ):
        await ask(cluster, last)
        await ask(cluster, first)
        await ask(cluster, other, name="w-0")


async def test_engines_that_join_serve_beside_local_ones_and_processes() -> None:
    address = free_address()
    others = (
        '[[engines]]\nname="l"\nmodel="echo"\n[[engines]]\nname="p"\nkind="process"\nmodel="echo"'
    )
    async with (
        open_puppet(address) as puppet,
        open_living(puppet),
        open_joined(group(address), others) as cluster,
    ):
        await ask(cluster, puppet)
        assert (await cluster.client.complete("hello", engine="l-0")).text == "hello"
        assert (await cluster.client.complete("hello", engine="p-0")).text == "hello"


async def test_G05_a_start_that_waits_in_vain_names_the_engine_and_the_key() -> None:
    address = free_address()
    async with open_puppet(address) as puppet, open_living(puppet):
        with pytest.raises(
            ClusterNotStarted,
            match=r"v-1 has not joined within 0\.3 s \(engines\.vllm\.join_ti",
        ) as e:
            async with open_cluster(
                make_config(group(address, count=2, vllm=SHORT), settings="cluster.min_ready=2")
            ):
                pytest.fail("two must be there")
        assert isinstance(e.value.__cause__, LaunchFailed)


async def test_who_comes_late_is_welcome() -> None:
    address = free_address()
    async with (
        open_puppet(address, 0) as early,
        open_puppet(address, 1) as late,
        open_living(early),
        open_joined(group(address, count=2, vllm=SHORT)) as cluster,
    ):
        [absent] = told(cluster, EventKind.ENGINE_ABSENT)
        assert "rank 1 has not said HELLO" in absent.detail
        assert slot_of(cluster, "v-1").state is EngineState.STARTING
        assert str(slot_of(cluster, "v-1").statistics().last_error).startswith("LaunchFailed")
        await ask(cluster, early)
        async with open_living(late):
            await until(lambda: serves(cluster, "v-1"))
            await ask(cluster, late)


async def test_G02_a_port_that_is_taken_fails_the_start_at_once_and_is_named() -> None:
    address = free_address()
    async with open_puppet(address) as puppet, open_living(puppet), open_joined(group(address)):
        with pytest.raises(AddressFailed, match=f"cannot listen at {address}: Address alre"):
            async with open_cluster(make_config(group(address))):
                pytest.fail("the address is another's")


async def test_a_picked_port_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dpkit")
    config = group("tcp://0.0.0.0:*", vllm='host = "localhost", join_timeout = "50ms"')
    async with open_joined(config, LOCAL):
        await until(lambda: "may join" in caplog.text)
        [line] = [each for each in caplog.messages if "may join" in each]
        assert line.startswith("v: engines may join at tcp://localhost:")
        address = line.rpartition(" ")[2]
        async with open_puppet(address) as puppet:
            puppet.hello()
            await puppet.connect()
            [there] = puppet.addresses
            assert there.inputs[0].startswith("tcp://localhost:")
            assert there.outputs[0].startswith("tcp://localhost:")


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        (
            {"vllm_version": "0.34.0"},
            r"v-1 cannot be welcomed: it is vLLM 0\.34\.0, and 0\.33\.0 is expected",
        ),
        ({"vllm_version": "0.33"}, r"it is vLLM 0\.33, and 0\.33\.0 is expected"),
    ],
    ids=["newer", "shorter"],
)
async def test_another_release_is_refused_with_the_reason_on_both_sides(
    unlike: dict[str, object], words: str
) -> None:
    address = free_address()
    async with (
        open_puppet(address, 0) as good,
        open_puppet(address, 1) as other,
    ):
        other.told = unlike
        config = group(address, count=2, vllm=SHORT)
        async with open_living(good, other), open_joined(config) as cluster:
            await until(lambda: told(cluster, EventKind.ENGINE_LOST, of="v-1"))
            lost, *_ = told(cluster, EventKind.ENGINE_LOST, of="v-1")
            assert pytest.RaisesExc(Exception, match=words).matches(Exception(lost.detail))
            await until(lambda: any("is refused" in call for call in other.calls))
            await ask(cluster, good)


async def test_how_it_was_built_does_not_matter_and_another_release_may_be_named() -> None:
    address = free_address()
    async with open_puppet(address) as puppet:
        puppet.told = {"vllm_version": "0.34.1+cu130"}
        config = group(address, vllm='version = "0.34.1"')
        async with open_living(puppet), open_joined(config) as cluster:
            await ask(cluster, puppet)


@pytest.mark.parametrize("tasks", [["embed"], [], None, 7])
async def test_a_model_that_does_not_generate_is_refused(tasks: object) -> None:
    address = free_address()
    async with open_puppet(address) as puppet:
        puppet.tasks = tasks
        config = group(address, vllm=SHORT)
        async with open_living(puppet), open_joined(config, LOCAL) as cluster:
            await until(lambda: told(cluster, EventKind.ENGINE_LOST, of="v-0"))
            lost, *_ = told(cluster, EventKind.ENGINE_LOST, of="v-0")
            assert "does not generate text" in lost.detail


async def test_an_engine_that_cannot_say_what_it_does_is_refused_in_its_words() -> None:
    address = free_address()
    async with open_puppet(address) as puppet:
        puppet.failure = "Call to get_supported_tasks method failed: no idea"
        config = group(address, vllm=SHORT)
        async with open_living(puppet), open_joined(config, LOCAL) as cluster:
            await until(lambda: told(cluster, EventKind.ENGINE_LOST, of="v-0"))
            lost, *_ = told(cluster, EventKind.ENGINE_LOST, of="v-0")
            assert "v-0 did not answer to get_supported_tasks: Call to" in lost.detail
            assert lost.detail.endswith("no idea")


async def test_a_desk_that_was_stopped_says_so() -> None:
    """To a life that would have waited there."""
    (asked,) = make_config(group(free_address())).engines
    desk = Desk(asked)
    desk.stop()
    await desk.run()
    with pytest.raises(AddressFailed, match="v was stopped before anybody could join"):
        await desk.open_reception()


async def test_an_unknown_rank_gets_no_answer_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = free_address()
    async with (
        open_puppet(address, 0) as known,
        open_puppet(address, 7) as unknown,
        open_living(unknown, known),
        open_joined(group(address)) as cluster,
    ):
        await until(lambda: "rank 7 says HELLO and is not expected now (0 are)" in caplog.text)
        await ask(cluster, known)
        assert not unknown.addresses


async def test_strangers_at_the_handshake_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    address = free_address()
    async with (
        open_puppet(address, 0) as known,
        open_puppet(address, 7) as stranger,
        open_living(known),
        open_joined(group(address)) as cluster,
    ):
        for words in ([b"\xc1"], [b"two", b"frames"], [b""]):
            stranger.handshake.send_nowait(words)
        stranger.ready()
        await until(lambda: "rank 7: it says READY without HELLO" in caplog.text)
        assert "rank 7: cannot read a HELLO or READY" in caplog.text
        assert "rank 7: it said 2 frames at once" in caplog.text
        await ask(cluster, known)
        assert not told(cluster, EventKind.ENGINE_LOST)


async def test_ready_before_hello_is_refused_and_hello_then_welcome(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine of a head that is gone, whose socket has found its way here."""
    address = free_address()
    async with open_puppet(address) as puppet:
        puppet.ready()
        async with open_living(puppet), open_joined(group(address)) as cluster:
            assert "rank 0: it says READY without HELLO" in caplog.text
            await ask(cluster, puppet)


async def test_who_begins_anew_before_it_is_ready_is_told_other_addresses() -> None:
    address = free_address()
    async with open_puppet(address) as puppet, open_services(grace=1) as services:

        async def begin_twice() -> None:
            puppet.hello()
            await puppet.connect()
            await puppet.live()

        services.start_soon(begin_twice)
        async with open_joined(group(address)) as cluster:
            first, second = puppet.addresses
            assert first.inputs != second.inputs
            assert first.outputs != second.outputs
            [lost] = told(cluster, EventKind.ENGINE_LOST)
            assert "engine rank 0 cannot be welcomed: it said HELLO" in lost.detail
            assert "and now says HELLO: it has begun anew" in lost.detail
            assert slot_of(cluster, "v-0").engine.epoch == 1
            await ask(cluster, puppet)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (b"\xc1", "cannot read a HELLO or READY"),
        (b"", "cannot read a HELLO or READY"),
    ],
)
async def test_who_breaks_the_handshake_may_begin_anew(word: bytes, said: str) -> None:
    address = free_address()
    async with open_puppet(address) as puppet, open_services(grace=1) as services:

        async def begin_badly() -> None:
            puppet.hello()
            await puppet.connect()
            puppet.handshake.send_nowait([word])
            await puppet.live()

        services.start_soon(begin_badly)
        async with open_joined(group(address)) as cluster:
            [lost] = told(cluster, EventKind.ENGINE_LOST)
            assert said in lost.detail
            await ask(cluster, puppet)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b""], "its ready response is empty"),
        ([b"\xc1"], "cannot read a ready response"),
        ([b"\x80"], "missing required field `max_model_len`"),
        ([b"a", b"b"], "a ready response is one frame, not 2"),
    ],
)
async def test_a_ready_response_that_tells_nothing_ends_that_life(
    frames: list[bytes], said: str
) -> None:
    address = free_address()
    async with open_puppet(address) as puppet, open_services(grace=1) as services:

        async def begin_badly() -> None:
            puppet.hello()
            await puppet.connect()
            puppet.input.send_nowait(frames)
            puppet.ready()
            await trio.sleep(0.05)
            await puppet.live()

        services.start_soon(begin_badly)
        async with open_joined(group(address)) as cluster:
            [lost] = told(cluster, EventKind.ENGINE_LOST)
            assert said in lost.detail
            await ask(cluster, puppet)


async def test_G06_who_dies_between_hello_and_ready_is_noticed_at_once() -> None:
    """A model takes minutes to load, and another one may be started meanwhile."""
    address = free_address()
    async with open_joined(group(address, vllm='join_timeout = "1s"'), LOCAL) as cluster:
        async with open_puppet(address) as puppet:
            puppet.hello()
            await puppet.handshake.receive()
        await until(lambda: told(cluster, EventKind.ENGINE_LOST))
        [lost] = told(cluster, EventKind.ENGINE_LOST)
        assert "it has gone before it was ready" in lost.detail
        async with open_puppet(address) as again, open_living(again):
            await until(lambda: serves(cluster, "v-0"))
            await ask(cluster, again)


async def test_who_says_hello_and_never_gets_ready_is_waited_for_anew() -> None:
    address = free_address()
    async with open_puppet(address) as puppet:
        puppet.hello()
        async with open_joined(group(address, vllm=SHORT), LOCAL) as cluster:
            await until(lambda: told(cluster, EventKind.ENGINE_LOST))
            [lost] = told(cluster, EventKind.ENGINE_LOST)
            assert "v-0 was not ready within 0.3 s of its HELLO" in lost.detail
            assert "has not said READY" in lost.detail
            await puppet.connect()
            async with open_living(puppet):
                await until(lambda: serves(cluster, "v-0"))
                await ask(cluster, puppet)


async def test_a_cluster_is_left_while_it_waits_for_an_engine() -> None:
    config = group(free_address(), vllm='join_timeout = "50ms"')
    with trio.fail_after(3):
        async with open_joined(config, LOCAL):
            pass


async def test_a_start_can_be_cancelled_while_it_waits_for_an_engine() -> None:
    with trio.move_on_after(0.1) as scope:
        async with open_cluster(make_config(group(free_address()))):
            pytest.fail("nobody has come")
    assert scope.cancelled_caught
