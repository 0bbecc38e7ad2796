"""Keys that open an API. Nothing is told of them, neither in a message nor by the time it takes."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from dpkit.serve.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.serve.face import Request

_CHALLENGE = ((b"www-authenticate", b"Bearer"),)


class Keys:
    """The keys of one API; none: it is open.

    Args:
        keys: As clients send them.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __repr__(self) -> str:
        return f"<Keys: {len(self._digests)}>"

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, request: Request) -> str | None:
        """Whose key it is that a request brings: ``key-0``, ``key-1``; None if none is needed.

        Raises:
            ApiError: 401, it brings none or a wrong one.
        """
        if not self._digests:
            return None
        scheme, _, key = (request.header("authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "a key is needed: send `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="missing_api_key", headers=_CHALLENGE)
        digest = _digest(key.strip())
        # All are compared, however soon one fits, and each in constant time.
        fits = [hmac.compare_digest(digest, each) for each in self._digests]
        if not any(fits):
            raise ApiError(
                401, "this key opens nothing here", code="invalid_api_key", headers=_CHALLENGE
            )
        return f"key-{fits.index(True)}"


def _digest(key: str) -> bytes:
    """Of equal length for all keys, so that the length of one is not told either."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
