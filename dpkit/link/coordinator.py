"""The coordinator behind three sockets: its peers are vLLM's engines and frontends, and dpkit's.

What is sent and when is decided by `dpkit.balancer.coordinator`, whose other driver is
`dpkit.nursery.coordinator`, without a wire. This one has sockets and a clock. Whoever enters
`open_coordinator` owns the sockets and runs `WireCoordinator.run`; `serve_coordinator` does both.

Nothing that a peer says ends it. What cannot be understood is counted, and told in the log the
first time, the second, the fourth: its sender may go on for ever.
"""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Never

import trio
from attrs import frozen

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.engine.waves import AHEAD
from dpkit.errors import WireError
from dpkit.link.together import run_together
from dpkit.messages import EngineId, Snapshot
from dpkit.wire.codec import (
    COORDINATOR_READY,
    MAX_ENGINES,
    Subscription,
    decode_output,
    decode_to_coordinator,
    encode_publish,
    encode_start_wave,
)
from dpkit.wire.coordinator import LOOPBACK, open_coordinator_sockets
from dpkit.wire.structs import CoordinatorPublish, Envelope, StartWave
from dpkit.wire.zsocket import BURST, open_context

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from dpkit import messages
    from dpkit.balancer.coordinator import CoordinatorStatistics
    from dpkit.messages import EngineStats
    from dpkit.wire.codec import ScaleElastic
    from dpkit.wire.coordinator import CoordinatorAddresses, CoordinatorSockets
    from dpkit.wire.structs import SchedulerStats
    from dpkit.wire.zsocket import Context

_BURSTS = 64  # that many are read before a snapshot, however many more keep coming
_ANYBODY = EngineId("engine")

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class WireCoordinatorStatistics:
    """Who is there, and what came."""

    rules: CoordinatorStatistics
    engines: int
    """Subscribed now."""
    clients: int
    """Subscribed now."""
    received: int
    """Messages of engines, whatever they said."""
    ignored: int
    """Messages of anybody that could not be understood."""


class _Oddities:
    """Counts what is odd, and tells of ever fewer of it."""

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what

    def note(self, why: object) -> None:
        self.count += 1
        if not self.count & (self.count - 1):
            _log.warning("%s: %s (%d so far)", self._what, why, self.count)


