"""An engine's input: synchronous on the sending side, aborts before requests."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from dpkit.errors import EngineLost, RequestRejected
from dpkit.messages import EngineId, EngineOutput, GenerateRequest
from dpkit.nursery.inbox import Drained, Inbox


def _ask(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt_token_ids=(1,))


def _here(_engine: EngineId, _output: EngineOutput) -> None:
    """Where one client's outputs go."""


def _there(_engine: EngineId, _output: EngineOutput) -> None:
    """Where another's go."""


def test_drain_takes_all_in_order() -> None:
    inbox = Inbox()
    for request_id in "abc":
        inbox.submit(_ask(request_id), _here)
    inbox.abort("y", _here)
    inbox.abort("z", _here)
    inbox.abort("y", _here)
    requests = tuple((_ask(request_id), _here) for request_id in "abc")
    assert inbox.drain() == Drained(aborts=("y", "z"), requests=requests)
    assert inbox.drain() == Drained(aborts=(), requests=())


def test_an_abort_drops_a_request_that_the_engine_has_not_seen() -> None:
    inbox = Inbox()
    inbox.submit(_ask("a"), _here)
    inbox.abort("a", _here)
    assert inbox.drain() == Drained(aborts=(), requests=())


def test_an_id_may_come_back_after_its_abort() -> None:
    inbox = Inbox()
    inbox.abort("a", _here)  # of a request that the engine has
    inbox.submit(_ask("a"), _here)
    assert inbox.drain() == Drained(aborts=("a",), requests=((_ask("a"), _here),))


def test_an_abort_never_drops_another_clients_request_of_the_same_id() -> None:
    inbox = Inbox()
    inbox.submit(_ask("a"), _there)
    inbox.abort("a", _here)  # means the one that the engine has, not the one in the queue
    assert inbox.drain() == Drained(aborts=("a",), requests=((_ask("a"), _there),))


def test_an_id_is_queued_once() -> None:
    inbox = Inbox()
    inbox.submit(_ask("a"), _here)
    with pytest.raises(RequestRejected, match="'a' is in flight already"):
        inbox.submit(_ask("a"), _there)


def test_a_closed_inbox_refuses_requests_and_takes_aborts() -> None:
    inbox = Inbox()
    inbox.submit(_ask("a"), _here)
    inbox.close()
    with pytest.raises(EngineLost, match="takes no more requests"):
        inbox.submit(_ask("b"), _here)
    inbox.abort("x", _here)
    assert inbox.drain() == Drained(aborts=("x",), requests=((_ask("a"), _here),))


@pytest.mark.parametrize("what", ["submit", "abort", "close"])
async def test_whatever_comes_wakes_the_engine(what: str) -> None:
    inbox = Inbox()
    inbox.submit(_ask("earlier"), _here)
    inbox.drain()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        if what == "submit":
            inbox.submit(_ask("a"), _here)
        elif what == "abort":
            inbox.abort("a", _here)
        else:
            inbox.close()
    await inbox.wait()  # and nothing that is still to be drained is waited for
