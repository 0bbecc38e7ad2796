"""What is known of engines' work and caches: who was sent where, and what they say.

The state of policies that reckon in tokens, with no opinion of its own on where a request should
go. Follows the hooks of `dpkit.abc.Policy` one to one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.balancer.backlog import Backlog, Sent
from dpkit.balancer.prefixes import BLOCK, PrefixIndex, extend_chain, make_chain
from dpkit.messages import Room

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dpkit.abc import End, EngineLoad, LoadView
    from dpkit.messages import EngineId, GenerateRequest

UNKNOWN_ROOM = Room(tokens_per_step=8192, requests=256, kv_tokens=2**40, has_prefix_cache=False)
"""An engine that does not say: vLLM's defaults, and KV that never runs out. So no prefix is
taken to be cached there: none would ever be taken to be lost, and what is known would only grow."""


@define(eq=False)
class Prospect:
    """What a pick wants to know of a request; kept with it while it waits."""

    request: GenerateRequest
    prompt: int  # tokens to compute before the first new one
    chain: Sequence[int]
    hits: Mapping[EngineId, int] = field(factory=dict)  # blocks
    version: int = -1  # of the index, when it was asked for the hits
    held_at: dict[EngineId, tuple[int, int]] = field(factory=dict)
    """Steps that an engine had made, and requests that it had been sent, when this one was first
    held for its KV."""


def prospect_of(request: GenerateRequest) -> Prospect:
    """Name a prompt's blocks: a millisecond for fifty thousand tokens."""
    token_ids = request.prompt_token_ids
    if request.output_token_ids:  # of an earlier life: computed like a prompt
        token_ids += request.output_token_ids
    chain: Sequence[int] = ()
    if (count := len(token_ids)) >= BLOCK:
        chain = make_chain(token_ids, salt=request.cache_salt)
    return Prospect(request, count, chain)


class Books:
    """One client's, or those of several clients together."""

    def __init__(self) -> None:
        self.prefixes = PrefixIndex()
        self._backlogs: dict[EngineId, Backlog] = {}
        self._sent: dict[str, Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[Backlog]:
        return iter(self._backlogs.values())

    def of(self, load: EngineLoad) -> Backlog:
        """The work of one life of an engine."""
        if (backlog := self._backlogs.get(load.engine)) is None:
            backlog = self._backlogs[load.engine] = Backlog(load.room or UNKNOWN_ROOM)
            if load.report is not None:  # of work that another policy gave it
                backlog.hear(load.report)
        return backlog

    def keep(self, view: LoadView) -> None:
        """Of each engine there is the newest life is kept, also while it is away."""
        newest = dict.fromkeys(view.names, 0) | {each.name: each.epoch for each in view.engines}
        gone = [e for e in self._backlogs if e.name not in newest or e.epoch < newest[e.name]]
        for engine in gone:
            del self._backlogs[engine]
            self.prefixes.forget(engine)

    def hits(self, prospect: Prospect) -> Mapping[EngineId, int]:
        """How many blocks of a prompt each engine has cached."""
        if prospect.version != self.prefixes.version:
            chain = prospect.chain
            if prospect.prompt == len(chain) * BLOCK:  # its last token is always computed
                chain = chain[:-1]
            prospect.hits = self.prefixes.hits(chain) if chain else {}
            prospect.version = self.prefixes.version
        return prospect.hits

    def sizes(self, prospect: Prospect, engine: EngineId) -> tuple[int, int]:
        """What is not cached of a prompt on an engine, and what running requests share with it."""
        hit = self.hits(prospect).get(engine, 0)
        shared = self.prefixes.held(engine, prospect.chain, hit) if hit else 0
        return prospect.prompt - hit * BLOCK, shared * BLOCK

    def passed(self, prospect: Prospect, engine: EngineId) -> tuple[int, int]:
        """Since a request is held for want of KV: steps, and KV tokens of those that went before.

        It is held since this was first asked.
        """
        if (backlog := self._backlogs.get(engine)) is None:
            return 0, 0
        steps, count = prospect.held_at.setdefault(engine, (backlog.steps, backlog.count))
        return backlog.steps - steps, backlog.since(count)

    def trim(self, engine: EngineId, kv_tokens: float) -> None:
        """So many tokens of its KV cache are left to what nobody uses."""
        self.prefixes.trim(engine, int(kv_tokens) // BLOCK)

    # What happens to requests.

    def charge(self, prospect: Prospect, load: EngineLoad) -> None:
        """It counts where it goes: its work, and its blocks for whoever comes after it."""
        engine, backlog = load.engine, self.of(load)
        new, shared = self.sizes(prospect, engine)
        chain = prospect.chain if backlog.room.has_prefix_cache else ()
        sent = Sent(engine, prospect.prompt, new, shared, chain)
        self._sent[prospect.request.request_id] = sent
        backlog.add(sent)
        if backlog.room.has_prefix_cache:
            self.prefixes.hold(engine, chain)

    def answered(self, request: GenerateRequest) -> EngineId | None:
        """Its prompt is read; returns where, if its work is known."""
        if (sent := self._sent.get(request.request_id)) is None:
            return None
        if (backlog := self._backlogs.get(sent.engine)) is not None:
            backlog.answered(sent)
        return sent.engine

    def end(self, request: GenerateRequest, end: End) -> EngineId | None:
        """It is on its engine no more; returns which that was, if its work is known."""
        if (sent := self._sent.pop(request.request_id, None)) is None:
            return None
        if (backlog := self._backlogs.get(sent.engine)) is not None:
            backlog.remove(sent)
            if backlog.room.has_prefix_cache:
                self.prefixes.release(sent.engine, sent.chain, _answer(request, sent, end.output))
        return sent.engine


def _answer(request: GenerateRequest, sent: Sent, output: Sequence[int]) -> Sequence[int]:
    """The blocks that an answer fills: the first begins with what was left of the prompt."""
    prompt = request.prompt_token_ids
    left = len(sent.chain) * BLOCK - len(prompt)
    rest = output[left:] if left >= 0 else (*prompt[left:], *output)
    if len(rest) < BLOCK:
        return ()
    if not sent.chain:
        return make_chain(tuple(rest), salt=request.cache_salt)
    return extend_chain(sent.chain, tuple(rest))[len(sent.chain) :]
