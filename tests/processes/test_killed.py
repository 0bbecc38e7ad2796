"""An engine's process is killed: what is undisturbed, what is tried again, what ends how."""

# ruff: noqa: N802, PT012 - the reports' numbers are capitals; losses happen while streams are read
from __future__ import annotations

import os
import random
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import define, field

from dpkit.errors import EngineLost
from dpkit.names import EngineState
from dpkit.nursery.events import EventKind
from dpkit.testing.history import History
from dpkit.testing.leaks import Belongings
from dpkit.testing.processes import descendants, is_alive
from tests.clusters import slot_of, told
from tests.processes.lab import (
    group,
    is_ready,
    kill,
    life_of,
    open_processes,
    sockets_of,
    wait_back,
)
from tests.waiting import until

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster
    from dpkit.testing.history import Entry

REQUESTS = 12
ANEW = (EventKind.REQUEST_RETRIED, EventKind.REQUEST_RESUMED)


@define
class Round:
    """Some requests, and the loss of one engine among them."""

    number: int
    rng: random.Random
    history: History
    elsewhere: set[str] = field(factory=set)
    """Ids of those that other engines had at that moment."""
    prompts: dict[str, str] = field(factory=dict)
    entries: list[Entry] = field(factory=list)

    async def run(self, cluster: Cluster) -> None:
        victim = f"e-{self.rng.randrange(3)}"
        epoch = slot_of(cluster, victim).engine.epoch
        async with trio.open_nursery() as nursery:
            for number in range(REQUESTS):
                nursery.start_soon(self._ask, cluster, number)
            await trio.sleep(self.rng.uniform(0, 0.12))
            for slot in cluster._slots:
                if slot.name != victim:
                    self.elsewhere.update(cluster._flights[0].placed_on(slot.engine))
            pid = kill(cluster, victim)
            nursery.start_soon(self._ask, cluster, REQUESTS)
            nursery.start_soon(self._audit, cluster, nursery)
        await wait_back(cluster, victim, epoch + 1)
        assert not is_alive(pid)

    async def _ask(self, cluster: Cluster, number: int) -> None:
        await trio.sleep(self.rng.uniform(0, 0.04))
        name, prompt = f"{self.number}-{number}", f"{number:02} and so on, to the end"
        self.prompts[name] = prompt[: self.rng.randrange(3, len(prompt))]
        self.entries.append(
            await self.history.complete(
                cluster.client, self.prompts[name], request_id=name, resume=number % 2 == 1
            )
        )

    async def _audit(self, cluster: Cluster, others: trio.Nursery) -> None:
        """See the books agree, at every moment."""
        while len(others.child_tasks) > 1:
            assert cluster.audit() == ()
            await trio.sleep(0.002)

    def check(self, cluster: Cluster) -> None:
        """Each request has what it is to have."""
        anew = {event.request_id for event in told(cluster, *ANEW)}
        for entry in self.entries:
            whole = [*self.prompts[entry.request_id].encode(), 256]
            name = entry.request_id
            if entry.outcomes == ["stop"]:
                assert entry.tokens == whole, name
            else:
                assert entry.outcomes == ["EngineLost"], name
                assert name not in self.elsewhere, f"{name} was on an engine that lives"
                assert not entry.resumes, name
                assert entry.tokens == whole[: len(entry.tokens)] != [], f"{name}: not tried again"
        assert len(self.entries) == REQUESTS + 1
        assert not anew & self.elsewhere, "those on engines that live are not tried again"


def belongings() -> Counter[str]:
    """How much of everything this process has now."""
    now = Belongings.now()
    return Counter(
        tasks=now.tasks,
        threads=len(now.threads),
        descriptors=len(now.descriptors),
        descendants=len(descendants(os.getpid())),
    )