class WireCoordinator:
    """The rules, behind three sockets; made by `open_coordinator`.

    All calls but `run` are synchronous, and for Trio's thread.
    """

    def __init__(
        self,
        rules: CoordinatorRules,
        sockets: CoordinatorSockets,
        *,
        await_engines: int | None,
        whose: Callable[[int], EngineId | None],
        tell: Callable[[Snapshot], object],
        heed: Callable[[int, SchedulerStats], object],
    ) -> None:
        self.rules = rules
        self.addresses = sockets.addresses
        """Where it listens, with the ports that were picked."""
        self._sockets = sockets
        self._await_engines = await_engines
        self._whose = whose
        self._tell = tell
        self._heed_counts = heed
        self._engines = self._clients = self._received = 0
        self._ignored = _Oddities("the coordinator cannot understand what was said to it")
        self._unknown = _Oddities("the coordinator heard of an engine that is not in its table")
        self._all_came = self._somebody_new = False
        self._nap = trio.CancelScope()
        self._wakes_at = -math.inf

    def __repr__(self) -> str:
        return (
            f"<WireCoordinator at {self.addresses.front}: {self._engines} of {self._awaited} "
            f"engines, {self._clients} clients>"
        )

    def statistics(self) -> WireCoordinatorStatistics:
        """All counts, now."""
        return WireCoordinatorStatistics(
            rules=self.rules.statistics(),
            engines=self._engines,
            clients=self._clients,
            received=self._received,
            ignored=self._ignored.count,
        )

    async def run(self) -> Never:
        """Serve until cancelled.

        Error handling:
            trio.ClosedResourceError: its sockets were closed. What `whose` and `tell` raise comes
            out as it is.
        """
        sockets = self._sockets
        await run_together(
            self._serve,
            partial(sockets.to_engines.pump, self._on_engine),
            partial(sockets.to_clients.pump, self._on_client),
        )

    # What engines say.

    def catch_up(self) -> int:
        """Take what has been said so far, a burst of engines' messages at most; how many of those.

        `run` does so in time: this is for whoever wants to look at the rules now.
        """
        sockets = self._sockets
        sockets.to_engines.drain_nowait(self._on_engine)
        sockets.to_clients.drain_nowait(self._on_client)
        return sockets.from_engines.drain_nowait(self._on_output)

    def take(self, stats: EngineStats) -> None:
        """Take the counts of an engine that is on this side of the wire."""
        self.rules.on_stats(trio.current_time(), stats)
        self._hurry()

    def _on_output(self, frames: list[bytes]) -> None:
        self._received += 1
        now = trio.current_time()
        try:
            envelope = _envelope(frames)
            if (counts := envelope.scheduler_stats) is not None:
                self._on_counts(now, envelope.engine_index, counts)
            self._on_wave(now, envelope)
        except WireError as error:
            self._ignored.note(error)
        self._hurry()

    def _on_counts(self, now: float, rank: int, counts: SchedulerStats) -> None:
        # All that follow would be taken for older ones.
        self._check_wave(counts.current_wave, counts.current_wave)
        engine: EngineId | None = _ANYBODY
        if 0 <= rank < self.rules.engine_count:
            engine = self._whose(rank)
        else:
            self._unknown.note(f"rank {rank} of {self.rules.engine_count}")
        if engine is None:
            return  # between two lives
        row = (counts.num_waiting_reqs, counts.num_running_reqs, counts.kv_cache_usage)
        step = (counts.current_wave, counts.step_counter)
        self.rules.on_counts(now, rank, engine, row, step)
        self._heed_counts(rank, counts)

    def _on_wave(self, now: float, envelope: Envelope) -> None:
        complete, start = envelope.wave_complete, envelope.start_wave
        if complete is not None:
            self._check_wave(complete, complete + 1)
            self._send(self.rules.on_wave_complete(now, complete))
        elif start is not None:
            self._check_wave(start, start)
            self._send(self.rules.on_start_wave(now, start, envelope.engine_index))
        elif envelope.scheduler_stats is None:
            raise WireError("neither counts nor a wave: what else engines say is for clients")

    def _check_wave(self, wave: int, newest: int) -> None:
        """Believe in a wave if engines will, when they hear of the newest by way of clients."""
        if wave < 0 or newest >= self.rules.current_wave + AHEAD:
            raise WireError(f"there is no wave {wave}")

    # Who comes and goes.

    def _on_engine(self, frames: list[bytes]) -> None:
        word = self._heed(frames)
        if not isinstance(word, Subscription):
            if word is not None:
                self._ignored.note("an engine told how many there are, which clients do")
            return
        self._engines += 1 if word.subscribed else -1
        if word.subscribed:
            _log.info("%d of %d engines have come", self._engines, self._awaited)
            self._say_ready(again=True)
            if (call := self.rules.call()) is not None:
                self._send([call])  # it has missed the call of whoever began this wave

    @property
    def _awaited(self) -> int:
        return self.rules.engine_count if self._await_engines is None else self._await_engines

    def _say_ready(self, *, again: bool) -> None:
        """Tell all engines when all have come, and once more whenever one comes later."""
        if self._all_came and not again:
            return
        self._all_came = self._all_came or self._engines >= self._awaited
        if self._all_came:
            self._sockets.to_engines.send_nowait([COORDINATOR_READY])

    def _on_client(self, frames: list[bytes]) -> None:
        word = self._heed(frames)
        if isinstance(word, Subscription):
            self._clients += 1 if word.subscribed else -1
            self._somebody_new |= word.subscribed
        elif word is not None:
            _log.info(
                "there are %d engines now, and were %d", word.engines, self.rules.engine_count
            )
            self.rules.on_engine_count(trio.current_time(), word.engines)
            self._say_ready(again=False)
        self._hurry()

    def _heed(self, frames: list[bytes]) -> Subscription | ScaleElastic | None:
        try:
            return _word(frames)
        except WireError as error:
            self._ignored.note(error)
            return None

    # What is told.

    async def _serve(self) -> Never:
        while True:
            await trio.lowlevel.checkpoint()
            for _ in range(_BURSTS):
                if self.catch_up() < BURST:
                    break
                await trio.lowlevel.checkpoint()
            # No checkpoint here: no snapshot is older than what has come.
            if self._is_due(trio.current_time()):
                self._speak(trio.current_time())
            else:
                await self._wait()

    async def _wait(self) -> None:
        """Wait for the next thing to do.

        Where messages can wait they do, and cost a fraction of what waking up for each costs.
        """
        frames = None
        self._wakes_at = self.rules.due_at
        with trio.CancelScope(deadline=self._wakes_at) as self._nap:
            if self.rules.may_rest:
                await trio.sleep_forever()
            frames = await self._sockets.from_engines.receive()
        self._wakes_at = -math.inf
        if frames is not None:
            self._on_output(frames)

    def _is_due(self, now: float) -> bool:
        return self._somebody_new or self.rules.due_at <= now

    def _hurry(self) -> None:
        """Something has come: what is due may be due sooner."""
        if self._somebody_new or self.rules.due_at < self._wakes_at:
            self._nap.cancel()

    def _speak(self, now: float) -> None:
        greeting = self.rules.greeting() if self._somebody_new else None
        self._somebody_new = False
        if self.rules.due_at <= now:
            self._send([self.rules.publish(now)])
        elif greeting is not None:
            self._send([greeting])

    def _send(self, told: Iterable[Snapshot | messages.StartWave]) -> None:
        for each in told:
            if isinstance(each, Snapshot):
                self._sockets.to_clients.send_nowait([_publish(each)])
                self._tell(each)
            else:
                start = StartWave(each.wave, each.engine_index)
                self._sockets.to_engines.send_nowait(encode_start_wave(start))


