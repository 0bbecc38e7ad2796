"""A body's JSON to what a route wants, or a refusal in words. Knows no route."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from dpkit.serve.errors import bad_request

Body = TypeVar("Body")

_PLACE = re.compile(r"`\$(.*?)`")
_MISSING = re.compile(r"required field `(.+?)`")

# In msgspec's words, which are others in a field that is skipped. Of what ends before the other
# half could, it says only that it was cut off.
_HALF = re.compile("surrogate pair|end of hex escape")
_HALF_AT_THE_END = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}.{1,5}\Z", re.DOTALL)
_TAIL = 12


def decode_body(
    decoder: msgspec.json.Decoder[Body], body: bytes | msgspec.Raw, at: str = ""
) -> Body:
    """Read a body, or a part of it that was kept as it came.

    Args:
        decoder: What it should be.
        body: What it is.
        at: The field, if it is a part.

    Raises:
        ApiError: 400, with the field that is wrong.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `")[0]
        param = _param(str(error), at)
        raise bad_request(f"{param or 'the body'}: {message}", param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _HALF.search(str(error)) or _HALF_AT_THE_END.search(memoryview(body)[-_TAIL:]):
            message = "the body is no Unicode text: it has half of a surrogate pair"
            raise bad_request(message, code="invalid_json") from None
        raise bad_request(f"the body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _param(error: str, at: str) -> str | None:
    place, missing = _PLACE.search(error), _MISSING.search(error)
    found = f"{at}{place[1] if place else ''}" + (f".{missing[1]}" if missing else "")
    return found.removeprefix(".") or None
