"""The messages of a conversation: counted before they are read, then made what templates take.

A million of them, or of their parts, takes most of a second to read, during which no other thread
of the process runs. Knows no model and no template.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from dpkit.serve.decoding import decode_body
from dpkit.serve.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_PIECES = 8192
"""Messages that a conversation may have, and parts of messages that it may have altogether."""


class ContentPart(msgspec.Struct):
    """A piece of a message."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class _UnreadMessage(msgspec.Struct):
    """The same as it is read at first, if there may be too many."""

    role: str
    content: msgspec.Raw = msgspec.Raw(b"null")


_MESSAGES = msgspec.json.Decoder(list[Message] | None)
_MESSAGE = msgspec.json.Decoder(_UnreadMessage)
_CONTENT = msgspec.json.Decoder(str | list[ContentPart] | None)
_PARTS = msgspec.json.Decoder(list[msgspec.Raw])
_END = msgspec.Raw()

_SHORT = 64 * 1024
"""Bytes of a list that is read without a look: a thousand messages or so."""


@cache
def _few() -> msgspec.json.Decoder[Any]:
    """Read a list that ends soon.

    Of a list, msgspec looks at the length when all of it is read; of an array-like struct before.
    """
    fields = [(f"item_{number}", msgspec.Raw, _END) for number in range(MOST_PIECES)]
    few = msgspec.defstruct("Few", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(few)


def read_messages(told: msgspec.Raw) -> list[Message] | None:
    """Read ``messages`` as they stand in a body.

    Raises:
        ApiError: 400, they are nothing of the kind, or too many.
    """
    json = bytes(told)
    if json.count(b"{") <= MOST_PIECES or not json.startswith(b"["):  # each piece has a brace
        return decode_body(_MESSAGES, json, "messages")
    return list(_counted(json))


def _counted(json: bytes) -> Iterator[Message]:
    """Others have a turn after each."""
    parts = 0
    for index, each in enumerate(_items(json)):
        where = f"messages[{index}]"
        unread = decode_body(_MESSAGE, each, where)
        content = bytes(unread.content)
        if content.startswith(b"["):
            parts += len(_items(content))
            if parts > MOST_PIECES:
                raise _too_many()
        yield Message(role=unread.role, content=decode_body(_CONTENT, content, f"{where}.content"))


def _items(json: bytes) -> Sequence[msgspec.Raw]:
    if len(json) <= _SHORT:
        return decode_body(_PARTS, json, "messages")
    try:
        items = msgspec.structs.astuple(_few().decode(json))
    except msgspec.ValidationError:
        raise _too_many() from None
    return [each for each in items if each is not _END]


def _too_many() -> Exception:
    return bad_request(
        f"messages: more than {MOST_PIECES} messages, or parts of them, are not read", "messages"
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Make messages what chat templates take.

    Raises:
        ApiError: 400, one has what is no text.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Message) -> dict[str, str]:
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text" or part.text is None:
                where = f"messages[{index}].content[{number}]"
                raise bad_request(f"{where}: only text is understood here, not {part.type}", where)
        content = "".join(part.text or "" for part in content)
    # What OpenAI calls developer, templates know as system.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content or ""}
