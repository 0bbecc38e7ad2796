"""Where a config is to be had over HTTP, and by whom: words for `dpkit explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.config.server import keys_in, parse_address
from dpkit.config.units import show_duration, show_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.config.schema import Config
    from dpkit.config.server import ServerConfig

_HERE = {"127.0.0.1", "localhost", "::1"}


def serving(config: Config) -> Iterator[str]:
    """Line by line: the address, the keys, the admin routes, the limits."""
    server = config.server
    if server is None:
        yield "It is not served over HTTP: `dpkit run` answers prompts."
        return
    model = server.model_name or config.engines[0].model
    yield (
        f"`dpkit run` serves OpenAI's routes at {server.listen}, {_reach(server.listen)}. "
        f"Clients call the model {model}. {_keys(server.api_key_env)}"
    )
    yield f"  {_admin(server)}"
    yield (
        f"  At most {server.max_connections:,} connections; a request has at most "
        f"{show_size(server.max_body)}. A client that reads nothing for "
        f"{show_duration(server.send_timeout)} has left, and its request is aborted."
    )
    if server.otlp_traces_endpoint is not None:
        yield f"  A span for each request for text goes to {server.otlp_traces_endpoint}."


def _reach(listen: str) -> str:
    address = parse_address(listen)
    if address.path is not None:
        return "a Unix socket"
    if address.host in _HERE:
        return "for this machine alone"
    if address.host in {"", "0.0.0.0", "::"}:  # noqa: S104 - told, not bound
        return "for everybody who can reach this machine"
    return "for everybody who can reach that address"


def _keys(variable: str | None) -> str:
    if variable is None:
        return "No key is asked for."
    count = len(keys_in(variable))
    keys = "a key" if count == 1 else f"one of {count} keys"
    return f"They must bring {keys}, from the variable {variable}."


def _admin(server: ServerConfig) -> str:
    key = f"with a key from the variable {server.admin_key_env}" if server.admin_key_env else ""
    if server.admin_listen is not None:
        where = f"at {server.admin_listen}, {_reach(server.admin_listen)}"
        return f"Drain, scale and reload are to be had {where}{', ' * bool(key)}{key}."
    if key:
        return f"Drain, scale and reload are to be had there too, {key}."
    return "Drain, scale and reload are not to be had over HTTP."
