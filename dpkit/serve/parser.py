"""From bytes to requests: llhttp's strict grammar, and the rules and limits that it leaves to us.

No I/O: `RequestParser.feed` takes bytes however they were split and says what happened. What two
servers in a row might understand differently (request smuggling) is refused. Owns the bytes of the
request that is under way.

llhttp itself refuses bare LF and CR, NUL, folded headers, a Content-Length that is twice there, or
no number, or beside a Transfer-Encoding, and chunk sizes that are none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import httptools
from attrs import define, frozen, setters

from dpkit.serve.face import Request
from dpkit.serve.target import BadTarget, split_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.serve.limits import HttpLimits, Room

_VERSIONS = ("1.1", "1.0")
_FRAMING = {b"content-length", b"transfer-encoding"}
_STEERING = {b"host", b"expect", b"x-request-id"} | _FRAMING
_FEW_WORDS = 2048
"""Bytes of a head that is remembered: there may be many thousands of connections."""
_GOOD_ID = re.compile(rb"[!-~]{1,128}")


@define(eq=False, on_setattr=setters.frozen)  # as `Request` is, for its reasons
class Message:
    """One whole request. Its body's bytes are its receiver's, who gives them back to the room."""

    request: Request
    keep_alive: bool
    """Whether the client may send another one afterwards."""


@frozen(kw_only=True)
class Refusal:
    """What came is no request that is served here; nothing after it will be understood."""

    status: int
    message: str


@frozen
class Expectation:
    """The client sends the body when it is told to: ``100 Continue``."""


Event: TypeAlias = Message | Refusal | Expectation
_Head: TypeAlias = tuple[str, str, str, str, str | None, bool]
"""What is known of a request before its body: see `RequestParser._message`."""
_Words: TypeAlias = tuple[_Head, bytes, tuple[tuple[bytes, bytes], ...]]
"""A head, its target, and its headers."""
_EXPECTATION = Expectation()


class RequestParser:
    """Parses what one connection brings, request after request.

    Args:
        limits: Sizes of heads and bodies.
        room: Where the bytes of bodies are taken from. Whoever is given a `Message` gives those of
            its body back; `close` those of an incomplete one.
        peer: Who sends.
        new_id: Names a request whose client has not.
    """

    def __init__(
        self, limits: HttpLimits, room: Room, peer: str, new_id: Callable[[], str]
    ) -> None:
        self.receiving = False
        """Whether a request has begun and is not complete."""
        self._limits = limits
        self._max_head = limits.max_head
        self._room = room
        self._peer = peer
        self._new_id = new_id
        self._events: list[Event] = []
        self._refused = False
        self._raw = 0
        self._opening = b""
        self._understood: _Words | None = None  # what the newest request said
        self._known = b""  # a request that came all at once, had no body, and let others come
        self._meaning: _Words | None = None
        self._llhttp = httptools.HttpRequestParser(self)
        self._begin()

    def _begin(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._steering: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        self._head: _Head | None = None
        self._upgrades = False
        self._expects = False
        self._body: list[bytes] = []
        self._body_size = 0

    def feed(self, data: bytes) -> Sequence[Event]:
        """Take what the connection brought; after a refusal nothing happens any more."""
        if self._refused:
            return ()
        begins = not self.receiving
        if begins:
            # Who polls says the same again and again. Between requests llhttp remembers nothing, so
            # it would understand the same.
            if data == self._known and self._meaning is not None:
                return (self._message(*self._meaning),)
            self._opening = data
        self._raw += len(data)
        self._parse(data)
        if not self.receiving:
            self._opening = b""
            self._raw = 0
        elif not self._refused:
            self._check_incomplete()
        events, self._events = self._events, []
        if begins and not self.receiving and len(events) == 1:
            self._remember(data, events[0])
        return events

    def _remember(self, data: bytes, event: Event) -> None:
        is_whole = isinstance(event, Message) and event.keep_alive and not event.request.body
        if is_whole and len(data) <= _FEW_WORDS:
            self._known, self._meaning = data, self._understood

    def close(self) -> None:
        """Give back what an incomplete request has taken; nothing is parsed any more."""
        self._refused = True
        self._drop()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._llhttp.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._resume(data[upgrade.args[0] :])
            except httptools.HttpParserInvalidMethodError:
                # A word that is no method, or no HTTP at all, such as a TLS greeting.
                is_word = self._opening.lstrip(b"\r\n")[:1].isalpha()
                self._refuse(501 if is_word else 400, "this is no HTTP method")
                return
            except httptools.HttpParserError as error:
                self._refuse(400, f"this is no HTTP request: {error}")
                return
            else:
                return

    def _resume(self, rest: bytes) -> bytes:
        """Have the body of a request that asks for another protocol parsed, which llhttp does not.

        HTTP lets a server ignore ``Upgrade``; Java's client asks for it with every first request.
        Returns what is to be parsed on: a head that frames the body likewise, and the rest.
        """
        self._llhttp = httptools.HttpRequestParser(self)
        if self._refused:
            return b""
        framing = (b"%b: %b\r\n" % each for each in self._headers if each[0] in _FRAMING)
        return b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n", rest))

    def _refuse(self, status: int, message: str) -> None:
        if not self._refused:
            self.close()
            self._events.append(Refusal(status=status, message=message))

    def _drop(self) -> None:
        self.receiving = False
        self._room.give_back(self._body_size)
        self._begin()

    def _check_incomplete(self) -> None:
        """Look at what the callbacks do not see: a line without end, the framing of chunks."""
        if self._head is None:
            if self._raw > self._limits.max_head:
                self._refuse_head()
        elif self._raw - self._body_size > self._limits.max_head + self._limits.max_body:
            self._refuse(413, "the body's chunks are too small for their number")
        elif self._expects:
            self._expects = False
            if not self._body:
                self._events.append(_EXPECTATION)

    def _refuse_head(self) -> None:
        limit = self._limits.max_head
        self._refuse(431, f"request line and headers are longer than {limit} bytes")

    # What llhttp calls. After a refusal it may go on to the end of what it was fed.

    def on_message_begin(self) -> None:
        """A request has begun; or `_resume` goes on with one, whose head is known then."""
        if not self._refused:
            self.receiving = True

    def on_url(self, part: bytes) -> None:
        """Take a part of the target."""
        if self._head is None:
            self._target += part
            self._head_size += len(part)
            if self._head_size > self._max_head:
                self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers come here too: they count, and are dropped."""
        self._head_size += len(name) + len(value) + 4
        if self._head_size > self._max_head:
            self._refuse_head()
        elif self._head is None:
            header = (name.lower(), value.rstrip(b" \t"))
            self._headers.append(header)
            if header[0] in _STEERING:
                self._steering.append(header)

    def on_headers_complete(self) -> None:
        """Check the head before anything of the body is taken."""
        if self._refused or self._head is not None:
            return
        self._opening = b""
        try:
            self._head = self._check_head()
        except _RefusedError as error:
            self._refuse(error.status, str(error))
        else:
            self._upgrades = self._llhttp.should_upgrade()

    def _check_head(self) -> _Head:
        method, version = self._llhttp.get_method().decode(), self._llhttp.get_http_version()
        if version not in _VERSIONS:
            raise _RefusedError(505, f"HTTP/{version} is not spoken here: HTTP/1.1 is")
        if method == "CONNECT":
            raise _RefusedError(501, "this is no proxy")
        given_id = self._check_steering(version)
        try:
            path, query = split_target(method, self._target)
        except BadTarget as error:
            raise _RefusedError(400, str(error)) from error
        return method, path, query, version, given_id, self._llhttp.should_keep_alive()

    def _check_steering(self, version: str) -> str | None:
        """Check what frames a request, or steers it; returns the client's id for it."""
        hosts = 0
        given_id = None
        for name, value in self._steering:
            if name == b"host":
                hosts += 1
            elif name == b"x-request-id":
                if _GOOD_ID.fullmatch(value):
                    given_id = value.decode("ascii")
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise _RefusedError(501, "no transfer encoding but chunked is known here")
                if version == "1.0":
                    raise _RefusedError(400, "HTTP/1.0 has no transfer encodings")
            elif name == b"content-length":
                if int(value) > self._limits.max_body:
                    raise self._body_error()
            elif value.lower() != b"100-continue":
                raise _RefusedError(417, "no expectation but 100-continue is known here")
            else:
                self._expects = version == "1.1"
        if hosts > 1 or (not hosts and version == "1.1"):
            raise _RefusedError(400, "a request has exactly one Host header")
        return given_id

    def _body_error(self) -> _RefusedError:
        return _RefusedError(413, f"the body is longer than {self._limits.max_body} bytes")

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        if self._refused:
            return
        if self._body_size + len(part) > self._limits.max_body:
            error = self._body_error()
            self._refuse(error.status, str(error))
        elif not self._room.take(len(part)):
            self._refuse(503, "the bodies of other requests take all the room: try again later")
        else:
            self._body_size += len(part)
            self._body.append(part)

    def on_message_complete(self) -> None:
        """Pass the request on, unless its body is still to come by way of `_resume`."""
        if self._upgrades:
            self._upgrades = False
        elif self._head is not None:
            if not self._head[-1]:  # nothing may follow, which llhttp does remember
                self._meaning = None
            self._understood = self._head, self._target, tuple(self._headers)
            self._events.append(self._message(*self._understood))
            self.receiving = False
            self._begin()

    def _message(
        self, head: _Head, target: bytes, headers: tuple[tuple[bytes, bytes], ...]
    ) -> Message:
        method, path, query, version, given_id, keep_alive = head
        request = Request(
            method=method,
            path=path,
            query=query,
            headers=headers,
            body=b"".join(self._body),
            peer=self._peer,
            id=given_id or self._new_id(),
            target=target,
            http_version=version,
        )
        return Message(request, keep_alive)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
