"""The recorded runs of vLLM's coordinator over real sockets: order, content, and moments.

Trio's clock is a virtual one, moved by hand, so that a run of half a minute takes a moment.
Sockets, I/O threads and bytes are real.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import trio
import trio.testing
import zmq
from attrs import define, field

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.link.coordinator import WireCoordinator, open_coordinator
from dpkit.messages import EngineStats, Snapshot, StartWave
from dpkit.testing.coordinator import TOLERANCE_MS, Case, WaveCompleted, WaveStarted
from dpkit.testing.replay import read_cases
from dpkit.wire.codec import (
    SUBSCRIBE,
    CoordinatorReady,
    decode_from_coordinator,
    decode_publish,
    encode_envelope,
)
from dpkit.wire.structs import Envelope, SchedulerStats
from dpkit.wire.zsocket import open_context, open_zsocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dpkit.testing.coordinator import Event, Sent
    from dpkit.wire.zsocket import Context, ZSocket

RECORDED = Path(__file__).parents[1] / "data" / "coordinator-golden.json.gz"
CASES = [Case.parse(raw, f"cases[{number}]") for number, raw in enumerate(read_cases(RECORDED))]

JUST_BEFORE_S, JUST_AFTER_S = 1e-6, 1e-9
"""An event at the moment when a snapshot is due is read first: it comes just before."""


@define
class Run:
    """A coordinator and one of each of its peers, on a clock that this run moves."""

    clock: trio.testing.MockClock
    coordinator: WireCoordinator
    engine_in: ZSocket
    engine_out: ZSocket
    client: ZSocket
    nursery: trio.Nursery
    began: float = field(factory=trio.current_time)
    sent: int = 0
    serves: bool = False

    async def play(self, case: Case) -> None:
        """Say what was said then, and hear what was heard then."""
        moments = deque(
            (t_ms, [event for _, event in events]) for t_ms, events in groupby(case.events, _t_ms)
        )
        for sent in case.sent:
            while moments and moments[0][0] <= sent.t_ms:
                self.say(*moments.popleft())
                self.begin()
                await trio.testing.wait_all_tasks_blocked()
            self.begin()
            self.move_to(sent.t_ms / 1000)
            due = self.coordinator.rules.due_at - self.began
            if due < (sent.t_ms + TOLERANCE_MS) / 1000:
                self.move_to(due + JUST_AFTER_S)
            await self.expect(sent)
        assert not self.client.drain_nowait(print), "nothing more was said than is recorded"
        assert not self.engine_in.drain_nowait(print)

    def say(self, t_ms: float, events: Sequence[Event]) -> None:
        """Say what was said at one moment; all of it has arrived before anybody can do anything."""
        self.move_to(t_ms / 1000 - JUST_BEFORE_S)
        for event in events:
            self.engine_out.send_nowait(encode_envelope(envelope(event)))
        self.sent += len(events)
        while self.coordinator.statistics().received < self.sent:
            self.coordinator.catch_up()

    def begin(self) -> None:
        """Have it serve, if it does not yet: what is said at the first moment comes before that."""
        if not self.serves:
            self.nursery.start_soon(self.coordinator.run)
        self.serves = True

    def move_to(self, now: float) -> None:
        self.clock.jump(max(0.0, self.began + now - trio.current_time()))

    async def expect(self, sent: Sent) -> None:
        if isinstance(sent.message, Snapshot):
            (payload,) = await self.client.receive()
            heard = decode_publish(payload)
            assert sent.message == Snapshot(
                loads=heard.loads,
                current_wave=heard.current_wave,
                engines_running=heard.engines_running,
            )
        else:
            start = decode_from_coordinator(await self.engine_in.receive())
            assert not isinstance(start, CoordinatorReady)
            assert start.excluded is not None
            assert sent.message == StartWave(wave=start.wave, engine_index=start.excluded)


def _t_ms(event: tuple[float, Event]) -> float:
    return event[0]


def envelope(event: Event) -> Envelope:
    match event:
        case EngineStats():
            stats = SchedulerStats(
                num_waiting_reqs=event.waiting,
                num_running_reqs=event.running,
                kv_cache_usage=event.kv_cache_usage,
                current_wave=event.current_wave,
                step_counter=event.step_counter,
            )
            return Envelope(event.index, scheduler_stats=stats)
        case WaveStarted():
            return Envelope(event.engine_index, start_wave=event.wave)
        case WaveCompleted():
            return Envelope(wave_complete=event.wave)


@asynccontextmanager
async def open_run(
    clock: trio.testing.MockClock, context: Context, case: Case
) -> AsyncIterator[Run]:
    now = trio.current_time()
    rules = CoordinatorRules(case.engine_count, now=now, wave_coordination=case.wave_coordination)
    async with (
        open_coordinator(context, rules, await_engines=1) as coordinator,
        open_zsocket(context, zmq.XSUB, connect=coordinator.addresses.back_publish) as engine_in,
        open_zsocket(context, zmq.PUSH, connect=coordinator.addresses.back_output) as engine_out,
        open_zsocket(context, zmq.XSUB, connect=coordinator.addresses.front) as client,
        trio.open_nursery() as nursery,
    ):
        for socket in (engine_in, client):
            socket.send_nowait([SUBSCRIBE])
        run = Run(clock, coordinator, engine_in, engine_out, client, nursery)
        # vLLM's begins when all are there.
        while not (coordinator.statistics().engines and coordinator.statistics().clients):
            coordinator.catch_up()
        assert isinstance(decode_from_coordinator(await engine_in.receive()), CoordinatorReady)
        yield run
        nursery.cancel_scope.cancel()


async def test_every_recorded_message_is_sent_in_time_and_order(mock_clock) -> None:
    async with open_context() as context:
        for case in CASES:
            async with open_run(mock_clock, context, case) as run:
                await run.play(case)
