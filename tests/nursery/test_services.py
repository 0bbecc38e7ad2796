"""Services outlive the body that uses them, whatever way the body ends; nothing outlives both."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from attrs import define, field

from dpkit.errors import ClusterFailed, ServiceFailed
from dpkit.nursery.services import Services, open_services

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

GRACE = 5.0


@define
class Log:
    """What happened, and at which virtual time."""

    events: list[tuple[float, str]] = field(factory=list)

    def __call__(self, event: str) -> None:
        self.events.append((trio.current_time(), event))

    @property
    def order(self) -> list[str]:
        return [event for _, event in self.events]


async def _service(log: Log) -> None:
    try:
        await trio.sleep_forever()
    finally:
        log("service ends")


async def _fail_at(seconds: float, error: Exception) -> None:
    await trio.sleep(seconds)
    raise error


async def _waiting_body(_: Services) -> None:
    await trio.sleep_forever()


async def _run(
    log: Log, body: Callable[[Services], Awaitable[Any]], failure: type[ServiceFailed]
) -> None:
    async with open_services(grace=GRACE, failure=failure) as services:
        services.start_soon(_service, log, name="pump")

        async def hook() -> None:
            log("hook")
            await trio.sleep(1)

        services.stop_with(hook)
        try:
            await body(services)
        finally:
            log("body ends")


async def _outcome(
    body: Callable[[Services], Awaitable[Any]], failure: type[ServiceFailed] = ServiceFailed
) -> tuple[BaseException | None, list[tuple[float, str]]]:
    log = Log()
    try:
        await _run(log, body, failure)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what came out is the test
        return error, log.events
    return None, log.events


def _ends_at(seconds: float) -> list[tuple[float, str]]:
    """Body first, then the hook, and only when that is done the service."""
    return [(seconds, "body ends"), (seconds, "hook"), (seconds + 1, "service ends")]


async def test_a_body_that_returns_ends_before_its_services(autojump_clock: object) -> None:
    async def body(_: Services) -> None:
        await trio.sleep(3)

    assert await _outcome(body) == (None, _ends_at(3))


@pytest.mark.parametrize(
    "boom",
    [
        ValueError("boom"),
        KeyError(),
        StopAsyncIteration(),
        ExceptionGroup("the user's own", [ValueError("boom")]),
        BaseExceptionGroup("the user's own", [KeyboardInterrupt()]),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
    ],
    ids=repr,
)
async def test_what_a_body_raises_comes_out_as_the_same_bare_object(
    autojump_clock: object, boom: BaseException
) -> None:
    log = Log()

    async def body(_: Services) -> None:
        await trio.sleep(3)
        raise boom

    with pytest.raises(type(boom)) as caught:
        await _run(log, body, ServiceFailed)
    assert caught.value is boom
    assert not hasattr(boom, "__notes__")
    assert log.events == _ends_at(3)


async def test_a_body_cancelled_from_outside_still_has_its_services(autojump_clock: object) -> None:
    log = Log()
    with trio.move_on_after(3) as scope:
        await _run(log, _waiting_body, ServiceFailed)
    assert scope.cancelled_caught
    assert log.events == _ends_at(3)


async def test_a_body_that_ignores_an_outer_cancellation_is_not_cancelled_again(
    autojump_clock: object,
) -> None:
    with trio.CancelScope() as scope:
        async with open_services(grace=GRACE) as services:
            services.start_soon(trio.sleep_forever)
            scope.cancel()
    assert not scope.cancelled_caught


async def test_a_failed_service_cancels_the_body_and_is_the_cause(autojump_clock: object) -> None:
    boom = ValueError("boom")

    async def body(services: Services) -> None:
        services.start_soon(_fail_at, 2.0, boom, name="engine e0")
        await trio.sleep_forever()

    error, events = await _outcome(body, ClusterFailed)
    assert type(error) is ClusterFailed
    assert error.__cause__ is boom
    assert str(error) == "engine e0 failed: ValueError: boom"
    assert events == _ends_at(2)


async def test_the_first_error_of_the_services_is_the_one_that_is_told(
    autojump_clock: object,
) -> None:
    first = ValueError("first")

    async def body(services: Services) -> None:
        services.start_soon(_fail_at, 2.0, first)
        services.start_soon(_fail_at, 2.5, ValueError("second"))
        with trio.CancelScope(shield=True):
            await trio.sleep(3)

    error, events = await _outcome(body)
    assert error is not None
    assert error.__cause__ is first
    assert events == _ends_at(3)


async def test_when_both_fail_the_bodys_error_comes_out_with_a_note(autojump_clock: object) -> None:
    boom = ValueError("boom")

    async def body(services: Services) -> None:
        services.start_soon(_fail_at, 2.0, OSError("no disk"), name="engine e0")
        try:
            await trio.sleep_forever()
        finally:
            raise boom

    error, events = await _outcome(body)
    assert error is boom
    assert error.__notes__ == ["meanwhile engine e0 failed: OSError: no disk"]
    assert events == _ends_at(2)


async def test_a_cancelled_body_stays_cancelled_though_a_service_failed(
    autojump_clock: object,
) -> None:
    log = Log()

    async def body(services: Services) -> None:
        services.start_soon(_fail_at, 3.0, OSError("no disk"), name="engine e0")
        await trio.sleep_forever()

    with trio.move_on_after(3) as scope:
        await _run(log, body, ServiceFailed)
    assert scope.cancelled_caught
    assert log.events == _ends_at(3)


async def test_a_service_may_fail_before_its_first_step_is_over(autojump_clock: object) -> None:
    boom = ValueError("boom")

    async def fails_at_once() -> None:
        raise boom

    async def body(services: Services) -> None:
        services.start_soon(fails_at_once)
        await trio.sleep_forever()

    error, events = await _outcome(body)
    assert error is not None
    assert error.__cause__ is boom
    assert events == _ends_at(0)


async def test_a_service_may_end_when_it_likes(autojump_clock: object) -> None:
    async def body(services: Services) -> None:
        services.start_soon(trio.sleep, 1)
        await trio.sleep(3)

    assert await _outcome(body) == (None, _ends_at(3))


async def test_a_service_that_fails_during_shutdown_is_told(autojump_clock: object) -> None:
    boom = ValueError("boom")

    async def body(services: Services) -> None:
        services.start_soon(_fail_at, 3.5, boom)
        await trio.sleep(3)

    error, events = await _outcome(body)
    assert type(error) is ServiceFailed
    assert error.__cause__ is boom
    assert events == _ends_at(3)


async def test_hooks_run_last_added_first(autojump_clock: object) -> None:
    log = Log()

    async def body(services: Services) -> None:
        async def later() -> None:
            log("later hook")
            await trio.sleep(2)

        services.stop_with(later)

    await _run(log, body, ServiceFailed)
    assert log.events == [
        (0, "body ends"),
        (0, "later hook"),
        (2, "hook"),
        (3, "service ends"),
    ]


async def test_a_hook_that_hangs_ends_with_the_grace(autojump_clock: object) -> None:
    log = Log()

    async def body(services: Services) -> None:
        services.stop_with(trio.sleep_forever)
        await trio.sleep(3)

    await _run(log, body, ServiceFailed)
    assert log.events == [(3, "body ends"), (3 + GRACE, "service ends")]


async def test_a_hook_that_raises_counts_as_a_failed_service(autojump_clock: object) -> None:
    boom = ValueError("boom")

    async def body(services: Services) -> None:
        services.stop_with(lambda: _fail_at(1, boom))
        await trio.sleep(3)

    error, events = await _outcome(body)
    assert type(error) is ServiceFailed
    assert str(error) == "shutdown failed: ValueError: boom"
    assert error.__cause__ is boom
    assert events == [(3, "body ends"), (4, "hook"), (5, "service ends")], "the other hook ran"


async def test_services_cannot_start_when_it_is_over(autojump_clock: object) -> None:
    async with open_services(grace=GRACE) as services:
        pass
    with pytest.raises(RuntimeError, match="services are closed"):
        services.start_soon(trio.sleep_forever)


async def test_no_task_is_left(autojump_clock: object) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    with trio.move_on_after(1):
        await _outcome(_waiting_body)
    assert trio.lowlevel.current_statistics().tasks_living == before


class Interrupter(trio.abc.Instrument):
    """Sends SIGINT just before or after the main task's step number `step`."""

    def __init__(self, step: int, *, before: bool) -> None:
        self.step = step
        self.steps = 0
        self.fired = False
        self.before = before
        self.task: trio.lowlevel.Task | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps += 1
            self._fire(before=True)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self._fire(before=False)

    def _fire(self, *, before: bool) -> None:
        if (self.steps, before) == (self.step, self.before):
            self.fired = True
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", range(8))
def test_ctrl_c_at_any_step_comes_out_bare_after_everything_has_ended(
    step: int, *, before: bool
) -> None:
    log = Log()
    interrupter = Interrupter(step, before=before)

    async def body(_: Services) -> None:
        await trio.sleep(1)
        await trio.sleep(1)

    async def main() -> None:
        interrupter.task = trio.lowlevel.current_task()
        await _run(log, body, ServiceFailed)

    clock = trio.testing.MockClock(autojump_threshold=0)
    try:
        trio.run(main, clock=clock, instruments=[interrupter])
    except KeyboardInterrupt:
        assert interrupter.fired
    else:
        assert not interrupter.fired
    if log.events:
        assert log.order[-1] == "service ends"


def test_ctrl_c_during_shutdown_cuts_the_grace_short() -> None:
    log = Log()

    async def body(services: Services) -> None:
        services.stop_with(trio.sleep_forever)
        await trio.sleep(3)

    @trio.lowlevel.enable_ki_protection  # or the signal would be raised right here
    async def interrupt() -> None:
        await trio.sleep(4)
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupt)
            with pytest.raises(KeyboardInterrupt):
                await _run(log, body, ServiceFailed)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert log.events == [(3, "body ends"), (4, "service ends")]
