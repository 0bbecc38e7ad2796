"""`open_cluster`: the nursery tree of a config, from model loading to the last block freed.

Wires and answers; decides nothing. The tree::

    caller's task ── async with open_cluster(config)
    ├─ services, shielded from birth, stopped after the body
    │   ├─ coordinator
    │   ├─ engine NAME-0, NAME-1, …   a supervisor: one life after the other
    │   ├─ timers: deadlines, ejections
    │   └─ event log writer, step log writer: when log.events, log.steps name files
    └─ body: your code; a request spawns nothing
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import trio
from attrs import evolve

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.balancer.health import Health
from dpkit.errors import (
    ClusterClosed,
    ClusterFailed,
    ClusterNotStarted,
    Draining,
    InternalError,
    plural,
)
from dpkit.imports import refuse_while_importing
from dpkit.names import Cause
from dpkit.nursery.arbitration import Arbitration
from dpkit.nursery.audit import audit_coordinator, audit_engine
from dpkit.nursery.build import Builder, load_models
from dpkit.nursery.context import protected_context
from dpkit.nursery.coordinator import Coordinator
from dpkit.nursery.dump import dump
from dpkit.nursery.events import EventKind, EventLog
from dpkit.nursery.fanin import StatsFanIn
from dpkit.nursery.launchers import Launchers
from dpkit.nursery.logfiles import LogFiles
from dpkit.nursery.membership import Membership
from dpkit.nursery.reload import as_config, make_plan, prepare
from dpkit.nursery.roster import Roster, refuse_no_time
from dpkit.nursery.services import open_services
from dpkit.nursery.standing import ClusterStatistics, EngineStanding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from dpkit.config.schema import Config
    from dpkit.messages import EngineId, Snapshot
    from dpkit.nursery.arbitration import Dispatches
    from dpkit.nursery.build import Models
    from dpkit.nursery.client import Client
    from dpkit.nursery.reload import Plan
    from dpkit.nursery.services import Services
    from dpkit.nursery.slot import EngineSlot

_log = logging.getLogger(__name__)


class Cluster:
    """A running cluster; made by `open_cluster`."""

    def __init__(self, config: Config, models: Models, *, clients: int) -> None:
        self.config = config
        self.events = EventLog()
        """What happened: engines that come and go, requests that end."""
        self._logs = LogFiles()
        self._started = False
        self._services: Services | None = None
        self._changing = trio.Lock()  # scale and apply: one after the other
        self._fanin = StatsFanIn(ordered=config.coordinator.wave_coordination)
        self._membership = Membership(Health(config.balancer))
        self._arbitration = Arbitration(lambda: self._builder.everybody(clients))
        self._coordinator = Coordinator(
            make_rules=self._make_rules,
            fanin=self._fanin,
            tell=self._tell,
            membership=self._membership,
            arbitration=self._arbitration,
            events=self.events,
            on_bug=self._on_bug,
        )
        self._launchers = Launchers()
        self._builder = self._make_builder(config, models)
        self._roster = Roster(config, self._builder, self._membership, self._on_bug)
        made = [self._builder.client(index, clients) for index in range(clients)]
        self.clients: Sequence[Client] = tuple(client for client, _ in made)
        self._flights = tuple(flights for _, flights in made)
        if clients > 1:
            self._membership.add_client(self._arbitration)  # it is told of all when clients are
        self._arbitration.serve(self._flights)

    def __repr__(self) -> str:
        return f"<Cluster {self.config.cluster.name}: {', '.join(map(repr, self._slots))}>"

    @property
    def client(self) -> Client:
        """The first client: the only one, unless `open_cluster` was asked for more."""
        return self.clients[0]

    @property
    def _rules(self) -> CoordinatorRules:
        return self._coordinator.rules

    @property
    def _needs_arbiter(self) -> bool:
        return self._builder.needs_arbiter(len(self.clients))

    @property
    def _slots(self) -> list[EngineSlot]:
        return self._roster.slots

    def statistics(self, *, requests: bool = True) -> ClusterStatistics:
        """All counts, now; never waits, and still answers after the cluster is closed.

        Args:
            requests: Whether to list each request under way, which is the dear part.
        """
        return ClusterStatistics(
            engines=tuple(slot.statistics() for slot in self._slots),
            leaving=tuple(slot.statistics() for slot in self._roster.leaving),
            departed=dict(self._roster.departed),
            clients=tuple(client.statistics(requests=requests) for client in self.clients),
            coordinator=self._rules.statistics(),
            coordinator_restarts=self._coordinator.restarts,
            arbiter_up=self._arbitration.is_up if self._needs_arbiter else None,
            fanin=self._fanin.statistics(),
            health=self._membership.statistics(),
            events_lost=self.events.dropped + self._logs.events_lost,
            steps_lost=self._logs.steps_lost,
        )

    @property
    def engines(self) -> tuple[EngineStanding, ...]:
        """Every engine and how it is, by rank; cheap, unlike `statistics`."""
        standings = (EngineStanding(slot.rank, slot.name, slot.state) for slot in self._slots)
        return tuple(sorted(standings))

    def tells_load(self, engine: EngineId) -> bool:
        """Whether a life has said anything of its load so far."""
        return self._fanin.newest_read(engine) is not None

    @property
    def longest(self) -> int:
        """The most tokens, of prompt and output together, that every engine has room for."""
        return self._builder.longest

    @property
    def longest_prompt(self) -> int | None:
        """The most tokens of a prompt that any engine has room for; None: not all are known."""
        return self._builder.longest_prompt

    def audit(self) -> tuple[str, ...]:
        """Every contradiction between clients, engines and coordinator, in words; empty: none.

        Walks through all blocks: for tests and for when something looks wrong.
        """
        problems = [problem for client in self.clients for problem in client.audit()]
        problems += self._arbitration.audit()
        for slot in dict.fromkeys([*self._slots, *self._roster.supervised]):
            problems += audit_engine(slot.life, self._flights)
            if slot.engine in self._membership.serving:
                problems += audit_coordinator(self._rules, self._fanin, slot.engine, slot.rank)
        return tuple(problems)

    async def wait_ready(self) -> None:
        """Wait until every engine serves, has been given up, or was waited for long enough."""
        await self._roster.wait_settled(self._slots)
        if self._roster.is_too_small:
            await trio.sleep_forever()  # a supervisor is about to say so, and to cancel this
        if not self._started and self._roster.fail_if_absent():
            await trio.sleep_forever()  # likewise

    async def drain(self, deadline: float = math.inf) -> None:
        """Admit no more requests, and wait until those under way have ended.

        Args:
            deadline: When those still under way are aborted, on Trio's clock; their cause is
                `drain`.

        Raises:
            ConfigError: the deadline is no moment; nothing has changed.
        """
        refuse_no_time(deadline)
        self.events.emit(EventKind.DRAINING)
        for flights in self._flights:
            flights.refuse(Draining)
        with trio.move_on_at(deadline):
            for flights in self._flights:
                await flights.wait_idle()
        for flights in self._flights:
            flights.abort_all(Cause.DRAIN)

    async def scale(self, name: str, count: int, *, deadline: float = math.inf) -> None:
        """Have `count` engines in the group `name`.

        New ones are awaited; if one does not come up, all new ones go again. The last ones leave
        after what they have is finished; at `deadline`, on Trio's clock, what is left is lost to
        them and goes elsewhere as after any loss. Waits for a change that is under way. If this is
        cancelled, new engines go again; those that leave do so nevertheless.

        Raises:
            ConfigError: there is no such group, its engines restart together, `count` is no number
                of engines, or fewer than ``cluster.min_ready`` that are not down would be left.
            ScalingFailed: a new engine did not come up.
            ClusterClosed: the cluster has been left, or is meanwhile.
        """
        refuse_no_time(deadline)
        async with self._changing:
            self._roster.refuse_closed()
            try:
                await self._roster.scale(name, count, deadline=deadline)
            finally:  # cancelled while the last ones leave: they do
                groups = self._roster.groups.values()
                self.config = evolve(self.config, engines=tuple(group.config for group in groups))
            self.events.emit(EventKind.SCALED, detail=f"{name}: {plural(count, 'engine')}")

    def plan(self, config: Config | str | Path) -> Plan:
        """What `apply` would change; takes a loaded config, or the path of a TOML file.

        Raises:
            ConfigError: the config asks for what a running cluster cannot change.
        """
        return make_plan(self.config, as_config(config))

    async def apply(self, config: Config | str | Path, *, deadline: float = math.inf) -> Plan:
        """Change the running cluster to a new config, as a whole or not at all.

        New and changed engines come up beside the old ones; when all are ready, settings and
        engines switch over in one synchronous step; then the old engines finish what they have, by
        `deadline` on Trio's clock. Waits for a change that is under way. Returns what was changed.

        Raises:
            ConfigError: as for `plan`, or too many of the engines that would stay are down.
                ModelNotFound, ModelUnsupported: a model cannot be had. ScalingFailed: a new engine
                did not come up. ClusterClosed: the cluster has been left, or is meanwhile. What
                making a policy raises. In each case nothing has changed.
        """
        refuse_no_time(deadline)
        config = as_config(config)
        async with self._changing:
            self._roster.refuse_closed()
            if not (plan := self.plan(config)):
                return plan
            builder = self._make_builder(config, await load_models(config))
            binds_alike = self.config.balancer.binds_like(config.balancer)
            dispatches = None if binds_alike else builder.dispatches(self._flights)
            try:
                change = await prepare(self._roster, builder, config, self._launchers.wait_loaded)
            except BaseException:
                self._launchers.keep(self.config.engines)
                raise
            try:
                self._switch(config, builder, dispatches)
            except BaseException:
                self._roster.dismiss(change.arriving)
                raise
            change.commit(self._roster)
            self.events.emit(EventKind.RELOADED, detail=plan.in_a_line)
            await self._roster.take_down(change.leaving, deadline)
            self._launchers.keep(config.engines)
            return plan

    def _make_builder(self, config: Config, models: Models) -> Builder:
        return Builder(
            config,
            models,
            membership=self._membership,
            fanin=self._fanin,
            events=self.events,
            launchers=self._launchers,
            on_waves=self._coordinator.note_waves,
        )

    def _switch(self, config: Config, builder: Builder, dispatches: Dispatches | None) -> None:
        self.config, self._builder = config, builder
        self._rules.interval = config.coordinator.interval
        self._membership.use(config.balancer)
        self._roster.use(config, builder)
        self._arbitration.use(builder.limits(), dispatches)

    # The other half of `open_cluster`.

    def start(self, services: Services) -> None:
        """Start the coordinator, the timers and all engines."""
        self._services = services
        logs = self.config.log
        self._logs.start(logs, services, events=self.events, membership=self._membership)
        services.stop_with(self._stop)
        services.start_soon(self._coordinator.run, name="coordinator")
        services.start_soon(self._membership.keep_time, name="ejection timer")
        for flights in self._flights:
            services.start_soon(flights.keep_time, name="deadline timer")
        self._launchers.start(services)
        self._roster.start_all(services)

    async def wait_loaded(self) -> None:
        """Wait until all models that compute in processes are loaded; raises what kept one."""
        await self._launchers.wait_loaded()

    def begin(self) -> None:
        """The body begins."""
        self._started = True

    def close(self) -> None:
        """Refuse new requests and abort those in flight; done at the end of `open_cluster`."""
        self._roster.closing = True
        for flights in self._flights:
            flights.refuse(ClusterClosed)
            flights.abort_all(Cause.SHUTDOWN)

    def failure(self, message: str) -> ClusterFailed:
        """What `open_cluster` raises when a service failed with `message`."""
        return ClusterFailed(message) if self._started else ClusterNotStarted(message)

    def _on_bug(self, error: InternalError, who: str) -> None:
        """End the cluster, loudly: books that are wrong must not be carried on with."""
        _log.critical("%s found a bug in dpkit: %s\n%s", who, error, dump(self))
        if self._services is not None:
            self._services.fail(error, who)

    async def _stop(self) -> None:
        """Let every engine finish what is left, last started first; let go of those that hang."""
        supervised = tuple(self._roster.supervised)  # none comes any more
        try:
            for slot in reversed(supervised):
                for each in slot.peers or (slot,):
                    each.retire()  # those that depend on one another end together
                if slot.hangs:
                    slot.abandon()  # its requests have been told, and the others' turn comes
                else:
                    await slot.life.ended.wait()
        finally:
            for slot in supervised:
                slot.abandon()

    def _make_rules(self) -> CoordinatorRules:
        settings = self.config.coordinator
        return CoordinatorRules(
            sum(group.count for group in self.config.engines),
            now=trio.current_time(),
            interval=settings.interval,
            wave_coordination=settings.wave_coordination,
        )

    def _tell(self, snapshot: Snapshot) -> None:
        for flights in self._flights:
            flights.on_snapshot(snapshot)
        self._arbitration.on_snapshot(snapshot)


@protected_context
async def open_cluster(config: Config | str | Path, *, clients: int = 1) -> AsyncIterator[Cluster]:
    """Bring a cluster up, hand it to the body, and take it down.

    Args:
        config: A loaded config, or the path of a TOML file.
        clients: How many independent clients the cluster has, each with its own balancer.

    Resource handling:
        Every engine is ready, or was given up, when the block begins. When it ends, requests still
        under way are aborted, engines free their blocks, and every task and thread is gone within
        ``cluster.grace`` seconds; only a step that hangs in a thread leaves that thread behind.

    Error handling:
        ValueError: `clients` is no whole number from 1 on. TypeError: the config is neither.
        RuntimeError: no Trio runs, or a module opens a cluster while it is imported for a model.
        ConfigError, ModelNotFound, ModelUnsupported: raised before any engine starts. An engine
        that fails is restarted; its requests go elsewhere or get `EngineLost`. ClusterFailed: fewer
        engines than ``cluster.min_ready`` are left, or dpkit found a bug of its own; the body was
        cancelled, the first error is the cause. ClusterNotStarted: likewise, before the body
        began. What the body raises comes out bare and unchanged.
    """
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError(
            "open_cluster was called where no Trio runs: start the program with `trio.run(main)`; "
            "beside asyncio, Trio runs as its guest: see examples/beside_asyncio.py"
        )
    if type(clients) is not int or clients < 1:
        raise ValueError(f"clients must be a whole number from 1 on, not {clients!r}")
    refuse_while_importing("open_cluster was called")
    config = as_config(config)
    cluster = Cluster(config, await load_models(config), clients=clients)
    async with open_services(grace=config.cluster.grace, failure=cluster.failure) as services:
        cluster.start(services)
        try:
            await cluster.wait_loaded()
            await cluster.wait_ready()
            cluster.begin()
            yield cluster
        finally:
            cluster.close()
