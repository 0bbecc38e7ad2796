"""What all runs of a cluster have in common: signals, SIGHUP, and the exit code.

What a signal means is decided here and in `Running.serve`: the first one has the cluster finish
what it has, the second cancels the run, which unwinds as any cancelled body does; SIGHUP reads the
file again.
"""

from __future__ import annotations

import logging
import signal
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import click
import trio
from attrs import frozen

from dpkit.cli.logs import set_up
from dpkit.cli.words import describe
from dpkit.config.load import load_config
from dpkit.errors import plural
from dpkit.names import Cause, EngineKind
from dpkit.nursery.services import open_services

if TYPE_CHECKING:
    from dpkit.cli.signals import Signals
    from dpkit.config.schema import Config, LogConfig
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.reload import Plan

FAILED = 1

_TO_CLOSE_S = 1.0
"""What is idle may close in order, and say that all is well, however little `cluster.grace` is."""

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Options:
    """What the command line says, whatever is run."""

    file: str
    overrides: tuple[str, ...] = ()
    as_json: bool = False
    audit: bool = False
    log_format: str | None = None

    def load(self) -> Config:
        """Read the file.

        Raises:
            ConfigError: it is wrong.
        """
        return load_config(self.file, overrides=self.overrides)

    def set_up_logs(self, log: LogConfig) -> None:
        """Log as the file says, but in the form that the command line asks for, if it does."""
        set_up(log.level, self.log_format or log.format)


class Running(ABC):
    """One run of `dpkit run`.

    Args:
        config: Of the cluster.
        options: What the command line says.
        signals: In force.
    """

    def __init__(self, config: Config, options: Options, signals: Signals) -> None:
        self.config = config
        self.options = options
        self.signals = signals
        self.cluster: Cluster | None = None
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        """Bring the cluster up, serve, take it down; what that raises comes out bare."""
        cluster = self.config.cluster
        self.signals.kill_after = cluster.grace - cluster.finish_within
        with self.scope:
            # Services rather than a nursery: what the run raises is fit for a message.
            async with open_services(grace=0) as services:
                services.start_soon(self._obey, name="signals")
                await self.serve()
        if self.scope.cancelled_caught and not self.signals.serving:
            models = ", ".join(dict.fromkeys(group.model for group in self.config.engines))
            click.echo(f"stopped while loading {models}; nothing was answered", err=True)

    @abstractmethod
    async def serve(self) -> None:
        """Open the cluster and serve, until all is done or the first stop signal has come."""

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """Whether something went wrong that an exit code should tell."""

    @property
    @abstractmethod
    def was_cut_short(self) -> bool:
        """Whether a stop left something unfinished."""

    @property
    def exit_code(self) -> int:
        """0: all is answered, a drain after SIGTERM included."""
        stops = self.signals.stops
        unfinished = self.was_cut_short or self.scope.cancelled_caught
        if signal.SIGINT in stops or (stops and unfinished):
            return self.signals.code
        return FAILED if self.has_failed else 0

    async def _obey(self) -> None:
        """Cancel all on the second stop signal; on the first, if nothing is served yet."""
        await self.signals.wait_stop(1)
        if self.signals.serving:
            await self.signals.wait_stop(2)
        self.scope.cancel()

    async def drain(self, cluster: Cluster, deadline: float) -> None:
        """Have the cluster finish what it has; whatever then still hangs goes with the process."""
        await cluster.drain(deadline)
        if trio.current_time() < deadline:
            return
        clients = [client.statistics(requests=False) for client in cluster.clients]
        cut_short = any(each.causes.get(Cause.DRAIN) for each in clients)
        kill_after = self.signals.kill_after
        self.signals.end_within(kill_after if cut_short else max(kill_after, _TO_CLOSE_S))

    async def reload(self) -> Plan:
        """Change the cluster to what the file says now.

        Raises:
            What `Options.load` and `Cluster.apply` raise; nothing has changed then.
        """
        assert self.cluster is not None  # noqa: S101 - asked for by who has it
        config = self.options.load()
        plan = await self.cluster.apply(config)
        self.options.set_up_logs(config.log)
        return plan

    async def reload_on_hangup(self) -> None:
        """On each SIGHUP, reload, or say why not; a service task."""
        seen = 0
        while True:
            seen = await self.signals.wait_hangup(seen)
            try:
                plan = await self.reload()
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the run goes on
                said = "; ".join(describe(error).splitlines())  # a log's record is one line
                _log.error("SIGHUP: all stays as it was: %s", said)
            else:
                _log.warning("SIGHUP: %s is in force: %s", self.options.file, plan.in_a_line)


def starting(config: Config) -> str:
    """What is about to be started, and where it will be found."""
    count = sum(group.count for group in config.engines)
    processes = sum(group.count for group in config.engines if group.kind is EngineKind.PROCESS)
    if not processes:
        where = ""
    elif processes < count:
        where = f", {processes} of them a process of its own"
    else:
        where = f", {'each ' * (count > 1)}a process of its own"
    return f"starting {plural(count, 'engine')}{where} …"
