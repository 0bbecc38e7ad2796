"""How the server and its cluster are: for probes, load balancers and people. Nothing here waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from dpkit import __version__
from dpkit.messages import EngineId
from dpkit.serve.chunks import encode
from dpkit.serve.front import State
from dpkit.serve.heads import JSON, RETRY_AFTER

if TYPE_CHECKING:
    from dpkit.nursery.cluster import Cluster
    from dpkit.serve.face import Request, Responder
    from dpkit.serve.front import Front


def health(front: Front, request: Request, responder: Responder) -> None:  # noqa: ARG001
    """Answer 200 for as long as the process is well, whatever becomes of its engines."""
    responder.respond(200)


def ready(front: Front, request: Request, responder: Responder) -> None:  # noqa: ARG001
    """Answer 200 if requests are served here: not while starting, nor while draining."""
    engines = {} if front.is_starting else _engines(front.cluster)
    told: dict[str, Any] = {"status": front.state, "engines": engines}
    if front.state is State.READY:
        responder.respond(200, (JSON,), encode(told))
    else:
        responder.respond(503, (JSON, RETRY_AFTER), encode(told))


def tell_version(front: Front, request: Request, responder: Responder) -> None:  # noqa: ARG001
    """Answer with dpkit's version."""
    responder.respond(200, (JSON,), encode({"version": __version__}))


async def statistics(front: Front, request: Request, responder: Responder) -> None:  # noqa: ARG001
    """Answer with all that is counted, and who is how."""
    cluster = front.cluster
    now = cluster.statistics()
    told = {
        "status": front.state,
        "cluster": cluster.config.cluster.name,
        "ranks": {engine.name: engine.rank for engine in cluster.engines},
        "since": {each.engine.name: _time_of_day(each.since) for each in now.engines},
        **plain(now),
    }
    responder.respond(200, (JSON,), encode(told))


def _time_of_day(moment: float) -> str:
    """A moment on Trio's clock, as others have it."""
    at = time.time() - (trio.current_time() - moment)
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _engines(cluster: Cluster) -> dict[str, str]:
    return {engine.name: engine.state for engine in cluster.engines}


def plain(value: Any) -> Any:
    """Statistics as JSON has them: objects, lists and numbers; an engine is its name."""
    if attrs.has(type(value)):
        names = (field.name for field in attrs.fields(type(value)))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, EngineId):
        return str(value)
    if isinstance(value, Mapping):
        return {"" if key is None else str(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(each) for each in value]
    return value
