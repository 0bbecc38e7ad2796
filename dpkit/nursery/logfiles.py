"""The files that a cluster writes while it runs, started with it and flushed after all else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkit.nursery.eventwriter import EventWriter
from dpkit.nursery.steplog import StepLog

if TYPE_CHECKING:
    from dpkit.config.schema import LogConfig
    from dpkit.nursery.events import EventLog
    from dpkit.nursery.filewriter import FileWriter
    from dpkit.nursery.membership import Membership
    from dpkit.nursery.services import Services


class LogFiles:
    """Those that a config names; none is there before `start`."""

    def __init__(self) -> None:
        self._events: EventWriter | None = None
        self._steps: StepLog | None = None

    @property
    def events_lost(self) -> int:
        """Events that could not be written."""
        return 0 if self._events is None else self._events.lost

    @property
    def steps_lost(self) -> int:
        """Steps that could not be written."""
        return 0 if self._steps is None else self._steps.lost

    def start(
        self, log: LogConfig, services: Services, *, events: EventLog, membership: Membership
    ) -> None:
        """Write from now on, until all that is started after this has ended."""
        if log.events is not None:
            self._events = EventWriter(events, Path(log.events))
            _start(self._events, services)
        if log.steps is not None:
            self._steps = StepLog(Path(log.steps))
            membership.add_listener(self._steps)
            _start(self._steps, services)


def _start(writer: FileWriter[Any], services: Services) -> None:
    services.stop_with(writer.flush)  # first in, last out: engines end before logs
    services.start_soon(writer.run, name=f"{writer.what} writer")