async def kill_again_and_again(times: int, seed: int) -> Counter[str]:
    """Kill one of three engines under load, so many times; returns how requests ended."""
    rng, history = random.Random(seed), History()
    storm = "admission.retry_budget = 1"  # for losses every few moments, more than a share
    async with open_processes(group(model="Paced", count=3), settings=storm) as cluster:
        await until(lambda: all(is_ready(cluster, f"e-{n}") for n in range(3)))
        before = belongings()
        for number in range(times):
            each = Round(number, rng, history)
            await each.run(cluster)
            each.check(cluster)
        await until(lambda: not belongings() - before)
        assert [slot.state for slot in cluster._slots] == [EngineState.READY] * 3
        assert len(told(cluster, EventKind.ENGINE_LOST)) <= times
        history.check(cluster)
    assert sum(slot.restarts for slot in cluster._slots) == times
    history.check(cluster)
    return Counter(entry.outcomes[0] for entry in history.entries)


async def test_E01_one_of_three_is_killed_at_any_moment_and_nobody_else_notices() -> None:
    ends = await kill_again_and_again(6, seed=1)
    assert ends["stop"] > ends["EngineLost"] > 0
    assert ends.keys() == {"stop", "EngineLost"}


@pytest.mark.slow
async def test_E01_J13_two_hundred_times() -> None:
    ends = await kill_again_and_again(200, seed=2)
    assert ends.keys() == {"stop", "EngineLost"}


async def test_what_a_killed_engine_had_delivered_stays_readable() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        stream = cluster.client.generate("abcdefghijkl", engine="e-0")
        with pytest.raises(
            EngineLost, match=r"held request \S+: its process \d+ was killed by SIGKILL"
        ) as caught:
            async with stream:
                while len(stream.text) < 3:
                    await stream.__anext__()
                kill(cluster, "e-0")
                await stream.read_all()
        assert "abcdefghijkl".startswith(stream.text)
        assert caught.value.engine == stream.engine
        await wait_back(cluster, "e-0", 1)
        said = str(cluster.statistics().engines[0].last_error)
        assert re.search(r"engine e-0 is lost: its process \d+ was killed by SIGKILL", said)


async def test_a_seeded_text_that_is_resumed_is_the_text_of_an_undisturbed_run() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        async with cluster.client.generate("abcdefghijklmnop", resume=True) as stream:
            await stream.__anext__()
            kill(cluster, stream.engine.name)
            completion = await stream.read_all()
        assert completion.text == "abcdefghijklmnop"
        assert cluster.client.statistics().resumed == 1
        await wait_back(cluster, "e-0", 1)


async def test_J11_a_request_sent_to_a_process_that_has_just_died_goes_elsewhere() -> None:
    async with open_processes(group(model="Paced", count=2)) as cluster:
        kill(cluster, "e-0")
        async with trio.open_nursery() as nursery:
            for number in range(8):  # before anything can have been noticed
                nursery.start_soon(ask, cluster, f"{number} hello")
        await wait_back(cluster, "e-0", 1)
        assert cluster.client.statistics().retried >= 1
        assert len(told(cluster, EventKind.ENGINE_LOST)) == 1


async def ask(cluster: Cluster, prompt: str) -> None:
    """Ask for an echo, and get it."""
    assert (await cluster.client.complete(prompt)).text == prompt


async def test_E10_every_killed_engine_comes_back_each_time() -> None:
    async with open_processes(group(count=2)) as cluster:
        for epoch in range(1, 4):
            for name in ("e-0", "e-1"):
                pid = kill(cluster, name)
                await wait_back(cluster, name, epoch)
                assert life_of(cluster, name).pid != pid
        await ask(cluster, "all is well")


async def test_E08_an_engine_killed_too_often_is_given_up_and_the_other_serves_on() -> None:
    supervision = 'intensity = 1, backoff = "1ms"'
    async with open_processes(group(count=2, supervision=supervision)) as cluster:
        kill(cluster, "e-0")
        await wait_back(cluster, "e-0", 1)
        kill(cluster, "e-0")
        await until(lambda: told(cluster, EventKind.ENGINE_DOWN))
        assert slot_of(cluster, "e-0").state is EngineState.DOWN
        await ask(cluster, "hello")


async def test_the_socket_files_of_a_life_go_with_it() -> None:
    async with open_processes(group(count=2)) as cluster:
        assert len(sockets_of(cluster)) == 2 * 3
        for life in range(3):
            kill(cluster, "e-0")
            await wait_back(cluster, "e-0", life + 1)
            assert len(sockets_of(cluster)) == 2 * 3