def _envelope(frames: list[bytes]) -> Envelope:
    message = decode_output(frames)
    if not isinstance(message, Envelope):
        raise WireError("an engine says that it is dead, and not which one")
    return message


def _word(frames: list[bytes]) -> Subscription | ScaleElastic:
    if len(frames) != 1:
        raise WireError(f"a subscriber's word is one frame, not {len(frames)}")
    return decode_to_coordinator(frames[0])


def _publish(snapshot: Snapshot) -> bytes:
    return encode_publish(
        CoordinatorPublish(snapshot.loads, snapshot.current_wave, snapshot.engines_running)
    )


@asynccontextmanager
async def open_coordinator(
    context: Context,
    rules: CoordinatorRules,
    *,
    bind: str | CoordinatorAddresses = LOOPBACK,
    await_engines: int | None = None,
    whose: Callable[[int], EngineId | None] = lambda _: _ANYBODY,
    tell: Callable[[Snapshot], object] = lambda _: None,
    heed: Callable[[int, SchedulerStats], object] = lambda *_: None,
) -> AsyncGenerator[WireCoordinator]:
    """Bind the sockets of a coordinator; `run` it inside.

    Args:
        context: Whose sockets they are to be.
        rules: What it does, on Trio's clock.
        bind: Where to listen, as for `open_coordinator_sockets`.
        await_engines: How many must have subscribed before any is told READY, without which none
            begins; None: as many as the rules have. Engines that need not wait for each other: 0.
        whose: Says which life the counts of a rank are of; None: of none, so they are passed over.
            For rules that are told of lives.
        tell: Called with each snapshot that goes out, for clients on this side of the wire.
        heed: Called with the rank and the counts of each engine that tells some, as it does.

    Resource handling:
        Leaving the block closes the sockets at once. Peers notice, and come back by themselves when
        somebody listens at these addresses again: engines tell their counts once more, clients
        subscribe.

    Error handling:
        AddressFailed: one of the addresses cannot be bound.
    """
    async with open_coordinator_sockets(context, bind) as sockets:
        yield WireCoordinator(
            rules, sockets, await_engines=await_engines, whose=whose, tell=tell, heed=heed
        )


async def serve_coordinator(
    engines: int,
    *,
    bind: str | CoordinatorAddresses = LOOPBACK,
    interval: float = 0.1,
    wave_coordination: bool = False,
    task_status: trio.TaskStatus[WireCoordinator] = trio.TASK_STATUS_IGNORED,
) -> Never:
    """Be a coordinator until cancelled, with a context of its own.

    ``coordinator = await nursery.start(serve_coordinator, 4)`` returns when it listens.

    Args:
        engines: How many there are, 1 to 65,536; ranks count from 0.
        bind: As for `open_coordinator`.
        interval: Seconds between two snapshots at least, while counts change.
        wave_coordination: The engines step together.
        task_status: Told when it listens.

    Error handling:
        AddressFailed: as for `open_coordinator`.
    """
    if not 1 <= engines <= MAX_ENGINES:
        raise ValueError(f"there cannot be {engines} engines, but 1 to {MAX_ENGINES}")
    rules = CoordinatorRules(
        engines,
        now=trio.current_time(),
        interval=interval,
        wave_coordination=wave_coordination,
    )
    async with open_context() as context, open_coordinator(context, rules, bind=bind) as opened:
        task_status.started(opened)
        await opened.run()
