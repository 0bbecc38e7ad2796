"""What a decision costs: pick an engine, count the request there, and uncount it when it ends.

The peer is the loop over all engines of vLLM's Python client (`vllm/v1/engine/core_client.py`,
`DPLBAsyncMPClient.get_core_engine_for_request` and `process_engine_outputs`), without what is not
the decision: tasks, sockets, request objects. Ours is measured twice, making the same picks:

* the decision: policy and ledger, which do what the loop does, but for the exactly-once release;
* the dispatch: all of `EarlyDispatch.place` and `release`, as a client calls it, which adds the
  checks, pins, repeated ids, tokens, and the reason of each pick.

A third table has `expected_ttft`, bound late: a pass over all engines for one request, which has no
peer in vLLM, so it is in microseconds alone.

Run it:  python benchmarks/bench_decision.py
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen
from harness import compete, print_table, seconds_each

from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.late import LateDispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, GenerateRequest, Room, Snapshot
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.balancer.ledger import Charge


class Client(Protocol):
    """What is measured."""

    def place(self, request: GenerateRequest) -> Any:
        """Pick an engine and count the request there."""

    def release(self, placed: Any) -> object:
        """Uncount what `place` returned."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take new counts."""


ENGINES = (2, 8, 64, 512)
DECISIONS = 2000
SNAPSHOT_EVERY = 100
"""Decisions between two snapshots: at an interval of 100 ms, 1,000 requests a second."""


class PlainLoop:
    """A client of vLLM's shape: score every engine at every pick."""

    def __init__(self, engines: int) -> None:
        self.core_engines = [index.to_bytes(2, "little") for index in range(engines)]
        self.engine_inflight: Counter[bytes] = Counter()
        self.reqs_in_flight: dict[str, bytes] = {}
        self.lb_engines = [[0, 0, 0.0] for _ in range(engines)]
        self.client_count = 1
        self.eng_start_index = 0

    def place(self, request: GenerateRequest) -> str:
        """Pick an engine and count the request there."""
        counts = self.lb_engines
        count = len(counts)
        min_score: float = sys.maxsize
        chosen_index = 0
        for step in range(count):
            index = (self.eng_start_index + step) % count
            waiting, running, kv_cache_usage = counts[index]
            inflight = self.engine_inflight[self.core_engines[index]]
            score: float = max(self.client_count * inflight, waiting + running)
            if waiting:
                score += waiting * 6.0 * max(0.0, kv_cache_usage - 0.5)
            if score < min_score:
                min_score = score
                chosen_index = index
        counts[chosen_index][0] += self.client_count
        self.eng_start_index = (self.eng_start_index + 1) % count
        engine = self.core_engines[chosen_index]
        self.reqs_in_flight[request.request_id] = engine
        self.engine_inflight[engine] += 1
        return request.request_id

    def release(self, request_id: str) -> None:
        """Uncount a request."""
        if (engine := self.reqs_in_flight.pop(request_id, None)) is not None:
            self.engine_inflight[engine] -= 1

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take new counts; there a message was just decoded into them, here they are copied."""
        self.lb_engines = [list(load) for load in snapshot.loads or ()]


class Decision:
    """Policy, view and ledger alone."""

    def __init__(self, engines: int) -> None:
        self.ledger = Ledger()
        names = [EngineId(f"engine-{index}") for index in range(engines)]
        self.view = LoadView(names, self.ledger)
        self.policy = load_policy(PolicyName.KV_PRESSURE)

    def place(self, request: GenerateRequest) -> Charge:
        """Pick an engine and count the request there."""
        index = self.policy.pick(request, self.view)
        charge = self.ledger.charge(request.request_id, self.view.engines[index])
        self.policy.on_charge(request, index, self.view)
        return charge

    def release(self, charge: Charge) -> None:
        """Uncount a request."""
        charge.release()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take new counts."""
        self.view.apply(snapshot)


def dispatch(engines: int) -> EarlyDispatch:
    """All of it, as a client has it."""
    parts = Decision(engines)
    return EarlyDispatch(parts.ledger, parts.view, parts.policy)


