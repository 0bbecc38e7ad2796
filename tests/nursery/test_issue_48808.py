"""vLLM's issue 48808: under long contexts one engine held 27 requests while two sat idle.

Independent engines never published their queue counts, so the balancer of the day
(`queue_weighted`, which knows nothing else) went round robin. The scenario: 32 users in a closed
loop, prompts of 500 to 30,000 tokens, outputs lognormal, four engines.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import define, field, frozen

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.messages import SamplingParams
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.idle import check_idle
from tests.nursery.lab import loop_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.engine.core import EngineCore
    from dpkit.messages import Batch, StepResult

USERS = 32


@frozen(kw_only=True)
class Scenario:
    """Everything in it lasts `scale` times as long, the publish interval too."""

    requests: int
    scale: float
    policy: str
    clients: int

    @property
    def interval_s(self) -> float:
        return 0.1 * self.scale

    def workload(self) -> Iterator[tuple[int, int]]:
        """Prompt and output tokens, one request each."""
        rng = random.Random(48808)
        for _ in range(self.requests):
            output = min(30_000.0, rng.lognormvariate(7.5, 1.0))
            yield int(rng.randrange(500, 30_000) * self.scale), 1 + int(output * self.scale)


@define
class Seen:
    """What was measured."""

    spreads: list[int] = field(factory=list)
    idle_beside_queue_s: float = 0.0
    longest_step_s: float = 0.0

    @property
    def mean_spread(self) -> float:
        return statistics.fmean(self.spreads)


class Watched(CostModel):
    """Looks at all engines whenever one begins a step."""

    def __init__(self) -> None:
        super().__init__("h20-4b")
        self.cores: list[EngineCore] = []
        self.seen = Seen()
        self._since: dict[EngineCore, float] = {}

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        result = super().execute(batch, cache)
        self.seen.longest_step_s = max(self.seen.longest_step_s, result.duration_s)
        counts = [core.get_request_counts() for core in self.cores]
        queue = any(waiting for _, waiting in counts)
        for core, (running, waiting) in zip(self.cores, counts, strict=True):
            if queue and not running and not waiting:
                since = self._since.setdefault(core, trio.current_time())
                waited = trio.current_time() - since
                self.seen.idle_beside_queue_s = max(self.seen.idle_beside_queue_s, waited)
            else:
                self._since.pop(core, None)
        return result


async def _serve(cluster: Cluster, scenario: Scenario) -> Seen:
    """Sample while all users are busy and none is at its first request any more."""
    work = scenario.workload()
    settled, out_of_work = trio.Event(), trio.Event()
    beginners = set(range(USERS))
    model = loop_of(cluster._slots[0])._model
    assert isinstance(model, Watched)
    model.cores = cores = [loop.core for loop in (loop_of(slot) for slot in cluster._slots)]

    async def user(number: int) -> None:
        client = cluster.clients[number % scenario.clients]
        for prompt, output in work:
            await client.complete([0] * prompt, SamplingParams(max_tokens=output))
            beginners.discard(number)
            if not beginners:
                settled.set()
        out_of_work.set()

    async with trio.open_nursery() as nursery:
        for number in range(USERS):
            nursery.start_soon(user, number)
        await settled.wait()
        while not out_of_work.is_set():
            running = [core.get_request_counts()[0] for core in cores]
            model.seen.spreads.append(max(running) - min(running))
            await trio.sleep(scenario.interval_s)
    return model.seen


def _measure(scenario: Scenario, *, publish: bool) -> Seen:
    config = parse_config(
        f"""
        [[engines]]
        model = "{__name__}:Watched"
        count = 4
        [engines.kv]
        prefix_cache = false
        [coordinator]
        publish = {str(publish).lower()}
        interval = "{scenario.interval_s * 1000:g}ms"
        [balancer]
        policy = "{scenario.policy}"
        """
    )

    async def main() -> Seen:
        async with open_cluster(config, clients=scenario.clients) as cluster:
            seen = await _serve(cluster, scenario)
        check_idle(cluster)
        return seen

    with seeded_scheduler(48808):
        seen = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    print(
        f"{scenario.policy:15} {scenario.clients:2} clients, publish = {publish!s:5}: mean spread "
        f"{seen.mean_spread:5.2f}, worst {max(seen.spreads):2}; idle beside a queue for at most "
        f"{seen.idle_beside_queue_s:.3f} s, longest step {seen.longest_step_s:.3f} s"
    )
    return seen


def _compare(scenario: Scenario) -> None:
    silent, published = _measure(scenario, publish=False), _measure(scenario, publish=True)
    assert silent.mean_spread >= 2 * published.mean_spread
    assert published.idle_beside_queue_s <= scenario.interval_s + published.longest_step_s


@pytest.mark.parametrize(
    ("policy", "clients"), [("queue_weighted", 1), ("kv_pressure", 1), ("kv_pressure", 16)]
)
def test_published_counts_halve_the_spread(policy: str, clients: int) -> None:
    _compare(Scenario(requests=200, scale=0.05, policy=policy, clients=clients))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "clients"), [("queue_weighted", 1), ("kv_pressure", 16)])
def test_published_counts_halve_the_spread_at_full_size(policy: str, clients: int) -> None:
    _compare(Scenario(requests=600, scale=1.0, policy=policy, clients=clients))


@pytest.mark.slow
def test_at_full_size_one_kv_pressure_client_needs_no_counts() -> None:
    """Its own exact in-flight counts say all there is to know, when no other client is there.

    In the small scenario they don't: it adds to its copy of the snapshot at every pick, and only a
    new snapshot clears that. Silent engines leave that to the one each five seconds, which is often
    here, where a user is served in a minute, and seldom there.
    """
    scenario = Scenario(requests=600, scale=1.0, policy="kv_pressure", clients=1)
    for publish in (False, True):
        seen = _measure(scenario, publish=publish)
        assert seen.mean_spread < 2
        assert seen.idle_beside_queue_s <= scenario.interval_s + seen.longest_step_s
