"""An engine that breaks the protocol ends its own life, and says how; the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.errors import DpkitError, EngineLost
from dpkit.names import EngineState
from dpkit.nursery import hosts
from dpkit.nursery.events import EventKind
from tests.clusters import slot_of, told
from tests.processes.lab import SUPERVISION, group, open_processes, state_of, wait_down
from tests.processes.rogue import MOST_BYTES, SERVING, STARTING

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.stream import OutputStream

PROCESS = f'max_message = "{MOST_BYTES}B", start_timeout = "1500ms"'
ONCE = SUPERVISION.replace("intensity = 1000", "intensity = 0").replace('"10s"', '"500ms"')

SERVING_ERRORS = {
    "garbage": "WireError: cannot read an output",
    "truncated": "WireError: cannot read an output",
    "frames": "WireError: cannot read an output",
    "oversized": "WireError: engine oversized-0 dropped its connection, or was dropped for",
    "split": "WireError: an output has 98,304 bytes",
    "unknown": 'WireError: engine unknown-0 told of request "somebody else\'s"',
    "again": "WireError: engine again-0 told of request",
    "negative": "WireError: cannot read an output",
    "wave": "WireError: engine wave-0 spoke of waves",
    "dropped": "WireError: engine dropped-0 dropped request r without a word",
    "aborted": "EngineLost: engine aborted-0 is shutting down",
    "dead": "EngineLost: engine dead-0 met an error",
    "anew": "WireError: engine anew-0 broke the protocol",
    "gone": "WireError: engine gone-0 dropped its connection",
    "mute": "EngineLost: engine mute-0 is stuck",
}
STARTING_ERRORS = {
    "silent": "LaunchFailed: .* said HELLO and was told the addresses, but has not said READY: "
    "it is still loading, or in its model's `allocate`",
    "wordless": "LaunchFailed: .* has not said HELLO",
    "twohellos": "WireError: .* now says HELLO",
    "tworeadys": "WireError: .* now says READY|WireError: .* introduces itself anew",
    "rushed": "WireError: .* now says READY",
    "babble": "WireError: .* cannot read a HELLO",
    "nameless": "WireError: .* its ready response is empty",
    "impostor": "LaunchFailed: .* has not said HELLO",
}


@pytest.fixture(autouse=True)
def rogues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what an engine does be told by its name."""
    monkeypatch.setattr(hosts, "WORK", "tests.processes.rogue:work")


def groups(*names: str) -> list[str]:
    """An engine that is as it should be, and some that are not."""
    patient = PROCESS.replace('"1500ms"', '"15s"')  # the first one's is for loading, too
    good = group("good", supervision=ONCE, process=patient)
    return [good, *(group(name, supervision=ONCE, process=PROCESS) for name in names)]


def test_every_rule_has_one_who_breaks_it() -> None:
    assert SERVING.keys() - SERVING_ERRORS.keys() == {"odd"}
    assert STARTING.keys() == STARTING_ERRORS.keys()


async def meet(cluster: Cluster, name: str) -> None:
    """Ask a rogue for something, and see its life end as it should."""
    stream = cluster.client.generate("abcdefgh", engine=f"{name}-0", request_id="r")
    if name == "again":  # it had all that it was to have, by then
        async with stream:
            assert (await stream.read_all()).text == "AA"
    else:
        with pytest.raises(EngineLost) as caught:
            await read(stream)
        assert stream.text in {"", "A"}, "what was said wrong, nobody has got"
        assert caught.value.engine == slot_of(cluster, f"{name}-0").engine
    await wait_down(cluster, f"{name}-0")
    [lost] = told(cluster, EventKind.ENGINE_LOST, of=f"{name}-0")
    assert lost.detail.startswith(SERVING_ERRORS[name])


async def read(stream: OutputStream) -> None:
    """Read to the end."""
    async with stream:
        await stream.read_all()


async def serve_on(cluster: Cluster, until_set: trio.Event) -> None:
    """See the good one serve all the time."""
    while not until_set.is_set():
        completion = await cluster.client.complete("undisturbed", engine="good-0")
        assert completion.text == "undisturbed"


async def test_who_breaks_the_protocol_ends_its_life_and_the_others_go_on() -> None:
    """All of them side by side, one request each."""
    async with open_processes(*groups(*SERVING_ERRORS)) as cluster:
        over = trio.Event()
        async with trio.open_nursery() as others:
            others.start_soon(serve_on, cluster, over)
            for name in SERVING_ERRORS:
                await meet(cluster, name)
            over.set()
        assert state_of(cluster, "good-0") is EngineState.READY
        assert len(told(cluster, EventKind.ENGINE_LOST)) == len(SERVING_ERRORS)


async def test_who_breaks_the_handshake_does_not_come_up_and_the_others_do() -> None:
    async with open_processes(*groups(*STARTING_ERRORS)) as cluster:
        for name, words in STARTING_ERRORS.items():
            await wait_down(cluster, f"{name}-0")
            [lost] = told(cluster, EventKind.ENGINE_LOST, of=f"{name}-0")
            assert pytest.RaisesExc(DpkitError, match=words).matches(DpkitError(lost.detail))
        assert (await cluster.client.complete("hello")).text == "hello"


async def test_what_is_odd_and_harmless_is_put_up_with() -> None:
    async with open_processes(*groups("odd")) as cluster:
        assert (await cluster.client.complete("abc", engine="odd-0", max_tokens=2)).text == "AB"
        slot_of(cluster, "odd-0").life.lose(EngineLost("that was all it can do"))
        await wait_down(cluster, "odd-0")
