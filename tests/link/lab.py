"""An engine and what its frontends hear of it, without sockets: frames go into lists."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field

from dpkit.engine.core import EngineCore
from dpkit.engine.limits import EngineLimits
from dpkit.engine.models.echo import EchoModel
from dpkit.engine.publish import PublishGate
from dpkit.link.frontends import Frontends
from dpkit.messages import EngineId, GenerateRequest, SamplingParams, StepResult
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.inbox import Inbox
from dpkit.wire.codec import Abort, Add, EngineDead, Utility, decode_output, encode_input
from dpkit.wire.convert import to_wire
from dpkit.wire.structs import Envelope, UtilityAnswer, UtilityCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dpkit.messages import Batch

STEP_S = 1.0
ENGINE = EngineId("e0")
RANK = 3
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=64)


class Timed(EchoModel):
    """Each step lasts a second; may fail at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps = 0
        self.fail_at = fail_at

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("boom")
        result = super().execute(batch, cache)
        return StepResult(sampled=result.sampled, duration_s=STEP_S)


def ask(request_id: str, prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> Add:
    """A request; it ends with its prompt's end, unless it is told otherwise."""
    request = GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**({"max_tokens": 100} | sampling)),
    )
    return Add(to_wire(request, wire_id=request_id))


@define(eq=False)
class Desk:
    """The frontends' side of the table."""

    frontends: Frontends
    loop: BusyLoop
    sent: list[list[Envelope | EngineDead]]
    """What each frontend was told, by its index."""
    counted: list[Envelope] = field(factory=list)
    """What the coordinator was told."""
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    def say(self, index: int, message: Add | Abort | Utility) -> None:
        """Have a frontend say something."""
        self.frontends.receive(index, encode_input(message))

    def call(self, index: int, method: str, *args: Any) -> UtilityAnswer | None:
        """Have a frontend call a method; the answer, if there is one at once."""
        before = len(self.sent[index])
        self.say(index, Utility(UtilityCall(index, 7, method, args)))
        answers = [
            envelope.utility_output
            for envelope in self.sent[index][before:]
            if isinstance(envelope, Envelope) and envelope.utility_output is not None
        ]
        assert len(answers) < 2
        return answers[0] if answers else None

    def told(self, index: int) -> list[tuple[str, tuple[int, ...], int | None]]:
        """Entries that a frontend got so far, without those that tell nothing."""
        return [
            (entry.request_id, entry.new_token_ids, entry.finish_reason)
            for envelope in self.envelopes(index)
            for entry in envelope.outputs
        ]

    def finished(self, index: int) -> list[str]:
        """Ids that a frontend may forget, as it was told so far."""
        envelopes = self.envelopes(index)
        return [each for envelope in envelopes for each in envelope.finished_requests or ()]

    def envelopes(self, index: int) -> list[Envelope]:
        """All but a dead engine's last word."""
        return [each for each in self.sent[index] if isinstance(each, Envelope)]

    def is_dead(self, index: int) -> bool:
        """Whether the last word that a frontend heard was that the engine is dead."""
        return bool(self.sent[index]) and isinstance(self.sent[index][-1], EngineDead)


@asynccontextmanager
async def open_desk(
    count: int = 2, *, model: EchoModel | None = None, coordinator: bool = False
) -> AsyncIterator[Desk]:
    """An engine of some frontends, running until the block is left."""
    model = Timed() if model is None else model
    inbox = Inbox()
    frontends = Frontends(RANK, inbox)
    loop = BusyLoop(
        engine=ENGINE,
        index=RANK,
        model=model,
        core=EngineCore(model, limits=LIMITS),
        inbox=inbox,
        publish=frontends.publish,
        gate=PublishGate(0.02),
        flush=frontends.flush,
    )
    frontends.serve(loop)
    desk = Desk(frontends, loop, [[] for _ in range(count)])
    ports = [_into(desk.sent[index]) for index in range(count)]
    frontends.connect(ports)
    frontends.coordinator = _into(desk.counted) if coordinator else None

    async def run() -> None:
        with desk.scope:
            try:
                await loop.run()
            except RuntimeError:
                frontends.die()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await loop.ready.wait()
        yield desk
        desk.scope.cancel()


def _into(told: list[Any]) -> Any:
    return lambda frames: told.append(decode_output(frames))
