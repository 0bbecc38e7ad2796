"""What users of other balancers reported, with whole clusters on a virtual clock.

A: stale or missing load stats. B: balancing goes wrong. Those that need no engine are in
`tests/balancer`.
"""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import trio
import trio.testing

from dpkit._trio import seeded_scheduler
from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import SamplingParams, StepResult
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.idle import check_idle
from tests.nursery.lab import loop_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dpkit.messages import Batch

T = TypeVar("T")


class Fast(CostModel):
    """Llama 8B on an H100."""

    def __init__(self) -> None:
        super().__init__("h100-8b")


class Slow(EchoModel):
    """Each step lasts two minutes, so that days of long answers are few steps."""

    step_s = 120.0

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        sampled = super().execute(batch, cache).sampled
        return StepResult(sampled=sampled, duration_s=self.step_s)


class HalfSecond(Slow):
    """Each step lasts half a second."""

    step_s = 0.5


def run(
    body: Callable[[Cluster], Awaitable[T]],
    model: type[object],
    *overrides: str,
    engines: int,
    clients: int = 1,
) -> T:
    """Run `body` with a cluster, and find it idle afterwards."""
    text = f'[[engines]]\nmodel = "{__name__}:{model.__name__}"\ncount = {engines}\n'
    config = parse_config(text, overrides=overrides)

    async def main() -> T:
        async with open_cluster(config, clients=clients) as cluster:
            result = await body(cluster)
            await trio.sleep(10 * Slow.step_s)  # engines hear of the last ones, snapshots go out
            check_idle(cluster)
            assert {loads[:2] for loads in cluster._rules._loads} == {(0, 0)}
        return result

    with seeded_scheduler(49204):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def closed_loop(
    cluster: Cluster,
    work: Iterator[tuple[int, int]],
    *,
    users: int,
    look: Callable[[], None],
    every_s: float = 0.05,
    apart_s: float = 0.0,
) -> None:
    """Let users send one request after the other until the work is done; look at the full load."""
    done = trio.Event()

    async def user(number: int) -> None:
        await trio.sleep(number * apart_s)
        client = cluster.clients[number % len(cluster.clients)]
        for prompt, output in work:
            await client.complete([0] * prompt, SamplingParams(max_tokens=output, ignore_eos=True))
        done.set()

    async with trio.open_nursery() as nursery:
        for number in range(users):
            nursery.start_soon(user, number)
        await trio.sleep(users * apart_s + every_s)
        while not done.is_set():
            look()
            await trio.sleep(every_s)


def counts(cluster: Cluster) -> list[tuple[int, int]]:
    """(running, waiting) by engine, as it is."""
    return [loop_of(slot).core.get_request_counts() for slot in cluster._slots]


def spread(numbers: list[int]) -> int:
    return max(numbers) - min(numbers)


@pytest.mark.parametrize("lockstep", ["false", "true"])
def test_A01_every_engine_publishes_and_none_drifts_away(lockstep: str) -> None:
    """64 prompts of 2,000 to 20,000 tokens, 16 users: in either mode all four are heard of."""
    rng = random.Random(48808)
    work = [(rng.randrange(2000, 20_000), rng.randrange(5, 40)) for _ in range(64)]
    spreads: list[int] = []
    heard_of = [0] * 4

    async def body(cluster: Cluster) -> None:
        def look() -> None:
            for index, (waiting, running, _) in enumerate(cluster._rules._loads):
                heard_of[index] += waiting + running > 0
            spreads.append(spread([sum(each) for each in counts(cluster)]))

        await closed_loop(cluster, iter(work), users=16, look=look)

    overrides = [f"coordinator.wave_coordination={lockstep}", "engines.0.kv.prefix_cache=false"]
    run(body, Fast, *overrides, engines=4)
    assert len(spreads) > 50
    assert min(heard_of) > 0.9 * len(spreads)
    assert statistics.fmean(spreads) <= 3, "of four on each; 27 beside none was reported"


