"""The routes of whoever runs the server: drain, scale, reload.

Their bodies are strict: an order that is not understood to the last word is not carried out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import trio

from dpkit.config.checks import BadValue
from dpkit.config.units import parse_duration
from dpkit.errors import ModelNotFound, ModelUnsupported
from dpkit.serve.chunks import encode
from dpkit.serve.decoding import decode_body
from dpkit.serve.errors import ApiError, bad_request
from dpkit.serve.heads import JSON

if TYPE_CHECKING:
    from dpkit.serve.face import Request, Responder
    from dpkit.serve.front import Front


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``/admin/drain``."""

    deadline: str | None = None
    """Such as ``"30s"``, from now on; None: as long as it takes."""


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``/admin/scale``."""

    group: str
    count: int
    deadline: str | None = None


class ReloadBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of ``/admin/reload``."""


async def drain(front: Front, request: Request, responder: Responder) -> None:
    """Take nothing new, and answer when all that was under way has ended.

    For good: the process stays, and says 503, until it is told to stop. If the client leaves
    before that, what is under way may take as long as it likes.
    """
    asked = decode_body(_DRAIN, request.body or b"{}")
    deadline = _moment(asked.deadline)
    cluster = front.cluster
    front.drain()
    await cluster.drain(deadline)
    responder.respond(200, (JSON,), encode({"status": "drained"}))


async def scale(front: Front, request: Request, responder: Responder) -> None:
    """Have as many engines in a group as are asked for, and answer when they are there."""
    asked = decode_body(_SCALE, request.body)
    deadline = _moment(asked.deadline)
    cluster = front.cluster
    await cluster.scale(asked.group, asked.count, deadline=deadline)
    engines = {engine.name: engine.state for engine in cluster.engines}
    responder.respond(200, (JSON,), encode({"engines": engines}))


async def reload(front: Front, request: Request, responder: Responder) -> None:
    """Read the config again, apply it whole or not at all, and answer with what has changed."""
    decode_body(_RELOAD, request.body or b"{}")
    cluster = front.cluster  # 503 while it starts
    if front.reload is None:
        name = cluster.config.cluster.name
        raise ApiError(501, f"{name} has no file to be read again", code="no_file")
    try:
        plan = await front.reload()
    except (ModelNotFound, ModelUnsupported) as error:  # what the new file says, and nothing broke
        raise bad_request(str(error), code="config_error") from error
    responder.respond(200, (JSON,), encode({"changes": plan.changes}))


def _moment(deadline: str | None) -> float:
    """When it is, on Trio's clock."""
    if deadline is None:
        return math.inf
    try:
        return trio.current_time() + parse_duration(deadline)
    except BadValue as error:
        raise bad_request(f"deadline: {error.problem}", "deadline") from None


_DRAIN = msgspec.json.Decoder(DrainBody)
_SCALE = msgspec.json.Decoder(ScaleBody)
_RELOAD = msgspec.json.Decoder(ReloadBody)
