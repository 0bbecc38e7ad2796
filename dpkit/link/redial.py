"""One engine behind the wire that outlives its head: it says HELLO again, its model still loaded.

Each life is `dpkit.link.engine`'s; here is only what comes after one whose frontends have all gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from dpkit.errors import LaunchFailed
from dpkit.link.engine import Deserted, serve_engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.link.engine import Loaded, Place

_PAUSE_S = 1.0
"""Between two lives: whoever refuses this engine is asked no more often."""

_log = logging.getLogger(__name__)


async def serve_again(
    place: Place, load: Callable[[], Awaitable[Loaded]], stop: trio.Event
) -> None:
    """Serve one life after the other, until `stop` is set; arguments and errors as `serve_engine`.

    Args:
        place: With a lease: how long a life waits for frontends that have gone before it ends.
        load: Called in the first life only.
        stop: As there.

    A handshake that nobody answers is waited for again.
    """
    loaded: Loaded | None = None

    async def load_once() -> Loaded:
        nonlocal loaded
        if loaded is None:
            loaded = await load()
        return loaded

    while not stop.is_set():
        try:
            await serve_engine(place, load_once, stop)
        except (Deserted, LaunchFailed) as error:
            _log.warning("%s; it says HELLO again at %s", error, place.handshake)
        else:
            return
        with trio.move_on_after(_PAUSE_S):
            await stop.wait()
