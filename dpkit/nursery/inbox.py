"""The engine's input: requests and aborts, from any number of links, to one busy loop.

Unbounded by itself; admission bounds it (each in-flight request adds one entry and at most one
abort). Knows nothing of scheduling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from attrs import define, field, frozen

from dpkit.errors import EngineLost, RequestRejected
from dpkit.messages import EngineOutput
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from dpkit.messages import EngineId, GenerateRequest, StepReport

    Deliver = Callable[[EngineId, EngineOutput], None]
    OnReport = Callable[[EngineId, StepReport], None]


def duplicate(request_id: str) -> RequestRejected:
    """The error for an id that is in flight already: two requests must not share their outputs."""
    return RequestRejected(
        f"request id {request_id!r} is in flight already; leave request_id out or make it unique",
        request_id=request_id,
    )


def lost(engine: EngineId, request_id: str, why: str, cause: Exception) -> EngineLost:
    """The error for a request whose engine was lost with it."""
    error = EngineLost(
        f"engine {engine} was lost while it held request {request_id}: {why}",
        engine=engine,
        request_id=request_id,
    )
    error.__cause__ = cause
    return error


@frozen(kw_only=True)
class Drained:
    """What came in since the last drain. Aborts are to be applied first."""

    aborts: tuple[str, ...]
    requests: tuple[tuple[GenerateRequest, Deliver], ...] = field(repr=False)


@define(eq=False)
class Sender:
    """Who hands requests to one inbox, and how many: a client's link, or a frontend's port."""

    on_report: OnReport | None = None
    """Told how much work the engine has, after each drain and each step."""
    sent: int = 0
    """Requests handed over, refused ones included."""
    acknowledged: int = 0
    """How many of them had been handed over by the last drain."""


_NOTHING: tuple[None, None] = None, None
NOBODY = Sender()
"""Of a report that is nobody's own."""


class Inbox:
    """Synchronous on the sending side, so that no clean-up path needs an ``await``."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[GenerateRequest, Deliver]] = {}
        self._aborts: dict[str, None] = {}
        self._wake = trio.Event()
        self.closed = False
        self.senders: list[Sender] = []
        self.give_back: Callable[[Iterable[str], Deliver], Iterable[str]] = lambda *_: ()
        """Takes requests from the engine that it does not run: its busy loop's."""

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Queue a request; its outputs go to `deliver`, synchronously, on Trio's thread.

        Raises:
            EngineLost: the inbox is closed; the engine has ended or is about to.
            RequestRejected: a request of this id is queued here already.
        """
        if self.closed:
            raise EngineLost(
                f"request {request.request_id} came too late: its engine takes no more requests",
                request_id=request.request_id,
            )
        if request.request_id in self._requests:
            raise duplicate(request.request_id)
        self._requests[request.request_id] = (request, deliver)
        self._wake.set()

    def abort(self, request_id: str, deliver: Deliver) -> bool:
        """Drop the request here if the engine has not seen it yet, else tell the engine.

        A queued request of the same id whose outputs go elsewhere is another client's, and stays.
        True: it is gone already.
        """
        _, queued_by = self._requests.get(request_id, _NOTHING)
        if queued_by == deliver:
            del self._requests[request_id]
            return True
        self._aborts[request_id] = None
        self._wake.set()
        return False

    def take_back(self, request_ids: Iterable[str], deliver: Deliver) -> list[str]:
        """Drop those of these requests that the engine has not begun, and return them as asked.

        Only those count whose outputs go to `deliver`.
        """
        asked = dict.fromkeys(request_ids)  # a stranger may ask for one twice
        queued = {each for each in asked if self._requests.get(each, _NOTHING)[1] == deliver}
        for request_id in queued:
            del self._requests[request_id]
        drained = [each for each in asked if each not in queued and each not in self._aborts]
        gone = queued.union(self.give_back(drained, deliver))
        return [each for each in asked if each in gone]

    @property
    def queued(self) -> Collection[str]:
        """Ids of the requests that are still to be drained."""
        return self._requests.keys()

    def is_aborted(self, request_id: str) -> bool:
        """Whether an abort of this id is still to be drained."""
        return request_id in self._aborts

    def wake(self) -> None:
        """Have `wait` return, though there may be nothing to drain."""
        self._wake.set()

    def close(self) -> None:
        """Ask the busy loop to end once its engine has nothing left to do."""
        self.closed = True
        self._wake.set()

    def drain(self) -> Drained:
        """Take all that is pending.

        Aborts come first because an id in both lists was aborted in its former life: the abort of
        a request still queued here removed it instead.
        """
        drained = Drained(aborts=tuple(self._aborts), requests=tuple(self._requests.values()))
        self._aborts.clear()
        self._requests.clear()
        for sender in self.senders:
            sender.acknowledged = sender.sent
        if not self.closed:
            self._wake = trio.Event()
        return drained

    async def wait(self) -> None:
        """Wait until `drain` has something to give, or `wake` was called, or all is closed."""
        await self._wake.wait()


def failed(request_id: str, error: Exception) -> EngineOutput:
    """The last output of a request that an error ends."""
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)
