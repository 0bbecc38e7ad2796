"""Waiting for what other processes, threads and sockets do, of which no event tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 15.0
"""No promise: how long a busy machine may take."""


async def until(holds: Callable[[], object], *, limit: float = LIMIT_S) -> None:
    """Look again and again until something is so."""
    with trio.fail_after(limit):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.002)
