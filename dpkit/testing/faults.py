"""Models that crash, hang, are slow, run out of memory, or talk nonsense: when a plan says so.

A plan is data, `{step: fault}`, so it can be drawn from a seed, printed, and replayed; a fault may
also be put in while the engine runs (`inject`). Knows nothing of what happens to the engine then.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Self

from attrs import evolve, frozen

from dpkit.errors import DpkitError
from dpkit.testing.wrapper import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.abc import Model
    from dpkit.messages import Batch, StepResult
    from dpkit.nursery.cluster import Cluster

FOR_EVER = 1e9
"""Seconds of a step that hangs: thirty years."""


class FaultKind(enum.StrEnum):
    """What a model does wrong."""

    CRASH = "crash"  # `execute` raises
    HANG = "hang"  # the step lasts for ever; in virtual time, so that it can be cancelled
    SLOW = "slow"  # the step lasts `size` times as long, and at least `size` milliseconds
    OUT_OF_MEMORY = "oom"  # `execute` raises MemoryError if the batch has more than `size` tokens
    GARBAGE = "garbage"  # samples what is no token


class InjectedCrash(DpkitError):  # noqa: N818 - reads as what happened
    """The crash that a plan asked for."""


@frozen
class Fault:
    """One thing that goes wrong; its text is ``crash``, or ``slow=10`` where a size matters."""

    kind: FaultKind
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}={self.size:g}" if self.size else self.kind.value

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gives.

        Raises:
            ValueError: there is no such fault.
        """
        kind, _, size = text.partition("=")
        return cls(FaultKind(kind), float(size or 0))


CRASH, HANG, GARBAGE = (
    Fault(kind) for kind in (FaultKind.CRASH, FaultKind.HANG, FaultKind.GARBAGE)
)


def kill_coordinator(cluster: Cluster) -> None:
    """Let a cluster's coordinator fail, and the arbiter of its clients with it.

    It is restarted with a longer wait each time; between two of its lives nothing happens.
    """
    crash = InjectedCrash("injected: the coordinator dies")
    cluster._coordinator.lose(crash)  # noqa: SLF001 - a seam for tests, no part of a cluster's face


class FaultyModel(ModelWrapper):
    """A model that fails as planned.

    Args:
        model: What it is around.
        plan: What goes wrong in which step; steps count from 0, those of all lives together.
        births: What goes wrong in which `allocate`, which begins a life of an engine; only crashes
            make sense there.
        always: What is wrong with every step that the plan does not speak of.

    An engine alone in its group has the model for itself, so its faults hit no other.
    """

    def __init__(
        self,
        model: Model,
        plan: Mapping[int, Fault] | None = None,
        *,
        births: Mapping[int, Fault] | None = None,
        always: Fault | None = None,
    ) -> None:
        super().__init__(model)
        self.plan = dict(plan or {})
        self.births = dict(births or {})
        self.always = always
        self.steps = 0
        self.lives = 0
        self.injected: list[Fault] = []
        """What went wrong, in order."""
        self._next: Fault | None = None

    def inject(self, fault: Fault) -> None:
        """Let the next step go wrong, whatever the plan says of it."""
        self._next = fault

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        """Begin a life, unless this one is planned to fail."""
        number = self.lives
        self.lives += 1
        if (fault := self.births.get(number)) is not None:
            self.injected.append(fault)
            raise InjectedCrash(f"injected: {fault} at the start of life {number}")
        return super().allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        """Compute a step, or fail in the way that is due."""
        step = self.steps
        self.steps += 1
        fault, self._next = self._next or self.plan.get(step, self.always), None
        if fault is None:
            return super().execute(batch, cache)
        if fault.kind is FaultKind.CRASH:
            self.injected.append(fault)
            raise InjectedCrash(f"injected: {fault} in step {step}")
        if fault.kind is FaultKind.OUT_OF_MEMORY and batch.num_tokens > fault.size:
            self.injected.append(fault)
            raise MemoryError(f"injected: {fault} in step {step}, of {batch.num_tokens} tokens")
        return self._spoil(super().execute(batch, cache), fault)

    def _spoil(self, result: StepResult, fault: Fault) -> StepResult:
        match fault.kind:
            case FaultKind.HANG:
                spoilt = evolve(result, duration_s=FOR_EVER)
            case FaultKind.SLOW:
                duration_s = max(result.duration_s * fault.size, fault.size / 1e3)
                spoilt = evolve(result, duration_s=duration_s)
            case FaultKind.GARBAGE:
                spoilt = evolve(result, sampled=[self.spec.vocab_size for _ in result.sampled])
            case _:
                return result
        self.injected.append(fault)
        return spoilt
