"""`open_cluster`: the nursery tree of a config, from model loading to the last block freed.

Builds and wires; decides nothing. The tree::

    caller's task ── async with open_cluster(config)
    ├─ services, shielded from birth, stopped after the body
    │   ├─ coordinator
    │   └─ engine NAME-0, NAME-1, …   each drives one EngineCore, on a thread if it needs one
    └─ body: your code; a request spawns nothing
"""

from __future__ import annotations

import os
import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.config.load import load_config
from dpkit.config.schema import Config
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models import load_model, loads_at_once
from dpkit.engine.publish import PublishGate
from dpkit.errors import ClusterFailed, ClusterNotStarted, InternalError
from dpkit.link.local import LocalLink
from dpkit.messages import EngineId
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.client import Client
from dpkit.nursery.coordinator import run_coordinator
from dpkit.nursery.fanin import StatsFanIn
from dpkit.nursery.inbox import Inbox
from dpkit.nursery.services import open_services

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from dpkit.abc import Model, Tokenizer
    from dpkit.balancer.coordinator import CoordinatorStatistics
    from dpkit.config.schema import EngineGroupConfig
    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.messages import Snapshot
    from dpkit.names import Dtype, Quant
    from dpkit.nursery.client import ClientStatistics
    from dpkit.nursery.fanin import FanInStatistics
    from dpkit.nursery.services import Services

    _Wanted = tuple[str, Dtype, Quant]


@frozen(kw_only=True)
class EngineStatistics:
    """One engine at one moment."""

    engine: EngineId
    model: str
    core: EngineCoreStatistics


@frozen(kw_only=True)
class ClusterStatistics:
    """The whole cluster at one moment; all counts are since its start unless named otherwise."""

    engines: tuple[EngineStatistics, ...]
    clients: tuple[ClientStatistics, ...]
    coordinator: CoordinatorStatistics
    fanin: FanInStatistics


