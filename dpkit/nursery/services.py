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

from typing import TYPE_CHECKING, Any

import trio

from dpkit.errors import ServiceFailed, describe
from dpkit.nursery.context import protected_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class Services:
    """Handle of the running services; made by `open_services`, never by hand.

    Its users call `start_soon`, `stop_with` and `fail`; the rest is the other half of
    `open_services`.
    """

    def __init__(self, grace: float) -> None:
        self.body = trio.CancelScope()
        self.opened = trio.Event()
        self.first_error: Exception | None = None
        self.failed_service: str | None = None
        self._grace = grace
        self._body_ended = trio.Event()
        self._closed = trio.Event()
        self._hooks_scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._stop_hooks: list[Callable[[], Awaitable[None]]] = []

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

    def fail(self, error: Exception, label: str) -> None:
        """Have it as if the service `label` had failed with `error`, which it has outlived."""
        self._record(error, label)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Hold the services' nursery open until `stop`, then run the hooks and end the services.

        All in this task, out of reach of every cancellation, and of KeyboardInterrupt too, which
        Trio raises in its main task only.
        """
        try:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as self._nursery:
                    self.opened.set()
                    await self._body_ended.wait()
                    await self._run_hooks()
                    # No deadline from here on: Trio abandons no task, a service must obey.
                    self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._closed.set()

    async def _run_hooks(self) -> None:
        with self._hooks_scope:
            for hook in reversed(self._stop_hooks):
                await self._guard(hook, (), "shutdown")

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

    async def stop(self) -> KeyboardInterrupt | None:
        """Have the hooks run within the grace and the services cancelled, and wait for both.

        Ctrl-C meanwhile cuts the grace short; it is returned, since the clean-up must go on.
        """
        interrupt = None
        self._hooks_scope.deadline = trio.current_time() + self._grace
        self._body_ended.set()
        while not self._closed.is_set():
            try:
                with trio.CancelScope(shield=True):
                    await self._closed.wait()
            except KeyboardInterrupt as error:
                interrupt = error
                self._hooks_scope.cancel()
        return interrupt


@protected_context
async def open_services(
    *, grace: float, failure: Callable[[str], ServiceFailed] = ServiceFailed
) -> AsyncIterator[Services]:
    """Open a place for tasks that must outlive the body's clean-up.

    Args:
        grace: Seconds from the end of the body within which all stop hooks must be done.
        failure: Makes what is raised, from a message, when a service failed and the body did not.

    Resource handling:
        When the body ends, in whatever way, the stop hooks run, then services are cancelled and
        awaited. Nothing is left running when the block is over.

    Error handling:
        The body's exception comes out bare and is the same object, never in a group; if a service
        failed as well, it carries a note. A failed service alone cancels the body and comes out as
        `failure` with the first error as its cause. KeyboardInterrupt is raised in the body only,
        or comes out when the services are closed, which it hastens.
    """
    services = Services(grace)
    body_error: BaseException | None = None
    async with trio.open_nursery() as outer:
        outer.start_soon(services.run, name="services")
        # All of it under one `except`: an error that reached this nursery would hang it for ever,
        # since it cancels what is shielded, and would come out in a group.
        try:
            with trio.CancelScope(shield=True):
                await services.opened.wait()
            with services.body:
                yield services
        except BaseException as error:  # noqa: BLE001 - raised again below, outside the nursery
            body_error = error
        if (interrupt := await services.stop()) is not None:
            interrupt.__context__ = body_error
            body_error = interrupt
    cause = services.first_error
    if body_error is not None:
        if cause is not None:
            body_error.add_note(f"meanwhile {services.failed_service} failed: {describe(cause)}")
        raise body_error
    if cause is not None:
        raise failure(f"{services.failed_service} failed: {describe(cause)}") from cause
