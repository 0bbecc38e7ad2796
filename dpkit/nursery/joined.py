"""One life of an engine that somebody else starts: from its HELLO to its last word.

Owns what this life has here: its sockets, and the tasks that pump, watch and ask. The engine is not
ours to start, kill or restart, so a life begins by waiting until its rank says HELLO, and when it
is over, the next one waits again. What ends a life is what the wire can show: a dropped connection,
a word that cannot be read, `ENGINE_CORE_DEAD`, or a question without an answer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dpkit.engine.limits import EngineLimits
from dpkit.errors import EngineLost, LaunchFailed, WireError
from dpkit.link.catchup import CatchUp
from dpkit.link.foreign import QUESTION, ForeignConnection
from dpkit.link.zmq import ENDING
from dpkit.nursery.wirelife import WireLife
from dpkit.sampling import shown
from dpkit.wire.codec import (
    COORDINATOR_READY,
    SUBSCRIBE,
    decode_ready_response,
    rank_identity,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.engine.publish import PublishGate
    from dpkit.messages import EngineId, EngineStats, ModelSpec
    from dpkit.nursery.desks import Desk, LifeSockets, OwnCoordinator
    from dpkit.nursery.gathering import Gathering, Round
    from dpkit.wire.reception import Guest
    from dpkit.wire.structs import ReadyResponse

ASK_EVERY_S = 5.0
"""How often an engine is asked whether it lives, or a quarter of `dead_after` if that is less."""

_SECOND_LOOK_S = 1.0
"""So much later a question without an answer counts, or `dead_after` if that is less: to a process
that slept, every question looks old once."""


class JoinedLife(WireLife):
    """A life of an engine that joins. Arguments as of `WireLife`, and these.

    Args:
        desk: Where it joins.
        gathering: Where the ranks meet that it steps together with; None: it steps alone.
        spec: What is known of the model here.
        model: Its name in the config.
        on_leaving: Told that the engine takes nothing new, and may still finish what it has.

    Error handling of `run`:
        EngineLost: it is gone, dead, dying or silent. WireError: it broke the protocol, or is of
        another release. LaunchFailed: it said HELLO, and did not get ready, or does not generate.
        AddressFailed: there is no address to join at.
    """

    last_words_s = 0.2  # what it said last may have come, and not been read yet

    def __init__(
        self,
        *,
        engine: EngineId,
        index: int,
        rank: int,
        desk: Desk,
        gathering: Gathering | None = None,
        spec: ModelSpec,
        model: str,
        publish: Callable[[EngineStats], None] | None,
        gate: PublishGate,
        on_lost: Callable[[Exception], None],
        on_leaving: Callable[[], None],
    ) -> None:
        super().__init__(
            engine=engine,
            index=index,
            rank=rank,
            limits=_UNKNOWN,
            publish=publish,
            gate=gate,
            on_lost=on_lost,
        )
        self._desk = desk
        self._gathering = gathering
        self._round: Round | None = None
        self._spec = spec
        self._model = model
        self._on_leaving = on_leaving
        self._guest: Guest | None = None
        self._ask_every = min(ASK_EVERY_S, desk.settings.dead_after / 4)

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "waiting"
        if self._guest is not None and not self.ended.is_set():
            state = f"rank {self._rank} {self._phase_of(self._guest)}"
        return f"<JoinedLife {self.engine}: {state}>"

    @property
    def model_class(self) -> str:
        """The model by its name in the config."""
        return self._model

    @property
    def pid(self) -> None:
        """None: its process is somebody else's."""

    @property
    def step_started_at(self) -> None:
        """None: no such engine says so; its silence is watched by this life itself."""

    @property
    def delay(self) -> str:
        """Nothing that is known here."""
        return "it has been at something for"

    @property
    def how_far(self) -> str:
        """How far it has come, for whoever has waited in vain."""
        return "it cannot join yet" if self._guest is None else f"it {self._phase_of(self._guest)}"

    def _phase_of(self, guest: Guest) -> str:
        if self._round is not None and guest.ready.is_set() and self._round.not_ready:
            late = ", ".join(map(str, self._round.not_ready))
            return f"is ready, and of those that it steps together with, rank {late} is not"
        return guest.phase.value

    async def _live(self) -> None:
        await self._desk.open_reception()
        if self._gathering is None:
            await self._join(None)
        else:
            async with self._gathering.attend(self._rank) as round_:
                await self._join(round_)

    async def _join(self, round_: Round | None) -> None:
        self._round = round_
        reception = await self._desk.open_reception()
        async with self._desk.open_sockets(round_) as sockets, trio.open_nursery() as nursery:
            held = round_ is not None
            guest = self._guest = reception.expect(self._rank, sockets.init, held=held)
            try:
                nursery.start_soon(self._guard, guest.wait_for_fault)
                nursery.start_soon(self._guard, self._serve, sockets, guest, nursery)
                await self._live_on(nursery, round_)
            finally:
                guest.leave()

    async def _serve(self, sockets: LifeSockets, guest: Guest, nursery: trio.Nursery) -> None:
        most, key = self._desk.settings.max_message, ForeignConnection.limit_key
        for socket in (sockets.input, sockets.output):
            nursery.start_soon(self._guard, self._watch_link, socket, most, key)
        if (own := sockets.own) is not None:
            nursery.start_soon(self._guard, own.to_engine.pump, partial(_be_ready, own))
        if (round_ := self._round) is not None:
            await guest.called.wait()
            while not await round_.gather(self._rank, guest.answer):
                await guest.called.wait()
        await guest.greeted.wait()  # for as long as it takes: it is not ours to start
        told = await self._introduce(sockets, guest)
        self.limits = limits_of(told)
        connection = ForeignConnection(
            self.engine,
            self._rank,
            sockets.input,
            limits=self.limits,
            spec=self._spec,
            limit=most,
            on_stats=self._on_stats,
            on_gone=self._give_up,
            on_leaving=self._on_leaving,
        )
        self._attach(connection)
        nursery.start_soon(self._guard, sockets.input.pump, self._refuse)
        nursery.start_soon(
            self._guard, sockets.output.pump, CatchUp(sockets.output, connection).take
        )
        if own is not None:
            nursery.start_soon(self._guard, own.counts.pump, connection.take_counts)
        if round_ is not None:
            round_.stamp(connection)
            round_.listen(self._rank, connection.take_load)
            connection.newest_step = lambda: round_.newest_step
        nursery.start_soon(self._guard, self._watch_silence, connection)
        nursery.start_soon(self._guard, self._forget_aborted, connection)
        await self._check(told, connection)
        guest.welcome()
        self._begin()

    def _note_idle(self) -> None:
        super()._note_idle()
        connection = self._connection
        if (
            isinstance(connection, ForeignConnection)
            and connection.is_leaving
            and connection.is_idle
        ):
            self._end_with(EngineLost(f"engine {self.engine} {ENDING}", engine=self.engine))

    async def _introduce(self, sockets: LifeSockets, guest: Guest) -> ReadyResponse:
        """Wait until it has loaded its model; returns what it tells of itself."""
        timeout, told = self._desk.settings.join_timeout, None
        with trio.move_on_after(timeout) as waiting:
            while told is None:
                identity, *words = await sockets.input.receive()
                if identity == rank_identity(self._rank):  # else a stranger's
                    told = _read(words)
            await guest.ready.wait()
            if self._round is not None:
                await self._round.agree(self._rank, guest.settings)
        if waiting.cancelled_caught or told is None:
            raise LaunchFailed(
                f"engine {self.engine} was not ready within {timeout:g} s of its HELLO "
                f"(engines.vllm.join_timeout): {self.how_far}",
                engine=self.engine,
            )
        return told

    async def _check(self, told: ReadyResponse, connection: ForeignConnection) -> None:
        """Refuse who cannot serve here, and say why on both sides."""
        expected = self._desk.settings.version
        version = told.vllm_version.partition("+")[0]  # what follows is how it was built
        fault = None
        if version != expected:
            fault = f"it is vLLM {version}, and {expected} is expected (engines.vllm.version)"
        else:
            tasks: object = await connection.call("get_supported_tasks")
            if not isinstance(tasks, list | tuple) or "generate" not in tasks:
                fault = f"its model does not generate text, but is for {shown(tasks)}"
        if fault is not None:
            connection.tell(f"this engine is refused: {fault}")
            raise WireError(f"engine {self.engine} cannot be welcomed: {fault}", engine=self.engine)

    async def _watch_silence(self, connection: ForeignConnection) -> None:
        """Ask whether it lives, now and then, and end this life when there is no answer."""
        dead_after = self._desk.settings.dead_after
        while True:
            connection.ask()
            await trio.sleep(self._ask_every)
            asked_at = connection.asked_at
            if asked_at is None or trio.current_time() < asked_at + dead_after:
                continue
            await trio.sleep(min(_SECOND_LOOK_S, dead_after))
            if connection.asked_at == asked_at:
                raise EngineLost(
                    f"engine {self.engine} is silent: it has not answered to {QUESTION} within "
                    f"{dead_after:g} s (engines.vllm.dead_after)",
                    engine=self.engine,
                )

    async def _forget_aborted(self, connection: ForeignConnection) -> None:
        timeout = self._desk.settings.abort_timeout
        while True:
            await trio.sleep(timeout / 4)
            connection.forget_aborted(trio.current_time() - timeout)


