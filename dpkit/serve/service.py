"""A cluster over HTTP: the routes, the listeners and the server, as one task.

For programs that embed a cluster::

    async with dpkit.open_cluster("dpkit.toml") as cluster, trio.open_nursery() as nursery:
        service = await nursery.start(serve_http, cluster)
        print(service.addresses)

Who serves before the cluster is up, as `dpkit run` does, so that probes are answered meanwhile,
opens an `HttpService` by hand and calls `Front.use` later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.serve.front import Front
from dpkit.serve.http import HttpServer
from dpkit.serve.http import serve_http as serve_handler
from dpkit.serve.limits import HttpLimits
from dpkit.serve.listeners import open_listeners
from dpkit.serve.routes import ADMIN, API, Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.config.server import ServerConfig
    from dpkit.nursery.cluster import Cluster
    from dpkit.serve.face import Handler
    from dpkit.serve.front import Reload
    from dpkit.serve.listeners import Listener


async def serve_http(
    cluster: Cluster,
    *,
    settings: ServerConfig | None = None,
    reload: Reload | None = None,
    metrics: Handler | None = None,
    task_status: trio.TaskStatus[HttpService] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a cluster over HTTP, by OpenAI's routes, until `HttpService.stop` or cancelled.

    Args:
        cluster: It must not be left before this has returned.
        settings: Where, for whom and how much; None: what the cluster's config says, or the
            defaults.
        reload: Reads the config again and applies it, for ``/admin/reload``.
        metrics: Answers ``/metrics``.
        task_status: ``nursery.start`` returns the `HttpService` once clients can connect.

    Resource handling:
        All that it opens is gone when it ends, in whatever way. Requests under way are aborted, and
        their engines free at once; for an orderly end call `HttpService.stop`.

    Error handling:
        ListenFailed: the address cannot be had. What a request or a client does wrong is told to
        that client.
    """
    front = Front(settings or cluster.config.server, reload=reload, metrics=metrics)
    front.use(cluster)
    service = await open_service(front)
    await service.run(task_status=task_status)


async def open_service(front: Front) -> HttpService:
    """Listen, but take no client yet: whether the addresses can be had shows here.

    Resource handling:
        The caller runs the service, or closes it.

    Error handling:
        ListenFailed: an address cannot be had; nothing is open then.
    """
    settings = front.settings
    listeners = await open_listeners(settings.listen)
    admin: list[Listener] = []
    try:
        if settings.admin_listen is not None:
            admin = await open_listeners(settings.admin_listen)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return HttpService(front, listeners, admin)


class HttpService:
    """One server for everybody, and perhaps one for whoever runs it.

    Args:
        front: What is served.
        listeners: For everybody; closed by `run`.
        admin: Where drain, scale and reload are to be had; likewise.
    """

    def __init__(
        self, front: Front, listeners: Sequence[Listener], admin: Sequence[Listener] = ()
    ) -> None:
        self.front = front
        self.addresses = tuple(each.address for each in listeners)
        """Where it listens, with the ports that were picked."""
        self.admin_addresses = tuple(each.address for each in admin)
        open_to_admins = bool(front.admin_keys) and not admin
        self.router = Router(front, API + ADMIN if open_to_admins else API)
        self._admin_router = Router(front, ADMIN)
        self._listeners = listeners
        self._admin = admin
        self._servers: list[HttpServer] = []
        self._deadline: float | None = None

    def __repr__(self) -> str:
        return f"<HttpService at {', '.join(self.addresses)}: {self.front.state}>"

    async def run(
        self, *, task_status: trio.TaskStatus[HttpService] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `stop` or cancelled; the listeners are closed then."""
        try:
            async with trio.open_nursery() as nursery:
                for router, listeners in (
                    (self.router, self._listeners),
                    (self._admin_router, self._admin),
                ):
                    if listeners:
                        self._servers.append(await nursery.start(self._serve, router, listeners))
                if self._deadline is not None:  # stopped before it began
                    self.stop(self._deadline)
                task_status.started(self)
        finally:
            self.close()

    async def _serve(
        self,
        router: Router,
        listeners: Sequence[Listener],
        task_status: trio.TaskStatus[HttpServer],
    ) -> None:
        await serve_handler(
            router,
            listeners,
            quick=router.answer_nowait,
            limits=limits_of(self.front.settings),
            observer=self.front.tell_answered,
            task_status=task_status,
        )

    def stop(self, deadline: float) -> None:
        """Stop in phases, and have `run` return; does not wait.

        Now: nobody is let in any more; answers under way go on. At the deadline, on Trio's clock,
        they are cut short: streams end with an event that says so.
        """
        self._deadline = deadline
        for server in self._servers:
            server.stop(deadline)

    def close(self) -> None:
        """Stop listening; for who does not `run` it."""
        for listener in (*self._listeners, *self._admin):
            listener.close()


def limits_of(settings: ServerConfig) -> HttpLimits:
    """What a config gives to clients."""
    return HttpLimits(
        max_head=settings.max_head,
        max_body=settings.max_body,
        max_bodies=settings.max_bodies,
        max_unsent=settings.max_unsent,
        max_connections=settings.max_connections,
        idle_timeout=settings.idle_timeout,
        receive_timeout=settings.receive_timeout,
        send_timeout=settings.send_timeout,
    )
