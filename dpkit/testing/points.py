"""Where a run can be made to fail: calls that pass through named points, counted by kind.

Part of `dpkit.testing.failing`. A mark too, so that a run can fail at one place and be cancelled at
another.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar

from dpkit.errors import DpkitError, InternalError
from dpkit.testing.mark import Case, Mark, Mode
from dpkit.testing.wrapper import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.abc import Model
    from dpkit.messages import Batch, StepResult

P = ParamSpec("P")
R = TypeVar("R")

STEP, ALLOCATE = "step", "allocate"
"""Points of a model."""


class Injected(DpkitError):  # noqa: N818 - reads as what happened
    """What a point raises when its turn has come."""


class FailCase(NamedTuple):
    """One run: which call fails (none: the run that counts), and where the target is cancelled."""

    seed: int
    kind: str
    call: int
    cancel: Case | None = None

    def __str__(self) -> str:
        cancel = "" if self.cancel is None else f"@{self.cancel}"
        return f"{self.seed}:{self.kind}:{self.call}{cancel}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gives."""
        fail, _, cancel = text.partition("@")
        seed, kind, call = fail.split(":")
        return cls(int(seed), kind, int(call), Case.parse(cancel) if cancel else None)


class Points(Mark):
    """Given to the scenario, which sends its calls through it; made by the sweeps, one a run."""

    def __init__(self, case: FailCase) -> None:
        super().__init__(case.cancel or Case(case.seed, 0, Mode.NEVER))
        self.calls: Counter[str] = Counter()
        self.injected: Injected | None = None
        self._fails = case

    def reach(self, kind: str) -> None:
        """Count a call of this kind.

        Raises:
            Injected: it is the one.
        """
        call = self.calls[kind]
        self.calls[kind] += 1
        if (kind, call) == (self._fails.kind, self._fails.call):
            self.injected = Injected(f"injected at {kind} {call}")
            raise self.injected

    def wrap(self, kind: str, function: Callable[P, R]) -> Callable[P, R]:
        """Make a function one whose calls are counted, and fail before they begin."""

        def reached(*args: P.args, **kwargs: P.kwargs) -> R:
            self.reach(kind)
            return function(*args, **kwargs)

        return reached

    def model(self, model: Model) -> Model:
        """Make a model one whose steps (`STEP`) and allocations (`ALLOCATE`) are points."""
        return _PointedModel(model, self)

    def verify(self) -> None:
        """Check, after the run, that what was to happen has happened.

        Raises:
            InternalError: it has not. A run of a pair need not come to its second event: the first
            may have ended it.
        """
        came = self.injected or (self._fails.cancel is not None and self.reached)
        if self._fails.kind and not came:
            raise InternalError(
                "the run never came to the call that was to fail: the scenario is not deterministic"
            )


class _PointedModel(ModelWrapper):
    def __init__(self, model: Model, points: Points) -> None:
        super().__init__(model)
        self._points = points

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        self._points.reach(ALLOCATE)
        return super().allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self._points.reach(STEP)
        return super().execute(batch, cache)
