"""The real ledger, view, dispatch and policy of one client, wired as a client wires them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

import pytest

from dpkit.balancer.dispatch import EarlyDispatch, Placement
from dpkit.balancer.late import make_dispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, GenerateRequest, Snapshot
from dpkit.names import Binding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.abc import Policy


class Client:
    """One client's balancer; requests are named r0, r1, … unless the test names them."""

    def __init__(self, engines: int, policy: Policy, index: int, count: int) -> None:
        self.ledger = Ledger()
        self.view = LoadView(
            [EngineId(f"e{number}") for number in range(engines)],
            self.ledger,
            client_index=index,
            client_count=count,
        )
        self.policy = policy
        self.dispatch = EarlyDispatch(self.ledger, self.view, policy)
        self._placed = 0

    def place(
        self, request_id: str = "", *, engine: str | None = None, tokens: int = 1
    ) -> Placement:
        """Place one request."""
        request_id = request_id or f"r{self._placed}"
        self._placed += 1
        return self.dispatch.place(
            GenerateRequest(request_id=request_id, prompt_token_ids=(0,) * tokens, engine=engine)
        )

    def burst(self, requests: int) -> list[int]:
        """Place requests that come at once; returns the indices of their engines."""
        return [self.place().index for _ in range(requests)]

    def snapshot(self, *loads: tuple[int, int, float]) -> None:
        """Hear from the coordinator."""
        self.dispatch.on_snapshot(Snapshot(loads=loads))

    def hear_nothing_but_zeros(self) -> None:
        """Hear of idle engines, as an old snapshot tells it."""
        self.snapshot(*[(0, 0, 0.0)] * len(self.view.engines))

    def replace(self, index: int, engine: EngineId | None = None) -> EngineId:
        """Put another life where one was: that engine's next one, unless the test names it."""
        old = self.view.engines[index]
        engine = engine or EngineId(old.name, epoch=old.epoch + 1)
        assert self.dispatch.remove(old)
        self.dispatch.add(engine, index)
        return engine

    def use(self, policy: Policy) -> None:
        """Go on with another policy."""
        self.policy = policy
        self.dispatch = make_dispatch(self.ledger, self.view, policy, Binding.EARLY)
        self.dispatch.take_over()

    def release(self, placements: Iterable[Placement]) -> None:
        """End requests."""
        for placement in placements:
            self.dispatch.release(placement)


class MakeClient(Protocol):
    """Makes clients of a cluster of so many engines."""

    def __call__(
        self, engines: int, policy: str | Policy = ..., *, index: int = ..., count: int = ...
    ) -> Client:
        """Make client `index` of `count`."""


@pytest.fixture
def make_client() -> MakeClient:
    def make(
        engines: int, policy: str | Policy = "kv_pressure", *, index: int = 0, count: int = 1
    ) -> Client:
        if isinstance(policy, str):
            policy = load_policy(policy, rng=random.Random(0))
        return Client(engines, policy, index, count)

    return make
