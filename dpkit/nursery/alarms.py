"""Alarms of many requests in one task: whoever sets them is told when their moment has come."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from dpkit.balancer.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Alarms:
    """One moment a request at most; all but `keep` is synchronous."""

    def __init__(self) -> None:
        self._deadlines = Deadlines()
        self._timer = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, moment: float, request_id: str) -> None:
        """Set a request's alarm, on Trio's clock; it replaces an earlier one. Infinity: never."""
        if moment == math.inf:
            return
        earliest = self._deadlines.next()
        self._deadlines.add(moment, request_id)
        if earliest is None or moment < earliest:
            self._timer.unpark()

    def discard(self, request_id: str) -> None:
        """Forget a request's alarm; unknown ids are ignored."""
        self._deadlines.discard(request_id)

    async def keep(self, on_time: Callable[[Sequence[str]], None]) -> None:
        """Call `on_time` with the requests whose moment has come, the earliest first; for ever."""
        while True:
            alarm = self._deadlines.next()
            with trio.move_on_at(math.inf if alarm is None else alarm):
                await self._timer.park()
            on_time(self._deadlines.expired(trio.current_time()))