_UNKNOWN = EngineLimits(max_num_seqs=1, max_num_batched_tokens=1, block_size=1, num_blocks=1)
"""Of an engine that has not joined yet."""


def _be_ready(own: OwnCoordinator, frames: list[bytes]) -> None:
    """Be a coordinator whose engines have all come, as soon as the one of this life has."""
    if frames == [SUBSCRIBE]:
        own.to_engine.send_nowait([COORDINATOR_READY])


def _read(words: list[bytes]) -> ReadyResponse:
    if len(words) != 1:
        raise WireError(f"a ready response is one frame, not {len(words)}")
    told = decode_ready_response(words[0])
    if told is None:
        raise WireError("its ready response is empty; the length of its context is needed")
    return told


def limits_of(told: ReadyResponse) -> EngineLimits:
    """What an engine can hold, by its own word.

    Its pool has room for its longest request, whatever it says: else it would not have started.
    """
    size, longest = max(1, told.block_size), max(1, told.max_model_len)
    tokens = max(longest, told.kv_cache_size_tokens or told.num_gpu_blocks * size)
    return EngineLimits(
        max_num_seqs=max(1, told.max_num_seqs),
        max_num_batched_tokens=max(1, told.max_num_batched_tokens),
        block_size=size,
        num_blocks=-(-tokens // size),
        max_model_len=longest,
    )
