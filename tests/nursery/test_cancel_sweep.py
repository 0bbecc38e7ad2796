"""Whoever is cancelled, whenever: nothing stays in flight, in an engine, or running.

`tests/planted` breaks the release path on purpose and demands that this file goes red.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import define, field

from dpkit._trio import seeded_scheduler
from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import SamplingParams
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.idle import check_idle
from dpkit.testing.sweep import REPLAY, sweep
from tests.nursery.lab import loop_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.config.schema import Config
    from dpkit.engine.core import EngineCore
    from dpkit.messages import Batch, StepResult
    from dpkit.testing.mark import Mark

    Ask = Callable[["History", str], Awaitable[None]]

SEEDS = range(int(os.environ.get("DPKIT_TEST_SEEDS", "20")))

TARGET = "target"
PROMPT = "abcdefghi"
NEIGHBOURS = ("neighbour-1", "neighbour-2", "neighbour-3")
TOKENS = 6

# Room for one and a half requests an engine, and no prompt fits one step.
SMALL = (
    "kv.block_size=4",
    "kv.num_blocks=6",
    "scheduler.max_num_batched_tokens=5",
    "scheduler.max_num_seqs=3",
)


class Recording(EchoModel):
    """Notes at every step which requests its engine knows, running and waiting ones alike."""

    def __init__(self) -> None:
        self.cores: list[EngineCore] = []
        self.known: list[set[str]] = []
        self.chunks = 0

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        queues = [core._scheduler for core in self.cores if core._scheduler._batch is batch]
        self.known += [{*each.running, *each.waiting} for each in queues]
        self.chunks += any(row.output_index is None for row in batch.rows)
        return super().execute(batch, cache)


class RecordingCost(Recording):
    """The same, at the speed of a preset."""

    def __init__(self) -> None:
        super().__init__()
        self._cost = CostModel("h20-4b")

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        super().execute(batch, cache)
        return self._cost.execute(batch, cache)


@define
class History:
    """One run, as far as it is checked."""

    cluster: Cluster
    model: Recording
    left_at: int = 0
    texts: dict[str, str] = field(factory=dict)


async def _complete(history: History, request_id: str) -> None:
    completion = await history.cluster.client.complete(
        PROMPT, request_id=request_id, max_tokens=TOKENS, engine="engine-0"
    )
    history.texts[request_id] = completion.text


async def _stream(history: History, request_id: str) -> None:
    """The same by hand: entered, read and left by three calls instead of one."""
    async with history.cluster.client.generate(
        PROMPT, request_id=request_id, max_tokens=TOKENS, engine="engine-0"
    ) as stream:
        history.texts[request_id] = (await stream.read_all()).text


def _scenario(config: Config, ask: Ask) -> Callable[[Mark], Any]:
    async def scenario(mark: Mark) -> History:
        async with open_cluster(config) as cluster:
            loops = [loop_of(slot) for slot in cluster._slots]
            model = loops[0]._model
            assert isinstance(model, Recording)
            model.cores = [loop.core for loop in loops]
            history = History(cluster, model)

            async def target() -> None:
                with mark.target():
                    await ask(history, TARGET)
                # Now, not at the next checkpoint.
                assert cluster.client._ledger.holder(TARGET) is None, "the target is in flight"
                history.left_at = len(model.known)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(target)
                for request_id in NEIGHBOURS:
                    nursery.start_soon(_complete, history, request_id)
            client = cluster.client.statistics()
            assert client.finished + client.aborted == client.started
        return history

    return scenario


def _check(history: History) -> None:
    check_idle(history.cluster)
    later = history.model.known[history.left_at :]
    assert not any(TARGET in known for known in later), "an engine kept a request that was left"
    expected = PROMPT[:TOKENS]
    assert {history.texts[request_id] for request_id in NEIGHBOURS} == {expected}
    assert history.texts.get(TARGET, expected) == expected


@pytest.mark.parametrize("ask", [_complete, _stream])
@pytest.mark.parametrize("model", ["RecordingCost", "Recording"])
@pytest.mark.parametrize(
    "settings",
    [
        ["kv.prefix_cache=true"],
        ["kv.prefix_cache=false"],
        ["balancer.policy=expected_ttft"],  # bound late: the target waits here, too
    ],
    ids=["prefix_cache", "no_prefix_cache", "late"],
)
def test_a_client_cancelled_at_any_step_leaves_nothing(
    make_config: Callable[..., Config], model: str, settings: list[str], ask: Ask
) -> None:
    config = make_config(f"{__name__}:{model}", *SMALL, *settings)
    is_late = "expected_ttft" in settings[0]
    preemptions = chunks = waited = 0

    def check(history: History) -> None:
        nonlocal preemptions, chunks, waited
        _check(history)
        preemptions += history.cluster.statistics().engines[0].core.preemptions
        chunks += history.model.chunks
        waited += history.cluster.client.statistics().admission.admitted

    done = sweep(_scenario(config, ask), seeds=SEEDS, check=check)
    print(f"{model}: {done.runs} runs, {preemptions} preemptions, {chunks} chunked steps")
    if REPLAY not in os.environ:
        assert done.runs >= len(SEEDS) * 10
        assert (waited if is_late else preemptions) > 0
        assert chunks >= done.runs


async def _serve_some(cluster: Cluster) -> None:
    """Requests of two clients, read by other tasks and by this one, which so has steps to take."""
    sampling = SamplingParams(max_tokens=TOKENS)
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(cluster.clients[number % 2].complete, PROMPT, sampling)
        await cluster.clients[1].complete(PROMPT, sampling)


@pytest.mark.parametrize("policy", ["kv_pressure", "expected_ttft"])
@pytest.mark.parametrize("model", ["echo", "cost:h20-4b"])
def test_a_cluster_cancelled_at_any_step_leaves_nothing(
    make_config: Callable[..., Config], model: str, policy: str
) -> None:
    config = make_config(model, *SMALL, f"balancer.policy={policy}")
    seen: list[Cluster] = []

    async def scenario(mark: Mark) -> Cluster | None:
        seen.clear()
        with mark.target():
            async with open_cluster(config, clients=2) as cluster:
                seen.append(cluster)
                await _serve_some(cluster)
        return seen[0] if seen else None

    def check(cluster: Cluster | None) -> None:
        if cluster is not None:
            check_idle(cluster)

    done = sweep(scenario, seeds=SEEDS, check=check)
    assert REPLAY in os.environ or done.runs >= len(SEEDS) * 20


class Boom(Exception):  # noqa: N818
    """The body's own."""


@pytest.mark.parametrize("step", range(12))
def test_a_body_that_raises_at_any_step_leaves_nothing(
    make_config: Callable[..., Config], step: int
) -> None:
    config = make_config("cost:h20-4b", *SMALL)
    boom = Boom()
    clusters = []

    async def main() -> None:
        async with open_cluster(config) as cluster:
            clusters.append(cluster)
            async with (
                cluster.client.generate(PROMPT, max_tokens=12) as unread,
                cluster.client.generate(PROMPT, max_tokens=12) as stream,
            ):
                for _ in range(step):
                    await stream.__anext__()
                assert unread.finish_reason is None
                raise boom

    for seed in SEEDS:
        with seeded_scheduler(seed), pytest.raises(Boom) as caught:
            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        assert caught.value is boom
        assert not hasattr(boom, "__notes__")
        check_idle(clusters.pop())
