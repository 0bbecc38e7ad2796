"""What clients ask, word for word, in the log: for who has said that it shall be there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dpkit.logs import about

if TYPE_CHECKING:
    from dpkit.serve.front import Generated

_log = logging.getLogger(__name__)

_MOST = 16 * 1024


def log_body(generated: Generated) -> None:
    """Log the body of a request for text, at level info: an observer of `Front.observers`."""
    request = generated.request
    body = request.body[:_MOST].decode(errors="replace")
    engines = ", ".join(map(str, generated.engines))
    of = about(request_id=request.id, engine=engines or None)
    _log.info("%s asked %s for %r", request.id, request.path, body, extra=of)
