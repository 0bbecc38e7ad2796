"""The launchers of a cluster: one for each model that computes in processes, opened when needed.

A cluster without such engines has none, and imports no ZeroMQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.names import EngineKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.config.schema import EngineGroupConfig
    from dpkit.names import Dtype, Quant, StartMethod
    from dpkit.nursery.hosts import ModelHost
    from dpkit.nursery.services import Services

    HostKey = tuple[str, Dtype, Quant, StartMethod]


class Launchers:
    """Owns the hosts of all models, which are services once `start` was called."""

    def __init__(self) -> None:
        self._hosts: dict[HostKey, ModelHost] = {}
        self._services: Services | None = None

    def start(self, services: Services) -> None:
        """Load every model there is an engine of, and from now on those to come."""
        self._services = services
        for host in self._hosts.values():
            self._start(host)

    def host(self, group: EngineGroupConfig) -> ModelHost:
        """Where the processes of a group begin; groups of the same model share it."""
        from dpkit.nursery.hosts import ModelHost  # noqa: PLC0415 - see the top

        key = _key(group)
        if key not in self._hosts:
            self._hosts[key] = ModelHost(group)
            self._start(self._hosts[key])
        self._hosts[key].serve(group)
        return self._hosts[key]

    async def wait_loaded(self) -> None:
        """Wait until all models are loaded.

        Raises:
            ModelNotFound, ModelUnsupported, LaunchFailed: one cannot be had.
        """
        for host in list(self._hosts.values()):
            await host.launcher()

    def keep(self, groups: Iterable[EngineGroupConfig]) -> None:
        """Let go of the models that none of these groups has."""
        needed = {_key(group) for group in groups if group.kind is EngineKind.PROCESS}
        for key in self._hosts.keys() - needed:
            self._hosts.pop(key).stop()

    def _start(self, host: ModelHost) -> None:
        if self._services is not None:
            self._services.start_soon(host.run, name=f"launcher of {host.name}")


def _key(group: EngineGroupConfig) -> HostKey:
    return group.model, group.dtype, group.quant, group.process.start
