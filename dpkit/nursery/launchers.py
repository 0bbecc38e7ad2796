"""Where the engines of a cluster come from that do not live in it, opened when needed.

A launcher for each model that computes in processes, a desk for each group that joins. A cluster
without such engines has none, and imports no ZeroMQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.names import EngineKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from dpkit.config.schema import EngineGroupConfig
    from dpkit.names import Dtype, Quant, StartMethod
    from dpkit.nursery.desks import Desk
    from dpkit.nursery.hosts import ModelHost
    from dpkit.nursery.services import Services

    HostKey = tuple[str, Dtype, Quant, str, StartMethod]


class Launchers:
    """Owns the hosts of all models and all desks, which are services once `start` was called."""

    def __init__(self) -> None:
        self._hosts: dict[HostKey, ModelHost] = {}
        self._desks: dict[str, Desk] = {}  # by the name of their group
        self._leaving: list[Desk] = []  # whose address is not free yet
        self._services: Services | None = None

    def start(self, services: Services) -> None:
        """Load every model there is an engine of and open every desk, now and from now on."""
        self._services = services
        for host in self._hosts.values():
            self._start(host)
        for desk in self._desks.values():
            self._open(desk)

    def host(self, group: EngineGroupConfig, *, lockstep: bool = False) -> ModelHost:
        """Where the processes of a group begin; groups of the same model share it.

        With `lockstep` they can vote. A config with a group that steps together has no other.
        """
        from dpkit.nursery.hosts import ModelHost  # noqa: PLC0415 - see the top

        key = _key(group)
        if key not in self._hosts:
            self._hosts[key] = ModelHost(group, lockstep=lockstep)
            self._start(self._hosts[key])
        self._hosts[key].serve(group)
        return self._hosts[key]

    def desk(self, group: EngineGroupConfig) -> Desk:
        """Where the engines of a group join."""
        from dpkit.nursery.desks import Desk  # noqa: PLC0415 - see the top

        if group.name not in self._desks:
            self._desks[group.name] = desk = Desk(group, after=self._leaving)
            self._open(desk)
        return self._desks[group.name]

    async def wait_loaded(self) -> None:
        """Wait until all models are loaded and all desks are open.

        Raises:
            ModelNotFound, ModelUnsupported, LaunchFailed: a model cannot be had.
            AddressFailed: the address of a desk cannot be listened at.
        """
        for desk in list(self._desks.values()):
            await desk.open_reception()
        for host in list(self._hosts.values()):
            await host.launcher()

    def keep(self, groups: Collection[EngineGroupConfig]) -> None:
        """Let go of the models and desks that none of these groups has."""
        joining = {group.name for group in groups if group.kind is EngineKind.VLLM}
        for name in self._desks.keys() - joining:
            desk = self._desks.pop(name)
            desk.stop()
            self._leaving = [each for each in (*self._leaving, desk) if not each.closed.is_set()]
        needed = {_key(group) for group in groups if group.kind is EngineKind.PROCESS}
        for key in self._hosts.keys() - needed:
            self._hosts.pop(key).stop()

    def _start(self, host: ModelHost) -> None:
        if self._services is not None:
            self._services.start_soon(host.run, name=f"launcher of {host.name}")

    def _open(self, desk: Desk) -> None:
        if self._services is not None:
            self._services.start_soon(desk.run, name=f"desk of {desk.name}")


def _key(group: EngineGroupConfig) -> HostKey:
    return group.model, group.dtype, group.quant, group.device, group.process.start
