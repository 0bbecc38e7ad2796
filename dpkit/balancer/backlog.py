"""How much work one life of an engine has: its last report, and what was sent there since.

Knows sizes, not requests' texts or engines' links. Of an engine that reports, all that it has
drained is in the report, and what it has not drained yet is added. Of one that does not, all of
this client's requests are reckoned by what was sent: a prompt counts as unread until its first
output, an answer as half done.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.balancer.stepcosts import make_paces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import EngineLoad
    from dpkit.balancer.stepcosts import Pace
    from dpkit.balancer.ttft import Standing
    from dpkit.messages import EngineId, Room, StepReport

BEGUN = 64
"""So many steps after its first token an answer has just begun: should it be a short one, its
tokens come late if a long prompt is computed beside it."""

HALF = 0.5
"""Of an answer is there, on average, when nobody says how much."""


@define(eq=False)
class Sent:
    """One request on one engine, with the sizes that were reckoned when it went."""

    engine: EngineId
    prompt: int  # tokens
    new: int  # those that were not cached there
    shared: int = 0  # leading ones that running requests held
    chain: Sequence[int] = ()  # its blocks, as the prefix index names them
    is_pending: bool = True  # no report and no output speaks of it yet
    has_ended: bool = False
    number: int = 0  # of all that the engine was sent
    answered_at: int = 0  # steps of the engine by then
    is_young: bool = False  # answered, and not as long yet as answers are


@define(eq=False)
class Backlog:
    """The books of one life of an engine."""

    room: Room
    paces: tuple[Pace, Pace] = field(factory=make_paces)
    report: StepReport | None = None
    count: int = 0
    """Requests that were sent there so far."""
    _all: dict[Sent, None] = field(factory=dict)  # live ones, as they were sent
    _order: deque[Sent] = field(factory=deque)  # as handed over, until reckoned with
    _live: int = 0
    _prompts: int = 0  # tokens of all live ones
    _pending: int = 0  # requests; and their tokens:
    _pending_new: int = 0
    _pending_prompts: int = 0
    _pending_room: int = 0
    _answered: int = 0  # live ones
    _young: deque[Sent] = field(factory=deque)  # the oldest first, those that ended among them
    _youngs: int = 0  # live ones; and when they were answered:
    _youngs_at: int = 0

    @property
    def steps(self) -> int:
        """That the engine has told of."""
        return 0 if self.report is None else self.report.steps

    @property
    def preemptions(self) -> int:
        """Likewise."""
        return 0 if self.report is None else self.report.preemptions

    def add(self, sent: Sent) -> None:
        """A request goes there now."""
        self.count += 1
        sent.number = self.count
        self._all[sent] = None
        self._order.append(sent)
        self._live += 1
        self._prompts += sent.prompt
        self._pending += 1
        self._pending_new += sent.new
        self._pending_prompts += sent.prompt
        self._pending_room += sent.prompt - sent.shared

    def answered(self, sent: Sent) -> None:
        """Its first output came: its prompt is read. From now on it grows by a token a step."""
        self._settle(sent)
        self._forget_settled()
        if sent.has_ended or sent.answered_at:
            return
        self._answered += 1
        sent.answered_at = 1 + (0 if self.report is None else self.report.steps)
        if self.report is not None:
            sent.is_young = True
            self._young.append(sent)
            self._youngs += 1
            self._youngs_at += sent.answered_at

    def remove(self, sent: Sent) -> None:
        """It is not there any more. Idempotent."""
        if sent.has_ended:
            return
        sent.has_ended = True
        del self._all[sent]
        self._live -= 1
        self._prompts -= sent.prompt
        self._answered -= bool(sent.answered_at)
        self._age(sent)
        self._settle(sent)
        self._forget_settled()

    def since(self, count: int) -> int:
        """KV tokens of those live ones that were sent after so many."""
        tokens, steps = 0, self.steps
        for sent in reversed(self._all):
            if sent.number <= count:
                break
            tokens += sent.prompt - sent.shared
            tokens += steps - sent.answered_at if sent.answered_at else 0
        return tokens

    def hear(self, report: StepReport) -> bool:
        """Take the engine's word; True: it tells of a step that was not told of before."""
        before, self.report = self.report, report
        while len(self._order) > report.sent - report.acknowledged:
            self._settle(self._order.popleft())
        if report.kv_tokens:
            self.room = self.room._replace(kv_tokens=report.kv_tokens)
        return report.steps != (0 if before is None else before.steps)

    def stand(self, standing: Standing, load: EngineLoad, length: float, *, alone: bool) -> None:
        """Say how the engine stands now.

        Args:
            standing: Where to; all but its pace is written.
            load: What the ledger and the snapshot know of it.
            length: Of an answer, as expected.
            alone: There is no other client: the ledger knows all requests there are.
        """
        standing.room = self.room
        if self.report is None:
            self._stand_by_ledger(standing, load, length)
        else:
            self._stand_by_report(standing, self.report, load, length, alone=alone)

    def _stand_by_report(
        self,
        standing: Standing,
        report: StepReport,
        load: EngineLoad,
        length: float,
        *,
        alone: bool,
    ) -> None:
        counted = report.requests + self._pending
        standing.requests = load.inflight if alone else max(load.inflight, counted)
        unread = report.unprefilled_tokens
        under_way = report.scheduled_tokens
        if unread and not under_way:  # between two steps: the next one begins at once
            decodes = report.requests - report.waiting
            under_way = min(unread, max(1, self.room.tokens_per_step - decodes))
        standing.prefill = unread - under_way + self._pending_new
        standing.context = report.context_tokens + unread + self._pending_prompts
        others = 0 if alone else max(0, counted - self._live)
        standing.growth = self._growth(report.steps, others, length)
        standing.begun = self._live - self._answered + self._just_begun(report.steps)
        # Whoever runs holds blocks for all its prompt; those that wait have none yet.
        unplaced = unread if report.waiting else 0
        standing.kv_tokens = report.kv_tokens_used + unplaced + self._pending_room

    def _growth(self, steps: int, others: int, length: float) -> float:
        """Output still to come, if each answer that is not as long yet becomes as long as others.

        Who has grown beyond that adds nothing, nor does it take from what the others need.
        """
        young = self._young
        while young and (not young[0].is_young or steps - young[0].answered_at >= length):
            self._age(young.popleft())
        of_young = self._youngs * (length - steps) + self._youngs_at
        unanswered = (self._live - self._answered) * length
        return of_young + unanswered + others * HALF * length

    def _just_begun(self, steps: int) -> int:
        count = 0
        for sent in reversed(self._young):
            if steps - sent.answered_at >= BEGUN:
                break
            count += sent.is_young
        return count

    def _age(self, sent: Sent) -> None:
        if sent.is_young:
            sent.is_young = False
            self._youngs -= 1
            self._youngs_at -= sent.answered_at

    def _stand_by_ledger(self, standing: Standing, load: EngineLoad, length: float) -> None:
        standing.requests = load.inflight + load.others
        standing.prefill = self._pending_new
        standing.begun = self._live - self._answered
        written = HALF * length * self._answered
        standing.context = self._prompts + written
        standing.growth = max(0.0, self._live * length - written)
        used = load.kv_cache_usage * self.room.kv_tokens
        standing.kv_tokens = max(standing.context, used + self._pending_room)

    def _settle(self, sent: Sent) -> None:
        if sent.is_pending:
            sent.is_pending = False
            self._pending -= 1
            self._pending_new -= sent.new
            self._pending_prompts -= sent.prompt
            self._pending_room -= sent.prompt - sent.shared

    def _forget_settled(self) -> None:
        """An engine that never reports acknowledges nothing."""
        if self.report is None:
            while self._order and not self._order[0].is_pending:
                self._order.popleft()
