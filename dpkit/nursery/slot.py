"""One place for an engine in the cluster, and the lives that fill it one after the other.

The supervisor asks for the next life when the last one failed. The slot watches the clock of a
life's steps, and tells the membership when a life begins to serve and when it is over. Knows
nothing of balancing or of other slots.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from attrs import evolve

from dpkit.errors import EngineLost, LaunchFailed, describe
from dpkit.logs import ENGINE
from dpkit.messages import EngineId
from dpkit.names import EngineState
from dpkit.nursery.events import EventKind
from dpkit.nursery.standing import EngineStatistics, EngineTotals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import EngineLink
    from dpkit.engine.core import EngineCoreStatistics
    from dpkit.nursery.events import EventLog
    from dpkit.nursery.gathering import Gathering
    from dpkit.nursery.life import Life, MakeLife
    from dpkit.nursery.membership import Listener, Membership

SECOND_LOOK_S = 1.0
"""So much later than `step_timeout` a step counts as hung, or as late again if that is less."""


class EngineSlot:
    """A place with a name and a rank.

    Args:
        name: Of the engine; with the number of the life it names an incarnation.
        rank: Index of the engine in the cluster.
        model: Its name, for statistics.
        make_life: Makes a life, from its id, the rank, and what to call when lost.
        step_timeout: Seconds after which a step counts as hung.
        membership: Told who serves.
        events: Told what happens.
        first_epoch: Of the first life: an engine that takes over from one of its name goes on
            counting, so that no incarnation is there twice.
        held: Be ready, and wait for `admit` before serving.
        patience: Seconds from the beginning of its first life for which others wait for an engine
            that somebody else starts. It may come later all the same.
        gathering: Where its peers and it meet, if they step together.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        model: str,
        make_life: MakeLife,
        step_timeout: float,
        membership: Membership,
        events: EventLog,
        first_epoch: int = 0,
        held: bool = False,
        patience: float = math.inf,
        gathering: Gathering | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.gathering = gathering
        self._state, self._since = EngineState.STARTING, trio.current_time()
        self.is_counted = False
        """Whether somebody keeps its totals, as it is nobody's any more."""
        self.settled = trio.Event()
        """Set once the engine has been ready for the first time, is down for good, or is absent."""
        self.is_absent = False
        """It was waited for, in vain so far."""
        self.restarts = 0
        self.last_error: Exception | None = None
        self.peers: Sequence[EngineSlot] = ()
        """Those that end and begin together with this one; itself may be among them."""
        self._model = model
        self._make_life = make_life
        self._step_timeout = step_timeout
        self._membership = membership
        self._events = events
        self._first_epoch = first_epoch
        self._is_admitted = not held
        self._patience = patience
        self._patient_until = math.inf
        self._absence: Exception | None = None
        self._retired = trio.Event()
        self._past: EngineTotals | None = None  # of the lives before the present one
        self._finished = trio.Event()  # retired, and no request is left here
        self.life = make_life(EngineId(name, first_epoch), rank, self._lost)

    def __repr__(self) -> str:
        return f"<EngineSlot {self.name}: {self.state}, {self.restarts} restarts, {self.life!r}>"

    @property
    def state(self) -> EngineState:
        """How it is."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        if state is not self._state:
            self._state, self._since = state, trio.current_time()

    @property
    def engine(self) -> EngineId:
        """The present life, or the last one."""
        return self.life.engine

    @property
    def model_class(self) -> str:
        """What computes here, as a config names it."""
        return self.life.model_class

    async def live(self, number: int) -> None:
        """Live once: a life of the supervisor's. Ends well only when the engine was retired."""
        if self._retired.is_set():
            self.end()
            return
        if number == 0:
            self._patient_until = trio.current_time() + self._patience
        else:
            self.restarts += 1
            self.state = EngineState.STARTING
            self._past = evolve(self._totals(self.life.statistics()), restarts=0)
            engine = EngineId(self.name, self._first_epoch + number)
            self.life = self._make_life(engine, self.rank, self._lost)
        life = self.life
        ENGINE.set(str(life.engine))  # of this task alone: whatever its model logs is about it
        try:
            await self._run(life)
        finally:
            self._membership.forget(life.engine)
            if self._retired.is_set():
                self.state = EngineState.DOWN
                self._note_finish()
        if life.cause is not None and not self._retired.is_set():
            self.state = EngineState.STARTING
            raise life.cause

    def give_up(self, error: Exception) -> None:
        """The supervisor will ask for no more lives."""
        self.state = EngineState.DOWN
        self.last_error = error
        self._events.emit(EventKind.ENGINE_DOWN, engine=self.engine, detail=describe(error))
        if self._is_admitted:  # else the name may be another's, who serves
            self._membership.dismiss(self.name)
        self.settled.set()

    def admit(self) -> None:
        """Serve, at once if ready, else as soon as that."""
        if not self._is_admitted:
            self._is_admitted = True
            if self.state is EngineState.READY:
                self._join()

    def retire(self) -> None:
        """Take no more requests, finish those there are, and live no more after that. Idempotent.

        One that is down stays so.
        """
        self._retired.set()
        if self.state is not EngineState.DOWN:
            self.state = EngineState.DRAINING
        self._membership.leave(self.engine, lost=False)
        self.life.close()
        self.settled.set()
        self._note_finish()

    async def wait_retired(self, deadline: float) -> None:
        """After `retire`: wait until all is finished; at the deadline, what is left is lost.

        A life that is lost already holds no requests: nobody waits for the end of its step.
        """
        with trio.move_on_at(deadline):
            await self._finished.wait()
        if not self._finished.is_set():
            self.life.lose(EngineLost(f"engine {self.engine} was retired", engine=self.engine))

    def end(self) -> None:
        """There will be no more lives, and none is under way; whoever waits need not any more."""
        self.state = EngineState.DOWN
        self.life.ended.set()  # it may never have run
        self.settled.set()
        self._note_finish()

    @property
    def hangs(self) -> bool:
        """Whether the present life is lost and does not end."""
        return self.life.cause is not None and not self.life.ended.is_set()

    def abandon(self) -> None:
        """Let go of a life that does not end by itself; it is about to be cancelled."""
        if not self.life.ended.is_set():
            self.life.abandon()

    def totals(self) -> EngineTotals:
        """What it has done so far."""
        return self._totals(self.life.statistics())

    def _totals(self, core: EngineCoreStatistics) -> EngineTotals:
        now = EngineTotals.of_life(core, self.life.meter.measured(), self.restarts)
        return now if self._past is None else now.plus(self._past)

    def statistics(self) -> EngineStatistics:
        """All about this engine, now."""
        error, core = self.last_error, self.life.statistics()
        return EngineStatistics(
            engine=self.engine,
            rank=self.rank,
            model=self._model,
            state=self.state,
            since=self._since,
            restarts=self.restarts,
            last_error=None if error is None else describe(error),
            block_size=self.life.limits.block_size,
            report=self.life.report(),
            core=core,
            totals=self._totals(core),
        )

    async def _run(self, life: Life) -> None:
        async with trio.open_nursery() as nursery:

            @trio.lowlevel.enable_ki_protection  # a task inherits it from nobody
            async def serve() -> None:
                with suppress(Exception):  # kept as its cause; a nursery would wrap it
                    await life.run()
                nursery.cancel_scope.cancel()

            nursery.start_soon(serve, name=f"life of {life.engine}")
            nursery.start_soon(self._announce, life, name=f"announce {life.engine}")
            if self._patience < math.inf:
                nursery.start_soon(self._lose_patience, life, name=f"patience with {life.engine}")
            nursery.start_soon(self._watch, life, nursery.cancel_scope, name=f"watch {life.engine}")

    @trio.lowlevel.enable_ki_protection
    async def _announce(self, life: Life) -> None:
        await life.ready.wait()
        if self.state is not EngineState.STARTING or life.cause is not None:
            return  # drained or lost before it was ready
        self.state = EngineState.READY
        limits, detail = life.limits, f"restart {self.restarts}, " if self.restarts else ""
        detail += "" if life.pid is None else f"process {life.pid}, "
        detail += (
            f"{limits.num_blocks} blocks of {limits.block_size} tokens, at most "
            f"{limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} tokens a step"
        )
        self._events.emit(EventKind.ENGINE_READY, engine=life.engine, detail=detail)
        self.is_absent = False
        if self.last_error is self._absence:
            self.last_error = None
        self.settled.set()
        if self._is_admitted:
            self._join()

    @trio.lowlevel.enable_ki_protection
    async def _lose_patience(self, life: Life) -> None:
        await trio.sleep_until(self._patient_until)
        if not self.settled.is_set():
            self.is_absent = True
            if self.last_error is None:
                self.last_error = self._absence = LaunchFailed(
                    f"engine {life.engine} has not joined within {self._patience:g} s "
                    f"(engines.vllm.join_timeout): {life!r}",
                    engine=life.engine,
                )
            self._events.emit(
                EventKind.ENGINE_ABSENT, engine=life.engine, detail=describe(self.last_error)
            )
            self.settled.set()

    def _join(self) -> None:
        life = self.life

        def make_link(listener: Listener, *, hears_all: bool = False) -> EngineLink:
            return life.link(listener.deliver, listener.on_report, hears_all=hears_all)

        self._membership.join(life.engine, self.rank, make_link, life.limits.room)

    def _note_finish(self) -> None:
        if self._retired.is_set() and (self.life.cause or self.life.ended.is_set()):
            self._finished.set()

    @trio.lowlevel.enable_ki_protection
    async def _watch(self, life: Life, scope: trio.CancelScope) -> None:
        """End a life whose step does not end.

        A step in a thread cannot be interrupted: then the engine is stuck until it comes back, and
        only its requests go on elsewhere. A simulated step can be, and the next life begins soon.
        So it does after an allocation that hangs, whose thread is left behind: a start must end.
        """
        try:
            await self._wait_for_hang(life)
        except trio.Cancelled:
            # Cancelled with its group: a step in a thread goes on, and nobody shall wait for it.
            if not life.ended.is_set():
                life.lose(EngineLost(f"engine {life.engine} was stopped", engine=life.engine))
            raise
        self.state = EngineState.STUCK
        self._events.emit(EventKind.ENGINE_STUCK, engine=life.engine)
        life.lose(
            EngineLost(
                f"engine {life.engine} is stuck: {life.delay} more than "
                f"{self._step_timeout:g} s (supervision.step_timeout)",
                engine=life.engine,
            )
        )
        if not life.ready.is_set():
            life.abandon()
        if life.is_interruptible or not life.ready.is_set():
            scope.cancel()

    async def _wait_for_hang(self, life: Life) -> None:
        """Wait for a step that takes too long.

        Looks twice: to a process that slept, every step looks hung once.
        """
        while True:
            started = life.step_started_at
            now = trio.current_time()
            if started is None or now < started + self._step_timeout:
                await trio.sleep_until((now if started is None else started) + self._step_timeout)
                continue
            await trio.sleep(min(SECOND_LOOK_S, self._step_timeout))
            if life.step_started_at == started:
                return

    def _lost(self, error: Exception) -> None:
        engine = self.life.engine
        if self.state is EngineState.READY:
            self.state = EngineState.STARTING
        if not self._retired.is_set():
            self.last_error = error  # before its requests are told, who may ask at once
        for peer in self.peers:  # at once: what is placed anew must not go where all will end
            if peer is not self:
                self._membership.leave(peer.engine, lost=False)
        self._events.emit(EventKind.ENGINE_LOST, engine=engine, detail=describe(error))
        self._membership.leave(engine, lost=True)
        self._note_finish()
