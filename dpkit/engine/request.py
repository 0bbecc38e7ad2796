"""One request's life in an engine, as a literal table. All state changes of requests go through it.

Knows nothing of blocks or queues: the scheduler tells what it is to `hold` and counts up
`num_computed`, and owns the request until it is finished. A refused request is not here: it is
answered and forgotten.
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

    from dpkit.messages import GenerateRequest, TokenLogprob


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


_NOTHING = range(0)


@define(eq=False)  # two requests are never equal: an id may come back after an abort
class Request:
    """What was asked, and how far it got."""

    ask: GenerateRequest
    eos_token_ids: Collection[int] = ()
    state: State = field(default=Unfinished.WAITING, init=False)
    token_ids: list[int] = field(init=False)  # prompt, then output
    output_token_ids: list[int] = field(init=False)  # those of an earlier life first
    prompt_logprobs: list[TokenLogprob] = field(factory=list, init=False)  # as far as computed
    num_computed: int = field(default=0, init=False)  # leading tokens whose KV its blocks hold
    # Prompt tokens that were in the cache when it first ran; None: it did not yet.
    num_cached: int | None = field(default=None, init=False)
    block_ids: list[int] = field(factory=list, init=False)
    _end_token_ids: Collection[int] = field(init=False)
    _hashes: list[bytes] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        sampling = self.ask.sampling
        self.output_token_ids = list(self.ask.output_token_ids)
        self.token_ids = [*self.ask.prompt_token_ids, *self.output_token_ids]
        self._end_token_ids = frozenset(sampling.stop_token_ids).union(
            () if sampling.ignore_eos else self.eos_token_ids
        )

    @property
    def is_finished(self) -> bool:
        """No further step may touch it."""
        return isinstance(self.state, FinishReason)

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far, here and in an earlier life."""
        return len(self.output_token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled here."""
        return self.num_outputs - len(self.ask.output_token_ids)

    @property
    def num_findable(self) -> int:
        """Leading tokens whose KV may come from the cache.

        Never the last: one must be computed to sample from. Nor any whose successor's logprob is
        asked for and not told yet: that takes the token's scores, and the cache has none.
        """
        if not self._tells_prompt or self.is_scored:
            return len(self.token_ids) - 1
        return len(self.prompt_logprobs)

    @property
    def is_scored(self) -> bool:
        """The logprobs of all prompt tokens but the first are known."""
        return len(self.prompt_logprobs) == len(self.ask.prompt_token_ids) - 1

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

    def hold(self, block_ids: list[int], num_found: int) -> None:
        """Have blocks for all its tokens, so many leading ones of which were in the cache."""
        self.block_ids, self.num_computed = block_ids, num_found
        if self.num_cached is None:  # what is found after a preemption, it has computed itself
            self.num_cached = min(num_found, len(self.ask.prompt_token_ids))

    def row(self, budget: int) -> BatchRow:
        """Share of a step that computes at most `budget` of the tokens not computed yet."""
        # Written out, for speed: no other line of dpkit runs as often.
        ask, start, outputs = self.ask, self.num_computed, self.output_token_ids
        sampling, said = ask.sampling, len(outputs)
        token_ids = self.token_ids[start : start + budget]
        end = start + len(token_ids)
        return BatchRow(
            request_id=ask.request_id,
            prompt_token_ids=ask.prompt_token_ids,
            sampling=sampling,
            token_ids=token_ids,
            start=start,
            block_ids=self.block_ids,
            output_index=said if end == len(self.token_ids) else None,
            output_token_ids=outputs,
            banned_token_ids=() if said >= sampling.min_tokens else self._end_token_ids,
            scored=_NOTHING if sampling.prompt_logprobs is None else self._scored(end),
        )

    @property
    def _may_end(self) -> bool:
        """The next token may be one that ends the text."""
        return self.num_outputs >= self.ask.sampling.min_tokens

    @property
    def _tells_prompt(self) -> bool:
        """The prompt's logprobs are asked for; an earlier life told them with its first token."""
        return self.ask.sampling.prompt_logprobs is not None and not self.ask.output_token_ids

    def _scored(self, end: int) -> range:
        """Places of prompt tokens whose logprobs come out of a step that computes up to `end`."""
        if not self._tells_prompt:
            return _NOTHING
        first = 1 + len(self.prompt_logprobs)
        return range(first, min(end + 1, len(self.ask.prompt_token_ids)))

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; return why the request ends with it, if it does."""
        # A model that cannot help saying what it must not (echo) does not end the text by it.
        ends_text = token_id in self._end_token_ids and self._may_end
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        if ends_text:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_outputs >= self.ask.sampling.max_tokens else None

    def block_hashes(self, count: int, block_size: int) -> Sequence[bytes]:
        """Hashes of at least the first `count` blocks, all full; each is computed once."""
        hashes = self._hashes
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else root_hash(self.ask.cache_salt)
            hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return hashes
