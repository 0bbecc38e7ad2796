"""A cluster whose engines can be made to fail one by one, and the history of what came of it.

For tests: each engine is a group of its own, ``e0-0``, ``e1-0``, …, with a model of its own.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

from dpkit.config.load import parse_config
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import StepResult
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.testing.faults import FaultyModel
from dpkit.testing.history import History
from dpkit.testing.wrapper import ModelOfEach, ModelWrapper, named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from dpkit.abc import Model
    from dpkit.config.schema import Config
    from dpkit.messages import Batch
    from dpkit.nursery.events import Event
    from dpkit.nursery.slot import EngineSlot

STEP_S = 0.1
BACKOFF_S = 1.0

SUPERVISION = 'backoff = "1s", jitter = 0.0, step_timeout = "5s"'


def loop_of(slot: EngineSlot) -> BusyLoop:
    """The present life of an engine in this process, to look into."""
    assert isinstance(slot.life, BusyLoop)
    return slot.life


class Timed(EchoModel):
    """Each step lasts 100 ms."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=STEP_S)


class Watched(ModelWrapper):
    """Notes when its engine allocated, which begins a life, and when it stepped, with whom."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.births: list[float] = []
        self.steps: list[tuple[float, tuple[str, ...]]] = []

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        self.births.append(_now())
        return super().allocate(num_blocks=num_blocks, block_size=block_size)

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        rows = tuple(row.request_id for row in batch.rows)
        self.steps.append((_now(), rows))
        return super().execute(batch, cache)


def _now() -> float:
    """Trio's time, or 0 in a thread of an engine's."""
    return round(trio.current_time(), 6) if trio.lowlevel.in_trio_task() else 0.0


class Lab:
    """Models, one an engine, and the history of one run.

    Args:
        models: What the engines run; each is made faulty, watched and recorded.
        settings: TOML of all tables but ``[[engines]]``.
        supervision: TOML of the inline table of every engine.
        scheduler: Likewise.
        blocks: Of the first engine's cache, of four tokens each; the next one has one more, and so
            on, by which they are told apart.
        prefix_cache: Whether blocks are shared.
    """

    def __init__(
        self,
        models: Sequence[Model] = (Timed(), Timed()),
        *,
        settings: str = "",
        supervision: str = SUPERVISION,
        scheduler: str = "",
        blocks: int = 64,
        prefix_cache: bool = True,
    ) -> None:
        self.history = History()
        self.faulty = [FaultyModel(model) for model in models]
        self.watched = [Watched(model) for model in self.faulty]
        self._settings = settings
        self._supervision = supervision
        self._scheduler = scheduler
        self._share = str(prefix_cache).lower()
        self._models = {blocks + number: each for number, each in enumerate(self.watched)}

    @contextmanager
    def config(self) -> Iterator[Config]:
        """The config that runs these models, while the block lasts."""
        with named(self.history.model(ModelOfEach(self._models))) as name:
            tables = [
                f"""
                [[engines]]
                name = "e{number}"
                model = "{name}"
                kv = {{ block_size = 4, num_blocks = {blocks}, prefix_cache = {self._share} }}
                supervision = {{ {self._supervision} }}
                scheduler = {{ {self._scheduler} }}
                """
                for number, blocks in enumerate(self._models)
            ]
            seed = [] if "seed" in self._settings else ["cluster.seed=1"]
            yield parse_config(f"{self._settings}\n{''.join(tables)}", overrides=seed)

    @asynccontextmanager
    async def open(self, *, clients: int = 1) -> AsyncIterator[Cluster]:
        """Open the cluster."""
        with self.config() as config:
            async with open_cluster(config, clients=clients) as cluster:
                yield cluster


def when(events: Sequence[Event]) -> list[tuple[float, str]]:
    """When they happened, and to which life."""
    return [(round(event.at, 6), str(event.engine)) for event in events]


async def settle() -> None:
    """Let every engine take its next step."""
    await trio.sleep(STEP_S)
    await trio.testing.wait_all_tasks_blocked()
