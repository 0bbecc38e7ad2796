"""One life of one engine, wherever it is lived: what its place in the cluster needs of it.

A busy loop in this process is one (`dpkit.nursery.busyloop`), an engine in a process of its own is
another (`dpkit.nursery.remote`); supervision, health, placing anew and audit know this face only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dpkit.errors import InternalError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    import trio

    from dpkit.abc import EngineLink
    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.engine.limits import EngineLimits
    from dpkit.messages import EngineId, StepReport
    from dpkit.nursery.inbox import Deliver, OnReport
    from dpkit.nursery.meter import Meter

    MakeLife = Callable[[EngineId, int, Callable[[Exception], None]], "Life"]


class Life(Protocol):
    """From its first allocation to its last block freed. All but `run` is synchronous."""

    engine: EngineId
    ready: trio.Event
    """It serves, or has done."""
    ended: trio.Event
    """`run` is over."""
    cause: Exception | None
    """Why it is over, once it is lost; set before its requests are told."""
    meter: Meter
    """Measures its steps and aborts."""

    @property
    def limits(self) -> EngineLimits:
        """What it may hold and do at once; of an engine that is not ready, what it is to have."""

    @property
    def model_class(self) -> str:
        """What computes its steps, as a config names it."""

    @property
    def pid(self) -> int | None:
        """Its process, if it has one of its own and that is there."""

    @property
    def step_started_at(self) -> float | None:
        """When what it has been at began, on Trio's clock: a step, or to get ready. For a watchdog.

        The same moment for as long as it is the same step.
        """

    @property
    def delay(self) -> str:
        """What it has been at since then, to stand before a time: "a step has taken"."""

    @property
    def lost_with_its_group(self) -> bool:
        """Whether it is over since another engine is, with which it stepped together."""

    @property
    def is_interruptible(self) -> bool:
        """Whether a cancellation of `run` ends it in the middle of a step."""

    async def run(self) -> None:
        """Live: until it is closed and has nothing left to do.

        What ends it earlier comes out, after every request of it has been told.
        """

    def link(
        self, deliver: Deliver, on_report: OnReport | None = None, *, hears_all: bool = False
    ) -> EngineLink:
        """A link to it for one client, whose `deliver` gets the outputs.

        Its `on_report` hears how much work the engine has, after each drain and each step, with the
        counts of what came by this link. An engine that does not tell is not heard. Of several
        reports that are read together, as this process is late, it hears the last, unless it
        `hears_all`.
        """

    def close(self) -> None:
        """Take nothing new, and end when what is there is finished; idempotent."""

    def lose(self, cause: Exception) -> None:
        """End it: every request it has gets `EngineLost`; idempotent."""

    def abandon(self) -> None:
        """Let a cancellation end `run` even if a call that nobody can end is left behind."""

    def statistics(self) -> EngineCoreStatistics:
        """What it has done since its birth, as far as that is known here."""

    def report(self) -> StepReport:
        """How much work its requests are, and how long its last step took."""

    def audit(self, charged: AbstractSet[str]) -> Iterator[str]:
        """Each contradiction between its books and the requests that clients have charged to it."""


def broken_down(engine: EngineId, error: Exception) -> InternalError:
    """What ended a life that nothing outside has ended: a bug of ours."""
    bug = InternalError(f"engine {engine} broke down: {describe(error)}", engine=engine)
    bug.__cause__ = error
    return bug