def snapshot(engines: int, rng: random.Random) -> Snapshot:
    """Busy engines, some with a queue and a full cache."""
    return Snapshot(
        loads=tuple(
            (max(0, rng.randrange(-8, 8)), rng.randrange(4, 32), rng.uniform(0.2, 1.0))
            for _ in range(engines)
        )
    )


@frozen
class Traffic:
    """A steady load: each decision is one request that begins and one, older, that ends."""

    engines: int
    snapshots: bool

    def cost(self, client: Client) -> float:
        """Seconds a decision."""
        every = SNAPSHOT_EVERY if self.snapshots else DECISIONS
        rng = random.Random(self.engines)
        news = [snapshot(self.engines, rng) for _ in range(0, DECISIONS, every)]
        live = deque(map(client.place, self._requests("before", 4 * self.engines)))
        requests = self._requests("now", DECISIONS)
        client.on_snapshot(news[0])
        client.release(client.place(self._requests("warm", 1)[0]))

        def decide() -> None:
            place, release = client.place, client.release
            begun, ended = live.append, live.popleft
            for first in range(0, DECISIONS, every):
                if first:
                    client.on_snapshot(news[first // every])
                for request in requests[first : first + every]:
                    begun(place(request))
                    release(ended())

        return seconds_each(decide, DECISIONS)

    def _requests(self, prefix: str, count: int) -> list[GenerateRequest]:
        return [
            GenerateRequest(request_id=f"{prefix}-{number}", prompt_token_ids=(0,))
            for number in range(count)
        ]


def compare(traffic: Traffic) -> tuple[str, ...]:
    """One row: the loop, then each of ours with its ratio to the loop."""
    makers: dict[str, Callable[[int], Client]] = {
        "loop": PlainLoop,
        "decision": Decision,
        "dispatch": dispatch,
    }
    measured = compete(
        {name: partial(_cost, traffic, make) for name, make in makers.items()}, rounds=9
    )
    row = [str(traffic.engines), f"{measured.median('loop') * 1e6:.2f}"]
    for name in ("decision", "dispatch"):
        row.append(f"{measured.median(name) * 1e6:.2f}")
        row.append(f"{measured.times_faster(name, than='loop'):.2f}x")
    return tuple(row)


def _cost(traffic: Traffic, make: Callable[[int], Client]) -> float:
    return traffic.cost(make(traffic.engines))


def cost_of_a_pass(engines: int) -> float:
    """Seconds for a request that has come: look at all engines, and decide."""
    ledger = Ledger()
    view = LoadView((), ledger)
    dispatch = LateDispatch(ledger, view, ExpectedTtft())
    room = Room(tokens_per_step=8192, requests=256, kv_tokens=450_000)
    for rank in range(engines):
        dispatch.add(EngineId(f"engine-{rank}"), rank, room)
    requests = [
        GenerateRequest(request_id=f"r{number}", prompt_token_ids=(number,) * 100)
        for number in range(4 * engines + DECISIONS)
    ]
    for request in requests[DECISIONS:]:
        dispatch.place(request)
    prospects = [dispatch.prepare(request) for request in requests[:DECISIONS]]

    def decide() -> None:
        for prospect in prospects:
            dispatch.open_pass().offer(prospect)

    return seconds_each(decide, DECISIONS)


def main() -> None:
    """Print three tables."""
    for snapshots in (False, True):
        news = f"a snapshot every {SNAPSHOT_EVERY}" if snapshots else "no snapshots between"
        print_table(
            f"kv_pressure: pick, charge and release, {news}; us each, and times faster",
            ("engines", "plain loop", "decision", "", "dispatch", ""),
            [compare(Traffic(engines, snapshots)) for engines in ENGINES],
        )
    print_table(
        "expected_ttft, late: one pass over all engines for one request; us each",
        ("engines", "pass"),
        [
            (str(engines), f"{min(cost_of_a_pass(engines) for _ in range(9)) * 1e6:.1f}")
            for engines in (2, 8, 32, 64)
        ],
    )


if __name__ == "__main__":
    main()
