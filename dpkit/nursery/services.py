"""A nursery whose tasks outlive the body that uses them: body first, services after.

An ordinary nursery cancels the body and its children at one stroke, so the body's ``finally``
blocks find the services they need already dying. Here the services are shielded from birth; they
are stopped only when the body, however it ended, has finished cleaning up. Knows nothing of
engines or clusters, and may be used by any Trio program::

    async with open_services(grace=5) as services:
        services.start_soon(connection_pump, name="pump")
        ...  # cancelled, failed or done: the pump still runs while this unwinds

Why two tasks. A shield set on a nursery in the caller's own task would shield the body too, and a
shield set after ``nursery.start()`` has returned is one scheduling step late: an outer cancel in
that step reaches the service. So one child task holds the shield and opens the service nursery in
it before its first checkpoint.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from dpkit.errors import ServiceFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class Services:
    """Handle of the running services; made by `open_services`, never by hand.

    Its users call `start_soon` and `stop_with`; the rest is the other half of `open_services`.
    """

    def __init__(self) -> None:
        self._shield = trio.CancelScope(shield=True)
        self.body = trio.CancelScope()
        self.opened = trio.Event()
        self._closed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._stop_hooks: list[Callable[[], Awaitable[None]]] = []
        self.first_error: Exception | None = None
        self.failed_service: str | None = None

    def start_soon(
        self, service: Callable[..., Awaitable[None]], *args: Any, name: str | None = None
    ) -> None:
        """Start a service task. It may end whenever it likes; if it fails, the body is cancelled.

        The first error is kept and comes out of `open_services` as the cause; later ones are most
        often its consequences and are dropped.
        """
        if self._nursery is None:
            raise RuntimeError("services are closed: start services inside the `async with` block")
        label = name if name is not None else repr(service)
        self._nursery.start_soon(self._guard, service, args, label, name=label)

    def stop_with(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run `hook` after the body and before services are cancelled, last added first.

        All hooks share the shutdown deadline (`grace` after the body ended); one that fails counts
        as a failed service and does not keep the others from running.
        """
        self._stop_hooks.append(hook)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Hold the services' nursery open, out of reach of every cancellation but `stop`'s."""
        try:
            with self._shield:
                async with trio.open_nursery() as self._nursery:
                    self.opened.set()
                    await trio.sleep_forever()
        finally:
            self._nursery = None
            self._closed.set()

    @trio.lowlevel.enable_ki_protection
    async def _guard(
        self, service: Callable[..., Awaitable[None]], args: tuple[Any, ...], label: str
    ) -> None:
        try:
            await service(*args)
        except Exception as error:  # noqa: BLE001 - recorded, and raised by open_services
            self._record(error, label)

    def _record(self, error: Exception, label: str) -> None:
        if self.first_error is None:
            self.first_error = error
            self.failed_service = label
        self.body.cancel()

    async def stop(self, grace: float) -> None:
        """Run the stop hooks within `grace` seconds, then cancel and await the services."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace):
            for hook in reversed(self._stop_hooks):
                await self._guard(hook, (), "shutdown")
        self._shield.cancel()
        # No deadline here: Trio never abandons a task. A service must obey its cancellation.
        with trio.CancelScope(shield=True):
            await self._closed.wait()


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_services(
    *, grace: float, failure: type[ServiceFailed] = ServiceFailed
) -> AsyncIterator[Services]:
    """Open a place for tasks that must outlive the body's clean-up.

    Args:
        grace: Seconds from the end of the body within which all stop hooks must be done.
        failure: What to raise when a service failed and the body did not.

    Resource handling:
        When the body ends, in whatever way, the stop hooks run, then services are cancelled and
        awaited. Nothing is left running when the block is over.

    Error handling:
        The body's exception comes out bare and is the same object, never in a group; if a service
        failed as well, it carries a note. A failed service alone cancels the body and comes out as
        `failure` with the first error as its cause. KeyboardInterrupt is raised in the body only.
    """
    services = Services()
    body_error: BaseException | None = None
    async with trio.open_nursery() as outer:
        outer.start_soon(services.run, name="services")
        with trio.CancelScope(shield=True):
            await services.opened.wait()
        try:
            with services.body:
                yield services
        except BaseException as error:  # noqa: BLE001 - raised again below, outside the nursery
            body_error = error
        await services.stop(grace)
    cause = services.first_error
    if body_error is not None:
        if cause is not None:
            body_error.add_note(f"meanwhile {services.failed_service} failed: {cause!r}")
        raise body_error
    if cause is not None:
        raise failure(
            f"{services.failed_service} failed: {type(cause).__name__}: {cause}"
        ) from cause
