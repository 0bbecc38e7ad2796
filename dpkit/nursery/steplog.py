"""What each step of each engine computed and took, as a table: for `dpkit fit`.

Listens to what engines report to their clients, wherever they are; of one that reports nothing,
nothing is written. A row is in the form of published step tables: the prompt tokens of the step,
the tokens that were cached for them, decodes, the sum of their contexts, and milliseconds of the
model's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from dpkit.nursery.filewriter import FileWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dpkit.messages import EngineId, EngineOutput, StepReport, StepWork

COLUMNS = "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms,kind,engine"

CAPACITY = 100_000
"""Steps that wait to be written; more are lost. A GPU takes a quarter of an hour for so many."""


class Step(NamedTuple):
    """One row."""

    engine: EngineId
    work: StepWork
    seconds: float


class StepLog(FileWriter[Step]):
    """Writes the steps of all engines to one file.

    `deliver` and `on_report` are what `Life.link` wants of a client.
    """

    what = "step log"
    header = COLUMNS
    pause_s = 1.0  # a step takes milliseconds, and a thread for each would take as long

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._steps: list[Step] = []
        self._told: dict[str, tuple[int, int]] = {}  # by name, the life's epoch and its steps
        self._lot = trio.lowlevel.ParkingLot()

    def deliver(self, engine: EngineId, output: EngineOutput) -> None:
        """Nothing is asked, and nothing is answered."""

    def on_report(self, engine: EngineId, report: StepReport) -> None:
        """Note the last step, unless it has been noted."""
        told = (engine.epoch, report.steps)
        if not report.steps or told <= self._told.get(engine.name, (0, 0)):
            return
        self._told[engine.name] = told
        if len(self._steps) >= CAPACITY:
            self.lost += 1
            return
        self._steps.append(Step(engine, report.last_step, report.step_time_s))
        self._lot.unpark()

    async def _wait_unread(self) -> None:
        if self._steps:
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()

    def _unread(self) -> Sequence[Step]:
        steps, self._steps = self._steps, []
        return steps

    def _line(self, record: Step) -> str:
        engine, work, seconds = record
        tokens = work.prefill_tokens
        # Of one prompt the tokens cached before the step; of several what one prompt of as many
        # tokens would have had to have cached to attend to as much, which may be less than nothing.
        context = work.prefill_context / tokens - tokens / 2 if tokens else 0
        kind = "mixed" if tokens and work.decodes else "prefill" if tokens else "decode"
        return (
            f"{tokens},{context:.10g},{work.decodes},{work.decode_context},"
            f"{seconds * 1e3:.4f},{kind},{engine}"
        )
