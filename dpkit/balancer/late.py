"""Late binding: a request waits until the engine that it is for can begin it.

Knows nothing of who waits or in what order: whoever has the queue opens a pass, offers requests in
their turn, and places those that the pass sends, each before it offers the next. What a pass knows
is wrong once anything else happens: `moves` counts that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dpkit.abc import HoldingPolicy
from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.policies import find_policy, policy_name
from dpkit.errors import ConfigError
from dpkit.names import Binding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import Pass, Policy
    from dpkit.balancer.dispatch import Placement
    from dpkit.balancer.ledger import Ledger
    from dpkit.balancer.view import LoadView
    from dpkit.messages import EngineId, GenerateRequest, Room, Snapshot, StepReport


class LateDispatch(EarlyDispatch):
    """As `EarlyDispatch`, for requests that may be held; of one client, or of several together."""

    binding: ClassVar[Binding] = Binding.LATE

    def __init__(self, ledger: Ledger, view: LoadView, policy: HoldingPolicy) -> None:
        super().__init__(ledger, view, policy)
        self._holding = policy
        self.moves = 0
        """What has happened so far that may change where a request should go, placements apart."""

    def prepare(self, request: GenerateRequest) -> Any:
        """What a pass wants to know of a request; to be kept while it waits."""
        try:
            return self._holding.prepare(request)
        except Exception as error:  # noqa: BLE001 - whatever a policy raises; likewise below
            self.blame("prepare", error)

    def age(self, prospect: Any) -> float:
        """Seconds by which others that come later may go before it."""
        try:
            return self._holding.age(prospect)
        except Exception as error:  # noqa: BLE001
            self.blame("age", error)

    def open_pass(self) -> Pass:
        """Begin to decide on those that wait; see `Pass.offer`."""
        try:
            return self._holding.open_pass(self._view)
        except Exception as error:  # noqa: BLE001
            self.blame("open_pass", error)

    def offer(self, to: Pass, prospect: Any, index: int | None = None) -> int | None:
        """Decide on one that waits; see `Pass.offer`."""
        try:
            return to.offer(prospect, index)
        except Exception as error:  # noqa: BLE001
            self.blame("offer", error)

    def index_of(self, name: str) -> int | None:
        """The engine of this name, for `Pass.offer`; None: it may not be picked now."""
        return self._view.index_of(name)

    def release(
        self, placement: Placement, output: Sequence[int] = (), *, finished: bool = False
    ) -> bool:
        """Stop counting a placed request; see `EarlyDispatch.release`."""
        self.moves += 1
        return super().release(placement, output, finished=finished)

    def on_answered(self, placement: Placement) -> None:
        """A placed request has its first token."""
        self.moves += 1
        super().on_answered(placement)

    def add(self, engine: EngineId, rank: int, room: Room | None = None) -> None:
        """Let a life of an engine be picked."""
        self.moves += 1
        super().add(engine, rank, room)

    def remove(self, engine: EngineId) -> bool:
        """Let a life be picked no more."""
        self.moves += 1
        return super().remove(engine)

    def on_snapshot(self, snapshot: Snapshot, *, now: float = 0.0) -> None:
        """Take the coordinator's newest word."""
        self.moves += 1
        super().on_snapshot(snapshot, now=now)

    def on_report(self, engine: EngineId, report: StepReport, *, now: float = 0.0) -> None:
        """Take an engine's own newest word."""
        self.moves += 1
        super().on_report(engine, report, now=now)


def usual_binding(policy: str) -> Binding:
    """When a policy of this name binds, if nobody says when: late if it can.

    Raises:
        ConfigError: there is no such policy.
    """
    return Binding.LATE if issubclass(find_policy(policy), HoldingPolicy) else Binding.EARLY


def make_dispatch(
    ledger: Ledger, view: LoadView, policy: Policy, binding: Binding
) -> EarlyDispatch:
    """The dispatch of one client.

    Raises:
        ConfigError: the policy cannot bind late.
    """
    if binding is Binding.EARLY:
        return EarlyDispatch(ledger, view, policy)
    if not isinstance(policy, HoldingPolicy):
        problem = (
            f"balancer.binding: policy {policy_name(policy)!r} cannot bind late, as it is no "
            "dpkit.abc.HoldingPolicy; leave binding out, or choose 'expected_ttft'"
        )
        raise ConfigError([problem])
    return LateDispatch(ledger, view, policy)