class Cluster:
    """A running cluster; made by `open_cluster`."""

    def __init__(self, config: Config, models: Mapping[_Wanted, Model], *, clients: int) -> None:
        self.config = config
        self.started = False
        self._fanin = StatsFanIn(ordered=config.coordinator.wave_coordination)
        self._models: list[str] = []
        self._loops: list[BusyLoop] = []
        for group in config.engines:
            for rank in range(group.count):
                self._models.append(group.model)
                self._loops.append(self._engine(group, rank, models[_wanted(group)]))
        self._rules = CoordinatorRules(
            len(self._loops),
            now=trio.current_time(),
            interval=config.coordinator.interval,
            wave_coordination=config.coordinator.wave_coordination,
        )
        tokenizer = models[_wanted(config.engines[0])].tokenizer()
        self.clients: Sequence[Client] = tuple(
            self._client(index, clients, tokenizer) for index in range(clients)
        )

    def __repr__(self) -> str:
        return f"<Cluster {self.config.cluster.name}: {', '.join(map(repr, self._loops))}>"

    @property
    def client(self) -> Client:
        """The first client: the only one, unless `open_cluster` was asked for more."""
        return self.clients[0]

    def statistics(self) -> ClusterStatistics:
        """All counts, now; never waits, and still answers after the cluster is closed."""
        return ClusterStatistics(
            engines=tuple(
                EngineStatistics(engine=loop.engine, model=model, core=loop.core.statistics())
                for loop, model in zip(self._loops, self._models, strict=True)
            ),
            clients=tuple(client.statistics() for client in self.clients),
            coordinator=self._rules.statistics(),
            fanin=self._fanin.statistics(),
        )

    def audit(self) -> tuple[str, ...]:
        """Every contradiction in the books of clients and engines, in words; empty when all agree.

        Walks through all blocks: for tests and for when something looks wrong.
        """
        problems = [problem for client in self.clients for problem in client.audit()]
        for loop in self._loops:
            try:
                loop.core.check()
            except InternalError as error:
                problems.append(f"engine {loop.engine}: {error}")
        return tuple(problems)

    def start(self, services: Services) -> None:
        """Start the coordinator and all engines; called once, by `open_cluster`."""
        services.stop_with(self._stop)
        services.start_soon(
            run_coordinator, self._rules, self._fanin, self._tell, name="coordinator"
        )
        for loop in self._loops:
            services.start_soon(loop.run, name=f"engine {loop.engine}")

    def close(self) -> None:
        """Refuse new requests and abort those in flight; done at the end of `open_cluster`."""
        for client in self.clients:
            client.close()

    def failure(self, message: str) -> ClusterFailed:
        """What `open_cluster` raises when a service failed with `message`."""
        return ClusterFailed(message) if self.started else ClusterNotStarted(message)

    async def wait_ready(self) -> None:
        """Wait until every engine has allocated its KV cache and serves."""
        for loop in self._loops:
            await loop.ready.wait()

    def _engine(self, group: EngineGroupConfig, rank: int, model: Model) -> BusyLoop:
        limits = resolve_limits(
            model.spec,
            max_num_seqs=group.scheduler.max_num_seqs,
            max_num_batched_tokens=group.scheduler.max_num_batched_tokens,
            block_size=group.kv.block_size,
            num_blocks=group.kv.num_blocks,
            memory=group.kv.memory,
            prefix_cache=group.kv.prefix_cache,
        )
        coordinator = self.config.coordinator
        return BusyLoop(
            engine=EngineId(f"{group.name}-{rank}"),
            index=len(self._loops),
            model=model,
            core=EngineCore(model, limits=limits, eos_token_ids=model.spec.eos_token_ids),
            inbox=Inbox(),
            publish=self._fanin.publish if coordinator.publish else None,
            gate=PublishGate(coordinator.kv_publish_delta),
        )

    def _client(self, index: int, count: int, tokenizer: Tokenizer) -> Client:
        ledger = Ledger()
        view = LoadView(
            [loop.engine for loop in self._loops], ledger, client_index=index, client_count=count
        )
        policy = load_policy(self.config.balancer.policy, rng=self._rng(f"{index}/policy"))
        client = Client(
            ledger=ledger,
            dispatch=EarlyDispatch(ledger, view, policy),
            tokenizer=tokenizer,
            rng=self._rng(f"{index}"),
            prefix=f"{self.config.cluster.name}-{index}",
        )
        for loop in self._loops:
            client.add_link(LocalLink(loop.engine, loop.inbox, client.deliver))
        return client

    def _rng(self, use: str) -> random.Random:
        """A stream for each use: what one draws changes nothing for the others."""
        seed = self.config.cluster.seed
        return random.Random(None if seed is None else f"{seed}/{use}")  # noqa: S311 - no secrets

    def _tell(self, snapshot: Snapshot) -> None:
        for client in self.clients:
            client.on_snapshot(snapshot)

    async def _stop(self) -> None:
        """Let every engine finish what is left, last started first."""
        for loop in reversed(self._loops):
            loop.inbox.close()
            await loop.ended.wait()


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_cluster(config: Config | str | Path, *, clients: int = 1) -> AsyncIterator[Cluster]:
    """Bring a cluster up, hand it to the body, and take it down.

    Args:
        config: A loaded config, or the path of a TOML file.
        clients: How many independent clients the cluster has, each with its own balancer.

    Resource handling:
        All engines are ready when the block begins. When it ends, requests still in flight are
        aborted, engines free their blocks, and every task and thread is gone, within
        ``cluster.grace`` seconds plus one step: a step of a local engine cannot be interrupted.

    Error handling:
        ConfigError, ModelNotFound, ModelUnsupported: raised before any engine starts.
        ClusterFailed: an engine or the coordinator died; the body was cancelled, the first error
        is the cause. ClusterNotStarted: likewise, before the body began. What the body raises
        comes out bare and unchanged.
    """
    if not isinstance(config, Config):
        config = load_config(config)
    models = await _load_models(config)
    cluster = Cluster(config, models, clients=clients)
    async with open_services(grace=config.cluster.grace, failure=cluster.failure) as services:
        cluster.start(services)
        try:
            await cluster.wait_ready()
            cluster.started = True
            yield cluster
        finally:
            cluster.close()


async def _load_models(config: Config) -> dict[_Wanted, Model]:
    """Load each model once, however many groups and engines use it."""
    models: dict[_Wanted, Model] = {}
    for name, dtype, quant in dict.fromkeys(map(_wanted, config.engines)):
        load = partial(load_model, name, dtype=dtype, quant=quant)
        # Weights take seconds, hence the thread. But while one works, a virtual clock sees nothing
        # to wait for and jumps to the next deadline: what is simulated must use none.
        loaded = load() if loads_at_once(name) else await trio.to_thread.run_sync(load)
        models[name, dtype, quant] = loaded
    _share_cores(config, models)
    return models


def _wanted(group: EngineGroupConfig) -> _Wanted:
    """What groups have in common that share one model."""
    return group.model, group.dtype, group.quant


def _share_cores(config: Config, models: Mapping[_Wanted, Model]) -> None:
    """Let the engines that compute have the cores of this process, each as many."""
    engines = sum(g.count for g in config.engines if not models[_wanted(g)].inline)
    for model in models.values():
        if not model.inline:
            model.threads_per_engine = max(1, len(os.sched_getaffinity(0)) // engines)
