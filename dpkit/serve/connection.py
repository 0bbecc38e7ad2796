"""One HTTP connection: requests one after another, each under a scope that ends with its client.

A connection is one task, which runs the handlers. What the client sends is taken by calls from
outside, all the time, so that it is seen to leave in the midst of an answer. A second task comes
when the socket is full, and goes. Knows nothing of listeners or of other connections.

`Connection.run` owns the transport and the tasks. What goes wrong with one connection ends that
one.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING

import trio

from dpkit.nursery.bell import Bell
from dpkit.serve.exchange import answer_nowait, handle, record, say_why
from dpkit.serve.face import Ending
from dpkit.serve.heads import CONTINUE, JSON, RETRY_AFTER, error_body
from dpkit.serve.outgoing import Outgoing
from dpkit.serve.parser import Message, Refusal, RequestParser
from dpkit.serve.responder import HttpResponder
from dpkit.serve.site import Answered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from dpkit.serve.parser import Event
    from dpkit.serve.site import Site
    from dpkit.serve.transport import Transport

_log = logging.getLogger(__name__)
_NEVER = float("inf")


class Phase(StrEnum):
    """What a connection is doing."""

    IDLE = "idle"
    RECEIVING = "receiving"
    ANSWERING = "answering"
    LINGERING = "lingering"
    """All is said; the client may still read it. What it sends is dropped."""
    CLOSED = "closed"


class Connection:
    """One client's connection.

    Args:
        transport: To the client; closed by `run`.
        site: What the server's connections share.
    """

    def __init__(self, transport: Transport, site: Site) -> None:
        self.phase = Phase.IDLE
        self.heads = site.heads
        self.max_unsent = site.limits.max_unsent
        self.is_one_too_many = False
        """Whether the client is only told to come back later."""
        self.outgoing = Outgoing(transport, self._spawn, self._lose)
        self._transport = transport
        self._site = site
        self._limits = site.limits
        self._parser = RequestParser(site.limits, site.room, transport.peer, site.new_id)
        self._current: HttpResponder | None = None
        """The one whose handler runs."""
        self._latest: HttpResponder | None = None
        """The one that came last: `_current`; or the next one, while that one's handler still
        cleans up after an answer that the client has."""
        self._is_last = False
        """Whether no further request is taken."""
        self._is_retired = False
        self._has_unread = False
        """Whether the client sends, or may send, what nobody will look at."""
        self._held = 0
        # One scope for all handlers: when one is cancelled the connection ends with it.
        self._scope = trio.CancelScope()
        self._bell = Bell()
        self._nursery: trio.Nursery | None = None
        self._deadline = trio.current_time() + site.limits.idle_timeout

    def __repr__(self) -> str:
        return f"<Connection of {self._transport.peer}: {self.phase}, {self.unsent} bytes unsent>"

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to read."""
        return self.outgoing.unsent

    @property
    def idle_until(self) -> float | None:
        """When it would be closed for having no request, None if it has one."""
        is_idle = self.phase is Phase.IDLE and self._current is None
        return self._deadline if is_idle else None

    def _is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    def _enter(self, phase: Phase, seconds: float = _NEVER) -> None:
        self.phase = phase
        self._deadline = trio.current_time() + seconds

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(task)

    async def run(self) -> None:
        """Serve the client until either side has had enough."""
        try:
            async with trio.open_nursery() as self._nursery:
                if self.phase is Phase.CLOSED:
                    return  # before it began: the server stops, or needed the room
                if self.is_one_too_many:
                    self._refuse(503, "there are too many connections: try again later")
                    if self._is_closed():  # it has left
                        return
                self._transport.attach(self._ready)
                # Most clients send with the connection: a probe need not wait for two more rounds
                # of the loop, which may be long.
                self._ready()
                with self._scope:
                    await self._work()
                while not self._is_closed():
                    await self._bell.wait()
        except Exception:  # noqa: BLE001 - the other connections go on
            _log.exception("%s: a fault of the server's own", self)
        finally:
            self.close()
            self._site.room.give_back(self._held)
            # Requests, and bodies with them, go now, and need no garbage collector.
            self._current = self._latest = None
            self.outgoing.let_go()

    # What the server asks for. None of these waits.

    def sweep(self, now: float) -> None:
        """End what has taken too long."""
        if self.outgoing.unsent:
            if now - self.outgoing.moved_at >= self._limits.send_timeout:
                self.stalled()
        elif now >= self._deadline:
            if self.phase is Phase.RECEIVING:
                self._refuse(408, "the request did not come in time")
            else:
                self.close()

    def retire(self) -> None:
        """Take no further request: end now, or after the answer to the one under way."""
        self._is_last = self._is_retired = True
        if self.phase is Phase.IDLE:
            self._hang_up()
        elif self.phase is Phase.LINGERING and not self.unsent:
            self._shut_down()
        elif (responder := self._unanswered()) is not None:
            responder.keep_alive = False

    def abandon(self) -> None:
        """End now; the handler of a request under way is cancelled, and may have a last word."""
        self.retire()
        if self.phase is Phase.RECEIVING:
            self._refuse(503, "the server is stopping")
        else:
            self._cancel(Ending.SHUTDOWN)

    def close(self, *, reset: bool = False) -> None:
        """Be gone, whatever is unsent; harmless if closed."""
        if self.phase is not Phase.CLOSED:
            self._enter(Phase.CLOSED)
            self._parser.close()
            self.outgoing.drop()
            self._transport.close(reset=reset)
            self._bell.ring()

    # What the client sends.

    def _ready(self) -> None:
        """Take what has come: the transport calls."""
        try:
            data = self._transport.receive_nowait()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                self._lose()
            elif self.phase is not Phase.LINGERING:
                self._take(data)
        except Exception:  # noqa: BLE001 - the other connections go on
            _log.exception("%s: a fault of the server's own", self)
            self._lose()

    def _take(self, data: bytes) -> None:
        if (responder := self._unanswered()) is not None:
            if data.strip(b"\r\n"):  # which some clients send after a body
                self._take_no_more(responder)
            return
        events = self._parser.feed(data)
        is_alone = len(events) == 1 and not self._parser.receiving
        for number, event in enumerate(events):
            if self._is_closed():
                self._drop(events[number:])
                return
            if (responder := self._unanswered()) is not None:
                self._take_no_more(responder)
                self._drop(events[number:])
                return
            self._react(event, is_alone=is_alone)
        if self._parser.receiving:
            if (responder := self._unanswered()) is not None:
                self._take_no_more(responder)
            elif self.phase is Phase.IDLE:
                self._enter(Phase.RECEIVING, self._limits.receive_timeout)

    def _drop(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Message):
                self._site.room.give_back(len(event.request.body))

    def _unanswered(self) -> HttpResponder | None:
        latest = self._latest
        return None if latest is None or latest.is_finished else latest

    def _react(self, event: Event, *, is_alone: bool) -> None:
        if isinstance(event, Message):
            self._begin(event, is_alone=is_alone)
        elif isinstance(event, Refusal):
            self._refuse(event.status, event.message)
        else:
            self.outgoing.send(CONTINUE)

    def _take_no_more(self, responder: HttpResponder) -> None:
        """Refuse to be sent a request before the answer to the last one.

        Its bytes would hide the end of the stream, by which we know that the client has gone. So
        they are dropped, and the connection ends after the answer: by HTTP's own rules that tells
        the client to send again what was not answered.
        """
        self._is_last = self._has_unread = True
        responder.keep_alive = False
        self._parser.close()

    def _begin(self, message: Message, *, is_alone: bool) -> None:
        """Have a request answered: at once if that is possible, and nothing came with it."""
        if self.unsent > self.max_unsent:  # it asks again and again, and reads no answer
            self._drop([message])
            self.stalled()
            return
        if not message.keep_alive:
            self._is_last = True
        self._held += len(message.request.body)
        responder = HttpResponder(message.request, not self._is_last, self, trio.current_time())
        self.phase, self._deadline = Phase.ANSWERING, _NEVER
        self._latest = responder
        if self._current is not None:
            return  # it has answered, and cleans up
        if is_alone and answer_nowait(self._site.quick, responder):
            self._settle(responder)
        else:
            self._current = responder
            self._bell.ring()

    # What a request may come to, besides its answer.

    def _cancel(self, ending: Ending) -> None:
        """Cancel the handler, unless its answer is complete; it may still clean up as it likes."""
        responder = self._unanswered()
        if responder is not None and responder.ending is None:
            responder.end(ending)
            if responder is self._current:
                self._scope.cancel()

    def _lose(self) -> None:
        """The client has gone: so ends what is done for it."""
        self._cancel(Ending.CLIENT_GONE)
        self.close()

    def stalled(self) -> None:
        """The client reads nothing: so ends what is done for it."""
        self._cancel(Ending.STALLED)
        self.close(reset=True)

    def failed(self) -> None:
        """What the handler has left to be called has raised."""
        self._cancel(Ending.FAILED)

    # The worker.

    async def _work(self) -> None:
        while self._current is not None or not self._is_closed():
            if (responder := self._current) is not None:
                await self._answer(responder)
                self._current = None if self._latest is responder else self._latest
            else:
                await self._bell.wait()

    async def _answer(self, responder: HttpResponder) -> None:
        try:
            if responder.ending is None:  # else the client left before its turn had come
                await handle(self._site.handler, responder)
        finally:
            self._settle(responder)

    def _settle(self, responder: HttpResponder) -> None:
        if not responder.is_finished and self.phase is not Phase.CLOSED:
            self._conclude(responder)
        if self._latest is responder:  # an idle connection must not keep the body
            self._latest = None
        size = len(responder.request.body)
        self._held -= size
        self._site.room.give_back(size)
        self._site.answered += 1
        if self._site.has_listeners:
            self._site.tell(record(responder))

    def _conclude(self, responder: HttpResponder) -> None:
        responder.end(Ending.SHUTDOWN)  # if nothing else: cancelled from outside
        if responder.status is None:
            say_why(responder)
        else:
            # Cut off so that nobody takes it for complete: where the framing does not show that,
            # by a reset.
            self._hang_up(reset=not responder.shows_cut)

    def finished(self) -> None:
        """The client has its answer, and may ask again."""
        if self.phase is Phase.ANSWERING and self._latest is not None:
            now = self._latest.ended_at = trio.current_time()
            if self._is_last or not self._latest.keep_alive:
                self._hang_up()
            else:
                self.phase, self._deadline = Phase.IDLE, now + self._limits.idle_timeout

    # The end.

    def _refuse(self, status: int, message: str) -> None:
        self._has_unread = True
        body = error_body(status, message)
        headers = (JSON, RETRY_AFTER) if status == 503 else (JSON,)
        own = b"content-length: %d\r\nconnection: close\r\n" % len(body)
        self.outgoing.send(self._site.heads.write(status, headers, own) + body)
        self._site.answered += 1
        self._site.tell(
            Answered(
                request=None,
                peer=self._transport.peer,
                status=status,
                ending=Ending.FINISHED,
                body_sent=len(body),
                seconds=0.0,
            )
        )
        self._hang_up()

    def _hang_up(self, *, reset: bool = False) -> None:
        """Say no more than what is on its way, and give the client time to read that.

        To close at once would reset the connection if the client still sends, and a reset may
        destroy at the client what it has not read yet. Only a server that stops does not wait for
        clients of which that is not to be expected: they may keep a connection for later.
        """
        if self.phase in {Phase.LINGERING, Phase.CLOSED}:
            return
        self._is_last = True
        self._parser.close()
        self._enter(Phase.LINGERING)
        self.outgoing.when_drained(self._reset if reset else self._shut_down)

    def _reset(self) -> None:
        self.close(reset=True)

    def _shut_down(self) -> None:
        if self._is_retired and not self._has_unread:
            self.close()
        elif self.phase is Phase.LINGERING:
            self._enter(Phase.LINGERING, self._limits.linger)
            with suppress(OSError):
                self._transport.shut_down()