def test_A02_requests_that_come_before_a_long_step_are_seen_during_it() -> None:
    async def body(cluster: Cluster) -> list[tuple[int, int]]:
        seen = []
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(cluster.client.complete, "hello", SamplingParams(max_tokens=2))
            for _ in range(2):  # at 50 ms, in the step; and at 650 ms, in the next
                await trio.sleep(0.05)
                seen.append(cluster._rules._loads[0][:2])
                await trio.sleep(0.55)
        return seen

    limit = "engines.0.scheduler.max_num_seqs=8"
    assert run(body, HalfSecond, limit, engines=1) == [(20, 0), (12, 8)]


@pytest.mark.parametrize("policy", ["kv_pressure", "least_tokens"])
def test_B01_nobody_queues_while_another_engine_has_room(policy: str) -> None:
    """Heavy-tailed lengths, eight small KV pools, the load that fills them to a half.

    Who came to an engine stays there, so somebody may queue for as long as its neighbours' answers
    take, but not for longer: 0.3 to 1.2 seconds, by the schedule.
    """
    rng = random.Random(36748)
    prompts = [int(min(6000.0, rng.lognormvariate(6.5, 1.0))) for _ in range(250)]
    work = [(prompt, int(min(1500.0, 1 + rng.lognormvariate(4.5, 1.0)))) for prompt in prompts]
    longest_s, look_s = 1.5, 0.02
    queued_since: list[float] = []
    looks: list[float] = []

    async def body(cluster: Cluster) -> None:
        def look() -> None:
            now = trio.current_time()
            looks.append(now)
            loops = [loop_of(slot) for slot in cluster._slots]
            room = any(
                waiting == 0
                and running < loop.core.limits.max_num_seqs
                and loop.core.get_kv_cache_usage() < 0.5
                for loop, (running, waiting) in zip(loops, counts(cluster), strict=True)
            )
            if not (room and any(waiting for _, waiting in counts(cluster))):
                queued_since.clear()
            elif not queued_since:
                queued_since.append(now)
            else:
                assert now - queued_since[0] < longest_s

        await closed_loop(cluster, iter(work), users=64, look=look, every_s=look_s)

    overrides = ["engines.0.kv.num_blocks=1000", "engines.0.kv.prefix_cache=false"]
    run(body, Fast, *overrides, f"balancer.policy={policy}", engines=8)
    assert len(looks) > 100


@pytest.mark.parametrize(
    ("policy", "often", "never"), [("least_tokens", 1, 2), ("kv_pressure", 1, 3)]
)
def test_B02_engines_run_equally_many(policy: str, often: int, never: int) -> None:
    """As many equal requests as there are slots.

    `kv_pressure` is vLLM's: for up to one interval it counts requests that have ended since the
    snapshot, and so may be off by one more for a moment. `least_tokens` counts its own exactly.
    """
    spreads: list[int] = []

    async def body(cluster: Cluster) -> None:
        def look() -> None:
            spreads.append(spread([running for running, _ in counts(cluster)]))

        work = iter([(200, 50)] * 300)
        await closed_loop(cluster, work, users=64, look=look, apart_s=0.013)

    overrides = ["engines.0.scheduler.max_num_seqs=8", "engines.0.kv.prefix_cache=false"]
    run(body, Fast, *overrides, f"balancer.policy={policy}", engines=8)
    assert max(spreads) < never
    assert sum(each <= often for each in spreads) > 0.7 * len(spreads)


@pytest.mark.parametrize(
    "hours", [pytest.param(8, id="8h"), pytest.param(72, id="72h", marks=pytest.mark.slow)]
)
def test_B03_imbalance_does_not_grow_with_time(hours: int) -> None:
    """50 users whose answers take ten minutes to an hour, for days."""
    spreads: list[int] = []

    async def body(cluster: Cluster) -> None:
        rng = random.Random(40279)
        end = trio.current_time() + hours * 3600

        def work() -> Iterator[tuple[int, int]]:
            while trio.current_time() < end:
                yield 20, rng.randrange(5, 30)

        def look() -> None:
            spreads.append(spread([sum(each) for each in counts(cluster)]))

        await closed_loop(cluster, work(), users=50, look=look, every_s=300, apart_s=7)

    run(body, Slow, "engines.0.supervision.step_timeout=10m", engines=4)
    half = len(spreads) // 2
    assert statistics.fmean(spreads[half:]) <= statistics.fmean(spreads[:half]) + 0.5
    assert max(spreads) <= 6, "of twelve or thirteen on each"
