"""Bodies of which some fields stay JSON until they are known to be short enough to be read.

Millions of objects take seconds to read, during which no other thread of the process runs; to skip
them takes a tenth of a second. Knows no route.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from dpkit.serve.decoding import decode_body
from dpkit.serve.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Kind = TypeVar("Kind", bound=msgspec.Struct)

LONGEST = 256 * 1024
"""Bytes of JSON that a bounded field may have: a few milliseconds, whatever it is."""


class BodyReader(Generic[Kind]):
    """Reads bodies of one kind.

    Args:
        kind: What a body is; its fields have defaults of None, or are required.
        bounded: Fields that may have `LONGEST` bytes.
        own: For fields that are read in a way of their own: what makes a value of their JSON.
    """

    def __init__(
        self, kind: type[Kind], bounded: Iterable[str], **own: Callable[[msgspec.Raw], Any]
    ) -> None:
        known = {each.name: each for each in msgspec.structs.fields(kind)}
        self._readers: dict[str, Callable[[msgspec.Raw], Any]] = {
            name: partial(_read_short, name, msgspec.json.Decoder(known[name].type))
            for name in bounded
        }
        self._readers.update(own)
        unread: list[Any] = [
            (name, msgspec.Raw) if known[name].required else (name, msgspec.Raw, None)
            for name in self._readers
        ]
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct(f"Unread{kind.__name__}", unread, bases=(kind,), kw_only=True)
        )

    def read(self, body: bytes) -> Kind:
        """Read one.

        Raises:
            ApiError: 400, with the field that is wrong, or too long.
        """
        asked: Kind = decode_body(self._decoder, body)
        for name, reader in self._readers.items():
            if (told := getattr(asked, name)) is not None:  # else it was left out
                setattr(asked, name, reader(told))
        return asked


def _read_short(name: str, decoder: msgspec.json.Decoder[Any], told: msgspec.Raw) -> Any:
    json = bytes(told)
    if len(json) > LONGEST:
        raise bad_request(
            f"{name}: {len(json)} bytes of JSON are more than the {LONGEST} that it may have", name
        )
    return decode_body(decoder, json, name)
