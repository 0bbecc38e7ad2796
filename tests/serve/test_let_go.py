"""What a request held is gone when it has ended, however it did: nobody waits for the collector."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.errors import DeadlineExceeded, RequestRejected
from dpkit.messages import GenerateRequest
from dpkit.nursery.flight import Flight
from dpkit.nursery.stream import OutputStream
from dpkit.nursery.submission import Submission
from dpkit.serve.answers import Streamed, Whole
from dpkit.serve.choices import Choice, StreamedChoice
from tests.nursery.lab import Lab, Timed, settle
from tests.serve.desk import CHAT, COMPLETIONS, SLOW, open_desk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dpkit.nursery.client import Client

KINDS = {Choice, Flight, GenerateRequest, OutputStream, Streamed, StreamedChoice, Submission, Whole}


def alive() -> Counter[str]:
    """How many there are of what holds a prompt, by the names of their classes."""
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KINDS)


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def finish(client: Client) -> None:
    await client.complete("hello")


async def leave(client: Client) -> None:
    async with client.generate("hello") as stream:
        await stream.__anext__()


async def fit_nowhere(client: Client) -> None:
    with pytest.raises(RequestRejected):
        async with client.generate("hello", max_tokens=10_000):
            pass


async def be_refused_by_the_engine(client: Client) -> None:
    async with client.generate("hello", stop_token_ids=[300]) as stream:
        with pytest.raises(RequestRejected):
            await stream.read_all()


async def be_late(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.complete("hello", timeout=0.15)


async def submit_what_fits_nowhere(client: Client) -> None:
    with pytest.raises(RequestRejected):
        client.submit("hello", max_tokens=10_000, sink=print)


async def submit_what_is_refused(client: Client) -> None:
    outputs: list[Any] = []
    with closing(client.submit("hello", stop_token_ids=[300], sink=outputs.append)):
        await settle()
    assert isinstance(outputs[-1].error, RequestRejected)


@pytest.mark.parametrize(
    "ask",
    [
        finish,
        leave,
        fit_nowhere,
        be_refused_by_the_engine,
        be_late,
        submit_what_fits_nowhere,
        submit_what_is_refused,
    ],
)
async def test_a_request_of_a_program(
    autojump_clock: object, ask: Callable[[Client], Awaitable[None]]
) -> None:
    async with Lab([Timed()]).open() as cluster:
        before = alive()
        await ask(cluster.client)
        await settle()
        await settle()
        assert alive() == before


async def test_what_it_failed_with_is_still_told_after_it_was_left(autojump_clock: object) -> None:
    async with Lab([Timed()]).open() as cluster:
        async with cluster.client.generate("hello", stop_token_ids=[300], request_id="r") as stream:
            with pytest.raises(RequestRejected) as within:
                await stream.read_all()
        with pytest.raises(RequestRejected) as afterwards:
            await stream.read_all()
        assert str(afterwards.value) == str(within.value)
        assert afterwards.value.request_id == "r"
        assert afterwards.value.engine == within.value.engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"prompt": "hello"}, 200),
        (COMPLETIONS, {"prompt": ["hello", "there"], "n": 2}, 200),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}, 200),
        (COMPLETIONS, {"prompt": "a" * 70_000}, 400),
        (COMPLETIONS, {"prompt": ""}, 400),
        (COMPLETIONS, {"prompt": "hello", "stop_token_ids": [300]}, 400),
        (COMPLETIONS, {"prompt": "hello", "timeout": 0.15, "ignore_eos": True}, None),
    ],
)
async def test_a_request_over_http(
    autojump_clock: object, path: str, fields: dict[str, Any], status: int | None, stream: bool
) -> None:
    async with open_desk(SLOW) as desk:
        before = alive()
        reply = await desk.post(path, {**fields, "stream": stream})
        assert status in {None, reply.status}
        desk.generated.clear()  # which it keeps for tests
        del reply
        await trio.sleep(1)
        assert alive() == before
