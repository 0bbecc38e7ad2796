"""Where a sweep cancels: the task that its scenario marks, on one side of one of its steps.

Part of `dpkit.testing.sweep`. Knows nothing of seeds or checks.
"""

from __future__ import annotations

import enum
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

import trio

from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Mode(enum.StrEnum):
    """On which side of a step the cancellation lands."""

    BEFORE = "before"  # the task's operation has just succeeded; its next checkpoint is cancelled
    AFTER = "after"  # the task is parked; its wait is aborted
    NEVER = "never"  # the run that counts


class Case(NamedTuple):
    """One run. Steps count from 0, the one in which the target was marked."""

    seed: int
    step: int
    mode: Mode

    def __str__(self) -> str:
        return f"{self.seed}:{self.step}:{self.mode}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gives."""
        seed, step, mode = text.split(":")
        return cls(int(seed), int(step), Mode(mode))


class Mark(trio.abc.Instrument):
    """Given to the scenario, which marks its target with it; made by `sweep`, one a run."""

    def __init__(self, case: Case) -> None:
        self.steps = 0
        self.reached = False
        self._case = case
        self._task: trio.lowlevel.Task | None = None
        self._scope = trio.CancelScope()
        self._open = False

    @contextmanager
    def target(self) -> Iterator[None]:
        """Mark the running task, until the block ends, as the one whose steps are counted.

        The block is what gets cancelled; it ends quietly then, as any cancel scope does.
        """
        if self._task is not None:
            raise RuntimeError("a sweep has one target: mark one block, once a run")
        self._task = trio.lowlevel.current_task()
        with self._scope:
            self._open = True
            self.reached = self._case.mode is Mode.NEVER
            self._pass(Mode.BEFORE)
            try:
                yield
            finally:
                self._open = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step of the target, and cancel if it is the one."""
        if task is self._task and self._open:
            self.steps += 1
            self._pass(Mode.BEFORE)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Cancel if the step that the target has just made is the one."""
        if task is self._task and self._open:
            self._pass(Mode.AFTER)

    def verify(self) -> None:
        """Check, after the run, that it came to the step it was made for.

        Raises:
            InternalError: it did not.
        """
        if not self.reached:
            raise InternalError(
                "the target never came to this step: the scenario marks none, or is not "
                "deterministic"
            )

    def _pass(self, mode: Mode) -> None:
        if (self.steps, mode) == self._case[1:]:
            self.reached = True
            self._scope.cancel()
