"""A group that votes: who is in it, where it meets, and what a vote does; all in one process."""

# ruff: noqa: N802 - tests carry the reports' names

from __future__ import annotations

import socket
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.engine.waves import Ballot
from dpkit.errors import LaunchFailed, WireError
from dpkit.link.group import LockstepPlan, LoneBallots, import_ballots, open_group
from dpkit.wire.structs import Addresses, Init
from tests.link.lab import LIMITS
from tests.link.ranks import free_port

pytest.importorskip("torch")

from torch import distributed

from dpkit.link.gloo import Meeting, open_gloo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.link.gloo import GlooBallots

_dist: Any = distributed  # its stubs lack half of what is used here
LIMIT_S = 0.3
PLAN = LockstepPlan(sync_interval=16, vote_timeout=1.0, start_timeout=1.0)
ALONE = Addresses(inputs=("tcp://127.0.0.1:1",), outputs=("tcp://127.0.0.1:1",))
TOGETHER = Addresses(
    inputs=ALONE.inputs,
    outputs=ALONE.outputs,
    coordinator_input="tcp://127.0.0.1:1",
    coordinator_output="tcp://127.0.0.1:1",
)
MEET = {"data_parallel_master_ip": "127.0.0.1", "data_parallel_master_port": 1}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What gloo opens once in a process is no leak of a test."""

    async def meet() -> None:
        async with AsyncExitStack() as stack:
            await meet_all(stack, meetings(2))

    trio.run(meet)


def ballot(number: int, step: int = 1) -> Ballot:
    return Ballot(
        has_work=number % 2,
        goes_on=1,
        resumes=number,
        resumes_below=-number,
        wave=number,
        step=step,
        step_below=-step,
    )


def meetings(count: int, *, patience: float = 5.0, time_limit: float = 5.0) -> list[Meeting]:
    port = free_port()
    return [
        Meeting(
            host="127.0.0.1",
            port=port,
            place=place,
            ranks=tuple(range(count)),
            patience=patience,
            time_limit=time_limit,
            limit_key="the.key",
        )
        for place in range(count)
    ]


async def meet_all(
    stack: AsyncExitStack, all_of_them: Sequence[Meeting], facts: dict[str, Any] | None = None
) -> list[GlooBallots]:
    """Have ranks meet, each in its own task, as they can but together."""
    opened: dict[int, GlooBallots] = {}

    async def meet(meeting: Meeting) -> None:
        manager = open_gloo(meeting, facts or {})
        opened[meeting.place] = await manager.__aenter__()
        stack.push_async_exit(manager)

    async with trio.open_nursery() as nursery:
        for meeting in all_of_them:
            nursery.start_soon(meet, meeting)
    return [opened[meeting.place] for meeting in all_of_them]


# -- Votes -----------------------------------------------------------------------------------------


async def test_the_greatest_of_each_number_comes_out_for_all() -> None:
    async with AsyncExitStack() as stack:
        ranks = await meet_all(stack, meetings(3))
        tallies: dict[int, Ballot] = {}

        async def vote(number: int) -> None:
            tallies[number] = await ranks[number].vote(ballot(number, step=number))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(vote, number)
        expected = Ballot(
            has_work=1, goes_on=1, resumes=2, resumes_below=0, wave=2, step=2, step_below=0
        )
        assert tallies == dict.fromkeys(range(3), expected)


async def test_a_vote_waits_without_stopping_trio() -> None:
    async with AsyncExitStack() as stack:
        zero, one = await meet_all(stack, meetings(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(zero.vote, ballot(0))
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            assert len(nursery.child_tasks) == 1
            await one.vote(ballot(1))


async def test_a_vote_has_a_time_limit() -> None:
    async with AsyncExitStack() as stack:
        zero, _ = await meet_all(stack, meetings(2, time_limit=LIMIT_S))
        with pytest.raises(TimeoutError, match=r"not taken within 0\.3 s \(the\.key\)"):
            await zero.vote(ballot(0))


async def test_a_rank_that_leaves_breaks_the_vote_off() -> None:
    async with AsyncExitStack() as stack:
        zero, one = await meet_all(stack, meetings(2))
        one.close()
        with pytest.raises(ConnectionError, match="another rank has gone"):
            await zero.vote(ballot(0))


async def test_a_cancelled_vote_is_left_at_once() -> None:
    async with AsyncExitStack() as stack:
        zero, _ = await meet_all(stack, meetings(2, time_limit=LIMIT_S))
        with trio.move_on_after(0) as scope:
            await zero.vote(ballot(0))
        assert scope.cancelled_caught
        await trio.sleep(LIMIT_S)  # until gloo's thread has given up, too
        zero._is_voting = False


async def test_a_vote_of_one_needs_nobody() -> None:
    assert await LoneBallots().vote(ballot(3)) == ballot(3)


# -- The meeting -----------------------------------------------------------------------------------


async def test_I09_engines_that_differ_do_not_start_and_say_how() -> None:
    async with AsyncExitStack() as stack:
        errors: list[str] = []

        async def meet(meeting: Meeting) -> None:
            try:
                await meet_all(
                    stack, [meeting], {"num_blocks": 64 - meeting.place, "block_size": 16}
                )
            except* LaunchFailed as error:
                errors.extend(map(str, error.exceptions))

        async with trio.open_nursery() as nursery:
            for meeting in meetings(3):
                nursery.start_soon(meet, meeting)
        numbers = "64 at rank 0, 63 at rank 1, 62 at rank 2"
        told = f"engines that step together must be alike, and num_blocks is {numbers}"
        assert errors == [told] * 3


async def test_who_did_not_come_is_named() -> None:
    zero, _, _ = meetings(3, patience=LIMIT_S)
    with pytest.raises(LaunchFailed, match=r"rank 0 waited 0\.3 s at .*, and ranks 1, 2 did not"):
        async with open_gloo(zero, {}):
            raise AssertionError("it met nobody")


async def test_a_store_that_is_not_there_is_named() -> None:
    _, one = meetings(2, patience=LIMIT_S)
    with pytest.raises(LaunchFailed, match=r"rank 1 did not get .* which rank 0 keeps: nobody"):
        async with open_gloo(one, {}):
            raise AssertionError("it met nobody")


async def test_a_port_that_is_taken_is_named() -> None:
    (zero, _) = meetings(2)
    with (
        socket.create_server(("127.0.0.1", zero.port)),
        pytest.raises(LaunchFailed, match="in use"),
    ):
        async with open_gloo(zero, {}):
            raise AssertionError("it met nobody")


async def test_who_came_and_left_before_all_were_connected_is_no_riddle() -> None:
    (zero, _) = meetings(2, patience=1.0)
    async with trio.open_nursery() as nursery:

        def come_and_leave() -> None:
            store = _dist.TCPStore(zero.host, zero.port, 2, is_master=False)
            store.set("facts of 1", "{}")

        nursery.start_soon(trio.to_thread.run_sync, come_and_leave)
        with pytest.raises(LaunchFailed, match=r"met all others at .* and could not"):
            async with open_gloo(zero, {}):
                raise AssertionError("it met nobody")


async def test_without_torch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "dpkit.link.gloo")
    monkeypatch.delattr("dpkit.link.gloo")
    with pytest.raises(LaunchFailed, match=r"by torch, and torch is missing; .*dpkit\[torch"):
        import_ballots()


# -- Who and where ---------------------------------------------------------------------------------

open_one = partial(open_group, PLAN, rank=1, count=2, limits=LIMITS)


async def test_an_engine_that_is_to_step_alone_does_whatever_it_is_told() -> None:
    told = Init(addresses=TOGETHER, parallel_config=MEET | {"data_parallel_size": 8})
    async with open_group(None, rank=0, count=2, init=told, limits=LIMITS) as group:
        assert group is None


async def test_the_last_of_a_group_goes_on_alone() -> None:
    told = Init(addresses=ALONE, parallel_config={"dpkit_ranks": [1]})
    async with open_one(init=told) as group:
        assert group is not None
        assert isinstance(group.ballots, LoneBallots)
        group.waves.look(has_work=True)
        group.waves.step()
        (word,) = group.waves.count(await group.ballots.vote(group.waves.ballot(has_work=False)))
        assert word.wave_complete == 0


@pytest.mark.parametrize(
    ("addresses", "told", "error"),
    [
        (ALONE, MEET, "rank 1 is to step together with others, and INIT names no coordinator"),
        (TOGETHER, {}, "neither INIT says where they meet, nor --rendezvous"),
    ],
)
async def test_what_is_missing_is_named(
    addresses: Addresses, told: dict[str, Any], error: str
) -> None:
    with pytest.raises(LaunchFailed, match=error):
        async with open_one(init=Init(addresses=addresses, parallel_config=told)):
            raise AssertionError("it met nobody")


@pytest.mark.parametrize(
    "told",
    [
        {"data_parallel_size": 1},
        {"data_parallel_size": "many"},
        {"data_parallel_size": 2**62},
        {"dpkit_ranks": [0, 2]},
        {"dpkit_ranks": [0, 1, 1]},
        {"dpkit_ranks": 7},
        {"dpkit_ranks": ["1"]},
    ],
)
async def test_an_init_with_a_group_of_others_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="INIT gives rank 1 a group without itself"):
        async with open_one(init=Init(addresses=TOGETHER, parallel_config=told)):
            raise AssertionError("it met nobody")


@pytest.mark.parametrize(
    "told",
    [
        {"data_parallel_master_port": 0},
        {"data_parallel_master_port": "29500"},
        {"data_parallel_master_ip": None},
        {"data_parallel_master_ip": ""},
    ],
)
async def test_an_init_that_names_no_place_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="cannot meet"):
        async with open_one(init=Init(addresses=TOGETHER, parallel_config=MEET | told)):
            raise AssertionError("it met nobody")


@pytest.mark.parametrize("where", ["nowhere", "host:", ":29500", "host:99999"])
async def test_a_rendezvous_that_is_none_is_refused(where: str) -> None:
    plan = evolve(PLAN, rendezvous=where)
    with pytest.raises(WireError, match="cannot meet"):
        async with open_group(plan, rank=0, count=2, init=Init(addresses=TOGETHER), limits=LIMITS):
            raise AssertionError("it met nobody")
