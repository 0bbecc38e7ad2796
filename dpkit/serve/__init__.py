"""HTTP for a cluster: an HTTP/1.1 server on Trio, and what is served over it.

`face` is what the two halves know of each other. `http` and its neighbours carry requests and
answers and know nothing of language models; routes answer and know nothing of sockets. `service`
puts both together; `asgi` has the same routes for other servers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpkit.serve.asgi import AsgiApp as AsgiApp
    from dpkit.serve.service import HttpService as HttpService
    from dpkit.serve.service import serve_http as serve_http

_HOMES = {"AsgiApp": "asgi", "HttpService": "service", "serve_http": "service"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dpkit.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dpkit.serve.{_HOMES[name]}"), name)
