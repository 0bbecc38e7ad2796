"""What a step has brought, handed to those who wait for it, with turns for others in between.

A step of a thousand sequences has a thousand outputs, and each may be a piece of text that is
written into a socket: tens of milliseconds, for which no probe would be answered. Knows nothing of
engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from dpkit.messages import EngineOutput

PIECE = 32
"""Outputs between two looks at the clock."""
TURN_S = 0.002
"""Seconds after which others have a turn. It costs them what a hundred outputs do, at most."""


class HandOut:
    """Made once for each life of an engine.

    Args:
        send: Takes some outputs to where they belong; synchronous.
        check: Called after others have had a turn; raises if it is all over meanwhile.
    """

    def __init__(
        self, send: Callable[[Sequence[EngineOutput]], None], check: Callable[[], None]
    ) -> None:
        self.is_interrupted = False
        """Whether others have their turn now: some know already what the step has brought."""
        self.ended: AbstractSet[str] = frozenset()
        """Requests that have ended with the step, while it is interrupted."""
        self._send = send
        self._check = check

    async def run(self, outputs: Sequence[EngineOutput]) -> None:
        """Hand out all of them. A checkpoint only where it takes long.

        Error handling:
            What `check` raises. Those that are left are not sent then, nor if it is cancelled.
        """
        since = trio.current_time()
        for start in range(0, len(outputs), PIECE):
            if start and trio.current_time() - since > TURN_S:
                await self._let_others(outputs)
                since = trio.current_time()
            self._send(outputs[start : start + PIECE])

    async def _let_others(self, outputs: Sequence[EngineOutput]) -> None:
        self.is_interrupted = True
        self.ended = {each.request_id for each in outputs if each.finish_reason is not None}
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self.is_interrupted, self.ended = False, frozenset()
        self._check()
