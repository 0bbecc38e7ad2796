"""Tasks that belong together and end by failing only, such as the pumps of several sockets.

Knows nothing of what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def run_together(*tasks: Callable[[], Awaitable[Never]]) -> Never:
    """Run all of them until cancelled, or until one fails: what it raises comes out, in no group.

    Ctrl-C does not tear them.
    """
    failures: list[Exception] = []

    @trio.lowlevel.enable_ki_protection
    async def guard(task: Callable[[], Awaitable[Never]]) -> None:
        try:
            await task()
        except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(guard, task, name=getattr(task, "func", task))
    raise failures[0]
