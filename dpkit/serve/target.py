"""The target of a request: which path, which query. Knows nothing of connections."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes


class BadTarget(ValueError):  # noqa: N818 - reads as what it is
    """A target that names no path; the message says what is wrong with it."""


def split_target(method: str, target: bytes) -> tuple[str, str]:
    """Path, percent-decoded, and query, as it came.

    Takes ``/path?query``, the absolute form that proxies are sent, and ``*`` of OPTIONS.

    Raises:
        BadTarget: it is none of those.
    """
    if target == b"*":
        if method != "OPTIONS":
            raise BadTarget("only OPTIONS can ask for *")
        return "*", ""
    if not target.startswith(b"/"):
        target = _without_authority(target)
    if b"#" in target or not target.isascii():
        raise BadTarget("the target has a fragment, or what is not ASCII")
    path, _, query = target.partition(b"?")
    if b"%" in path:
        path = unquote_to_bytes(path)
    return path.decode("utf-8", "replace"), query.decode("ascii")


def _without_authority(target: bytes) -> bytes:
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in {b"http", b"https"}:
        raise BadTarget("the target is no path")
    for place, letter in enumerate(rest):
        if letter in b"/?":
            return rest[place:] if letter == ord("/") else b"/" + rest[place:]
    return b"/"
