"""One request's life in an engine, as a literal table. All state changes of requests go through it.

Knows nothing of blocks or queues: the scheduler fills in `block_ids` and `num_computed`, and owns
the request until it is finished. A refused request is not here: it is answered and forgotten.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.errors import InternalError
from dpkit.hashing import block_hash, root_hash
from dpkit.messages import BatchRow
from dpkit.names import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dpkit.messages import GenerateRequest


class Unfinished(enum.StrEnum):
    """Where a request may be before its end."""

    WAITING = "waiting"  # no block yet
    RUNNING = "running"  # holds blocks for all its tokens
    PREEMPTED = "preempted"  # waits again, without blocks, its output kept


# A request that has ended is in no state but its reason.
State = Unfinished | FinishReason

TRANSITIONS: Mapping[State, Collection[State]] = {
    Unfinished.WAITING: {Unfinished.RUNNING, FinishReason.ABORT},
    Unfinished.RUNNING: {
        Unfinished.PREEMPTED,
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    },
    Unfinished.PREEMPTED: {Unfinished.RUNNING, FinishReason.ABORT},
    FinishReason.STOP: (),
    FinishReason.LENGTH: (),
    FinishReason.ABORT: (),
}


@define(eq=False)  # two requests are never equal: an id may come back after an abort
class Request:
    """What was asked, and how far it got."""

    ask: GenerateRequest
    state: State = field(default=Unfinished.WAITING, init=False)
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_computed: int = field(default=0, init=False)  # leading tokens whose KV its blocks hold
    block_ids: list[int] = field(factory=list, init=False)
    _hashes: list[bytes] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.token_ids = list(self.ask.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """No further step may touch it."""
        return isinstance(self.state, FinishReason)

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.ask.prompt_token_ids)

    def move_to(self, state: State) -> None:
        """Change state.

        Raises:
            InternalError: the table has no such transition; nothing has changed.
        """
        if state not in TRANSITIONS[self.state]:
            raise InternalError(
                f"request {self.ask.request_id!r} cannot go from {self.state} to {state}",
                request_id=self.ask.request_id,
            )
        self.state = state

    def row(self, budget: int) -> BatchRow:
        """Share of a step that computes at most `budget` of the tokens not computed yet."""
        start = self.num_computed
        token_ids = self.token_ids[start : start + budget]
        samples = start + len(token_ids) == len(self.token_ids)
        return BatchRow(
            request_id=self.ask.request_id,
            prompt_token_ids=self.ask.prompt_token_ids,
            sampling=self.ask.sampling,
            token_ids=token_ids,
            start=start,
            block_ids=self.block_ids,
            output_index=self.num_outputs if samples else None,
        )

    def append(self, token_id: int, eos_token_ids: Collection[int]) -> FinishReason | None:
        """Take a sampled token; return why the request ends with it, if it does."""
        self.token_ids.append(token_id)
        sampling = self.ask.sampling
        ends_text = token_id in eos_token_ids and not sampling.ignore_eos
        if ends_text or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_outputs >= sampling.max_tokens else None

    def block_hashes(self, count: int, block_size: int) -> Sequence[bytes]:
        """Hashes of at least the first `count` blocks, all full; each is computed once."""
        hashes = self._hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else root_hash(self.ask.cache_salt)
            hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return hashes
