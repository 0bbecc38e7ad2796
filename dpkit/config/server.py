"""The `[server]` table: where a cluster is to be had over HTTP, by whom, and how much of it.

A part of the schema (`dpkit.config.schema`), by the same rules. Opens no socket and keeps no
secret: keys are in the environment, and the file names the variable.
"""

# No `from __future__ import annotations`: cattrs reads these annotations at run time.
import os
import re
from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import optional

from dpkit.config.checks import BadValue, Between, MadeOf, quote
from dpkit.config.reasons import why
from dpkit.config.units import Bytes, Seconds, show_duration, show_size

LISTEN = r"unix:.+|(\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:\s]*):[0-9]{1,5}"
"""What an address to listen at looks like."""

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
"""What the name of a variable of the environment looks like."""


@frozen(kw_only=True)
class Address:
    """Where to listen: `host` and `port`, or the `path` of a Unix socket."""

    host: str = ""
    """Empty: every interface."""
    port: int = 0
    """0: any that is free."""
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` or ``unix:PATH``.

    Raises:
        BadValue: it is none of those.
    """
    if re.fullmatch(LISTEN, text) is None:
        raise BadValue(f"expected 'HOST:PORT', '[IPV6]:PORT' or 'unix:PATH', got {quote(text)}")
    if text.startswith("unix:"):
        return Address(path=text.removeprefix("unix:"))
    host, _, port = text.rpartition(":")
    if int(port) > 65_535:
        raise BadValue(f"a port is at most 65535, got {port}")
    return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))


def listen_address(_instance: object, attribute: "Attribute[Any]", value: str) -> None:
    """The value is an address to listen at; whether it can be had shows at the start."""
    try:
        parse_address(value)
    except BadValue as error:
        raise BadValue(error.problem, key=attribute.name) from None


def variable_with_keys(_instance: object, attribute: "Attribute[Any]", value: str) -> None:
    """The value names a variable of the environment, which holds a key at least."""
    if re.fullmatch(VARIABLE, value) is None:
        # Never shown: who writes the key itself here must not find it in a log.
        problem = "expected the name of a variable of the environment, not the key itself"
    elif not keys_in(value):
        problem = f"the environment has no variable {value}, or it is empty"
    else:
        return
    raise BadValue(problem, key=attribute.name)


def keys_in(variable: str | None, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The keys that a variable of the environment holds, between commas or blanks."""
    if variable is None:
        return ()
    value = (os.environ if environment is None else environment).get(variable, "")
    return tuple(re.split(r"[,\s]+", value.strip(", \t\r\n"))) if value.strip(", \t\r\n") else ()


@frozen(kw_only=True)
class ServerConfig:
    """Serves HTTP, with OpenAI's routes, when the file has this table."""

    listen: str = field(
        default="127.0.0.1:8000",
        validator=listen_address,
        metadata=why(
            "This machine alone, at vLLM's port. '0.0.0.0:8000' is for everybody who can reach it; "
            "'unix:PATH' for a proxy beside it."
        ),
    )
    model_name: str | None = field(
        default=None,
        validator=optional(MadeOf(r"\S+", "anything but blanks")),
        metadata=why("What engines.model says. By this name clients ask for the model."),
    )
    api_key_env: str | None = field(
        default=None,
        validator=optional(variable_with_keys),
        metadata=why(
            "Whoever can connect may ask. A variable of the environment with the keys that open "
            "the API, between commas; each is a tenant of its own in the queue."
        ),
    )
    admin_listen: str | None = field(
        default=None,
        validator=optional(listen_address),
        metadata=why(
            "Not to be had. An address of its own for the routes that drain, scale and reload."
        ),
    )
    admin_key_env: str | None = field(
        default=None,
        validator=optional(variable_with_keys),
        metadata=why(
            "As api_key_env, for those routes. Without admin_listen they are at listen, behind it."
        ),
    )
    otlp_traces_endpoint: str | None = field(
        default=None,
        validator=optional(MadeOf(r"https?://[^\s/@]+(/\S*)?", "http://HOST:PORT/PATH")),
        metadata=why(
            "No traces. Where OpenTelemetry's spans go, one for each request for text: a collector "
            "is at 'http://localhost:4318/v1/traces'. Needs the extra otel."
        ),
    )
    max_connections: int = field(
        default=4096,
        validator=Between(1, 1_000_000),
        metadata=why("Each costs a descriptor. Beyond, the one that has idled longest gives way."),
    )
    max_head: Bytes = field(
        default=32 * 2**10,
        validator=Between(1024, 2**24, show=show_size),
        metadata=why("Of request line and headers together; nginx takes as much."),
    )
    max_body: Bytes = field(
        default=32 * 2**20,
        validator=Between(1024, 2**31, show=show_size),
        metadata=why("Of one request. A million tokens as JSON are about 7 MiB."),
    )
    max_bodies: Bytes = field(
        default=512 * 2**20,
        validator=Between(1024, 2**40, show=show_size),
        metadata=why("Of all requests that are being received or answered, together."),
    )
    max_unsent: Bytes = field(
        default=256 * 2**10,
        validator=Between(1024, 2**31, show=show_size),
        metadata=why("What one stream may hold for a client that does not read."),
    )
    idle_timeout: Seconds = field(
        default=75.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why("Between requests of one connection; nginx's."),
    )
    receive_timeout: Seconds = field(
        default=60.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why("From a request's first byte to its last; nginx's."),
    )
    send_timeout: Seconds = field(
        default=30.0,
        validator=Between(0.001, 86_400.0, show=show_duration),
        metadata=why(
            "So long may a client read nothing of what is ready for it; then it has left, and its "
            "request is aborted."
        ),
    )
