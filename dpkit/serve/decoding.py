"""A body's JSON to what a route wants, or a refusal in words. Knows no route."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from dpkit.serve.errors import bad_request

Body = TypeVar("Body")

_PLACE = re.compile(r"`\$(.*?)`|required field `(.+?)`")


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
        raise bad_request(f"the body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _param(error: str, at: str) -> str | None:
    place = _PLACE.search(error)
    if place and place[2]:
        return place[2]
    return f"{at}{place[1] if place else ''}".removeprefix(".") or None
