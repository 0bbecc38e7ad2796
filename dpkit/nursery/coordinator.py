"""The coordinator's task: stats from the fan-in go into the rules, snapshots go to every client.

What is sent and when is decided by `dpkit.balancer.coordinator`; this module only has a clock and a
channel. Requests do without it: while it is away, clients place by their own counts and the last
snapshot, and the arbiter that several of them have is away with it. So when it fails it is
restarted, with rules that know nothing but who serves now, and learns the loads anew from what
engines said last.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import trio

from dpkit.errors import InternalError, describe
from dpkit.nursery.events import EventKind
from dpkit.nursery.supervisor import Observer, Restarts, supervise

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.balancer.coordinator import CoordinatorRules
    from dpkit.messages import Snapshot
    from dpkit.nursery.arbitration import Arbitration
    from dpkit.nursery.events import EventLog
    from dpkit.nursery.fanin import StatsFanIn
    from dpkit.nursery.membership import Membership

RESTARTS = Restarts(intensity=sys.maxsize)
"""It is never given up: waiting ten seconds for the next try costs nobody anything."""

_log = logging.getLogger(__name__)


class Coordinator(Observer):
    """The coordinator of a cluster, through all its lives.

    Args:
        make_rules: Makes the rules of a life.
        fanin: Where engines publish; this is its one receiver.
        tell: Hands a snapshot to every client; synchronous.
        membership: Tells the rules who serves.
        arbitration: The arbiter of several clients, as long as a life lasts.
        events: Told when a life is lost.
        on_bug: Told when it was lost by a bug of dpkit's.
    """

    def __init__(
        self,
        *,
        make_rules: Callable[[], CoordinatorRules],
        fanin: StatsFanIn,
        tell: Callable[[Snapshot], None],
        membership: Membership,
        arbitration: Arbitration,
        events: EventLog,
        on_bug: Callable[[InternalError, str], None],
    ) -> None:
        self.rules = make_rules()
        """Of the present life."""
        self.restarts = 0
        self._make_rules = make_rules
        self._fanin = fanin
        self._tell = tell
        self._membership = membership
        self._arbitration = arbitration
        self._events = events
        self._on_bug = on_bug
        self._waves = (0, False)
        self._scope = trio.CancelScope()  # of the present life
        self._cause: Exception | None = None
        membership.inform(self.rules)
        arbitration.on_failed = self.lose

    async def run(self) -> None:
        """Serve, life after life, until cancelled."""
        await supervise({"coordinator": self._live}, RESTARTS, observer=self)

    def failed(self, name: str, life: int, error: Exception) -> None:
        """A life was lost."""
        self._arbitration.close()
        what = describe(error)
        _log.warning("the %s was lost in its life %d: %s", name, life, what)
        self._events.emit(EventKind.COORDINATOR_LOST, detail=what)
        if isinstance(error, InternalError):
            self._on_bug(error, name)

    def note_waves(self, wave: int, running: bool) -> None:
        """Take the wave state of engines that tell a coordinator of their own of it."""
        self._waves = (wave, running)
        for snapshot in self.rules.on_waves(wave, running):
            self._tell(snapshot)

    def lose(self, cause: Exception) -> None:
        """Give the present life up, whatever it does; between two lives nothing happens."""
        self._cause = cause
        self._scope.cancel()

    async def _live(self, number: int) -> None:
        if number:
            self.restarts += 1
            self.rules = self._make_rules()
            self.rules.on_waves(*self._waves)
            self._membership.inform(self.rules)
            self._fanin.repeat(self._membership.serving)
            self._arbitration.open()
        with trio.CancelScope() as self._scope:
            await self._serve(self.rules)
        if self._cause is not None:
            raise self._cause

    async def _serve(self, rules: CoordinatorRules) -> None:
        while True:
            # What is there already is read before publishing, so that no snapshot is older than
            # known.
            for stats in self._fanin.receive_nowait():
                rules.on_stats(trio.current_time(), stats)
            if wait := rules.due(trio.current_time()):
                with trio.move_on_after(wait):
                    await self._fanin.wait_pending()
            else:
                self._tell(rules.publish(trio.current_time()))
