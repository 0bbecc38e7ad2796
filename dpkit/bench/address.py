"""Where a server is: a URL as people write it. Opens the connection. Knows no HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

import trio
from attrs import frozen

from dpkit.errors import DpkitError

_SCHEMES = {"http": 80, "https": 443}


class BadAddress(DpkitError):  # noqa: N818 - reads as what happened
    """A URL is wrong (yours)."""


@frozen(kw_only=True)
class Address:
    """Of a server."""

    url: str
    host: str
    port: int
    is_tls: bool = False
    socket: str | None = None
    """Path of a Unix socket; then there is neither host nor port."""
    prefix: str = ""
    """Before every path."""

    @property
    def authority(self) -> str:
        """For the header ``Host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == _SCHEMES["https" if self.is_tls else "http"]
        return host if usual else f"{host}:{self.port}"

    async def connect(self) -> trio.abc.Stream:
        """Open a connection; the caller closes it.

        Raises:
            OSError: nobody is there.
            trio.BrokenResourceError: TLS failed.
        """
        if self.socket is not None:
            return await trio.open_unix_socket(self.socket)
        if not self.is_tls:
            return await trio.open_tcp_stream(self.host, self.port)
        stream = await trio.open_ssl_over_tcp_stream(self.host, self.port, https_compatible=True)
        try:
            await stream.do_handshake()
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await trio.aclose_forcefully(stream)
            raise
        return stream


def parse_url(url: str) -> Address:
    """An address from ``http://HOST:PORT``, with ``/v1`` at the end or not, or ``unix:PATH``.

    Raises:
        BadAddress: it is neither.
    """
    if url.startswith("unix:") and len(url) > len("unix:"):
        path = url.removeprefix("unix:")
        return Address(url=url, host="localhost", port=80, socket=path)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadAddress(f"{url!r}: {error}") from None
    has_host = bool(parts.hostname) and not parts.netloc.endswith(":")
    if parts.scheme not in _SCHEMES or not has_host or parts.query or parts.fragment:
        raise BadAddress(f"{url!r}: expected http://HOST:PORT, https://HOST or unix:PATH")
    return Address(
        url=url,
        host=parts.hostname or "",
        port=_SCHEMES[parts.scheme] if port is None else port,
        is_tls=parts.scheme == "https",
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
    )
