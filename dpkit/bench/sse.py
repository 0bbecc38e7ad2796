"""Server-sent events of OpenAI's routes: bytes into events, and which of them are tokens.

An event is a line that begins with ``data:``; this API has no other, and no events of several
lines. Sans-IO. Knows no connection and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE = b"[DONE]"

_LONGEST = 2**24  # bytes of a line: more than any event that is meant well


class Delta(msgspec.Struct):
    """What a chat's event adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """A choice of an event."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether it brings a token, which may have no text of its own yet.

        The first event of a chat tells the role and the last one of an answer the reason: neither
        need have one.
        """
        if self.delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        delta = self.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct):
    """Tokens, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """One event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class BadEvent(ValueError):  # noqa: N818 - reads as what happened
    """What came is no event of this API."""


_decode = msgspec.json.Decoder(Event).decode


class EventReader:
    """Cuts a body into events, wherever its pieces end."""

    def __init__(self) -> None:
        self._begun = b""
        self.is_done = False
        """Whether ``[DONE]`` has come."""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take bytes; give the events that are whole now.

        Raises:
            BadEvent: they make no sense.
        """
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > _LONGEST:
            raise BadEvent(f"an event is longer than {_LONGEST:,} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == DONE:
                self.is_done = True
                continue
            try:
                yield _decode(payload)
            except msgspec.MsgspecError as error:
                raise BadEvent(f"an event cannot be read: {error}: {payload[:80]!r}") from error
