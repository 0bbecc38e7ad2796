"""`expected_ttft`: the engine where the first token is expected soonest, in seconds of work.

Counts of requests are the wrong unit: here a prompt weighs what its uncached tokens take, beside
what an engine has before it, and what its load and its KV cache cost the answer. All of it is
reckoned from what was sent and what engines report (`dpkit.balancer.books`); step costs and speeds
are learned.

Bound early, each request goes where the score is least. Bound late (`dpkit.balancer.late`), it is
held for that engine until it would begin there with the next step, and all that wait are decided
anew whenever something changes: a hold binds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import HoldingPolicy
from dpkit.balancer.books import UNKNOWN_ROOM, Books, Prospect, prospect_of
from dpkit.balancer.cohorts import Cohort, CohortPass
from dpkit.balancer.growth import GrowthReserve
from dpkit.balancer.outputs import OutputLengths
from dpkit.balancer.policies.lowest import scan_start
from dpkit.balancer.prefixes import BLOCK
from dpkit.balancer.stepcosts import (
    StepCosts,
    is_believable,
    relative_slowness,
    seconds,
    usual_paces,
)
from dpkit.balancer.ttft import (
    Rate,
    Standing,
    Weights,
    has_credit,
    is_open,
    prefill_work,
    rate,
    scores,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import End, LoadView, Pass
    from dpkit.messages import EngineId, GenerateRequest

ONE_IN = 8
"""Of so many steps that compute no prompt, one is learned from."""


@define(kw_only=True, eq=False)
class ExpectedTtft(HoldingPolicy):
    """Least expected time to first token, and what else it costs there (`dpkit.balancer.ttft`)."""

    weights: Weights = field(factory=Weights)
    costs: StepCosts = field(factory=StepCosts)
    lengths: OutputLengths = field(factory=OutputLengths)
    reserve: GrowthReserve = field(factory=GrowthReserve)
    books: Books = field(factory=Books)
    cohort: Cohort = field(factory=Cohort)
    _indices: dict[EngineId, int] = field(factory=dict, init=False)
    _standings: list[Standing] = field(factory=list, init=False)
    _rates: list[Rate] = field(factory=list, init=False)
    _last: Prospect | None = field(default=None, init=False)
    _scores: Sequence[float] = field(factory=list, init=False)

    def prepare(self, request: GenerateRequest) -> Prospect:
        """Its size, and the names of its blocks."""
        return prospect_of(request)

    def age(self, prospect: Prospect) -> float:
        """Seconds by which others that come later may go before a prompt of this size."""
        tokens = min(prospect.prompt, self.weights.aged_tokens)
        return self.weights.ageing * self.costs.costs.prefill * tokens

    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        """The engine with the least score, whether it can begin at once or not."""
        self._renew(view)
        return self.best(self.prepare(request), self._rates, scan_start(view))

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float | None:
        """Seconds, as `pick` compared them."""
        return self.scores(request, view)[index]

    def scores(self, request: GenerateRequest, view: LoadView) -> Sequence[float]:
        """Those of all engines, by index."""
        if self._last is None or self._last.request is not request:
            self.pick(request, view)
        return self._scores

    def open_pass(self, view: LoadView) -> Pass:
        """Look at all engines as they stand now, to decide on those that wait."""
        self._renew(view)
        standings = list(self._standings)
        own = TtftPass(self, view, standings, list(self._rates))
        return CohortPass(own, standings, view, self.cohort) if view.steps_together else own

    def best(self, prospect: Prospect, rates: Sequence[Rate], start: int) -> int:
        """Index of the least of these rates' scores; of equals the first from `start` on."""
        costs, prompt = self.costs.costs, prospect.prompt
        spread = 1.0 + self.weights.spread
        found = scores(rates, prompt, prompt, spread * prefill_work(costs, prompt))
        for engine, hit in self.books.hits(prospect).items():
            if (index := self._indices.get(engine)) is not None:
                cached = hit * BLOCK
                shared = self.books.prefixes.held(engine, prospect.chain, hit) * BLOCK
                work = spread * prefill_work(costs, prompt, cached)
                [found[index]] = scores([rates[index]], prompt, prompt - cached, work, shared)
        self._last, self._scores = prospect, found
        least = min(found)
        index = found.index(least)
        if index < start and least in (rest := found[start:]):
            index = start + rest.index(least)
        return index

    def rate(self, standing: Standing) -> Rate:
        """What an engine offers that stands so."""
        costs, length = self.costs.costs, self.lengths.mean
        return rate(standing, costs, self.weights, length, self.reserve.share)

    # What happens to requests and engines.

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """It counts where it goes."""
        prospect, self._last = self._last, None
        if prospect is None or prospect.request is not request:
            prospect = self.prepare(request)
        self.books.charge(prospect, view.load(index))

    def on_answered(self, request: GenerateRequest, view: LoadView) -> None:
        """Its prompt is read."""
        self._changed(self.books.answered(request), view)

    def on_end(self, request: GenerateRequest, end: End, view: LoadView) -> None:
        """It is on its engine no more; an answer that ended by itself says how long they are."""
        if end.finished:
            self.lengths.add(len(end.output))
            self.reserve.ended()
        self._changed(self.books.end(request, end), view)

    def on_report(self, index: int, view: LoadView) -> None:
        """Believe it, and learn from the step that it tells of."""
        load = view.load(index)
        report = load.report
        if report is None:
            return
        book = self.books.of(load)
        work, lasted = report.last_step, report.step_time_s
        if report.preemptions > book.preemptions:
            self.reserve.preempted()
        is_new = book.hear(report) and is_believable(work, lasted)
        # Steps without a prompt are all alike, and there are many.
        if is_new and (work.prefill_tokens or not report.steps % ONE_IN):
            if self.costs.are_settled:
                book.paces[work.prefill_tokens > 0].add(lasted, seconds(work, self.costs.costs))
            self.costs.learn(work, lasted, relative_slowness(book.paces, self._usual_paces()))

    def on_engines(self, view: LoadView) -> None:  # noqa: ARG002 - looked at when it is needed
        """Indices have moved. A life that is away for a while keeps its books."""
        self._standings.clear()
        self._rates.clear()
        self._indices.clear()

    # What is kept of engines.

    def _renew(self, view: LoadView) -> None:
        """Look again at the engines whose load has changed."""
        if len(self._standings) != len(view.loads):
            self._standings = [Standing(UNKNOWN_ROOM) for _ in view.loads]
            self._rates = [self.rate(standing) for standing in self._standings]
            self._indices = {engine: index for index, engine in enumerate(view.engines)}
            view.changes.update(range(len(view.loads)))
            self.books.keep(view)
        if not view.changes:
            return
        alone = view.client_count == 1
        usual = self._usual_paces()
        for index in view.changes:
            load, standing = view.load(index), self._standings[index]
            book = self.books.of(load)
            book.stand(standing, load, self.lengths.mean, alone=alone)
            standing.slowness = relative_slowness(book.paces, usual)
            self._rates[index] = self.rate(standing)
            self.books.trim(load.engine, standing.room.kv_tokens - standing.kv_tokens)
        view.changes.clear()

    def _usual_paces(self) -> list[float | None]:
        return usual_paces(book.paces for book in self.books)

    def _changed(self, engine: EngineId | None, view: LoadView) -> None:
        if engine is not None and (index := self._indices.get(engine)) is not None:
            view.changes.add(index)


class TtftPass:
    """One look at all that wait, in their turn: who is sent where, and who is held for whom."""

    def __init__(
        self,
        policy: ExpectedTtft,
        view: LoadView,
        standings: list[Standing],
        rates: list[Rate],
    ) -> None:
        self._policy = policy
        self._engines = view.engines
        self._start = scan_start(view)
        self._standings = standings
        self._rates = rates
        self._short: dict[int, Shortage] = {}  # by engine
        self._open = {
            index
            for index, (each, rate) in enumerate(zip(standings, rates, strict=True))
            if is_open(each, rate.free, policy.weights)
        }

    @property
    def is_over(self) -> bool:
        """No engine takes any more."""
        return not self._open

    def offer(self, prospect: Prospect, index: int | None = None) -> int | None:
        """Where to send a request now; None: it is held, for its best engine.

        Whoever is held closes that engine to all behind it: nobody passes it there. Only who has
        long been held for want of KV lets those pass that leave it the room it will need.
        """
        policy = self._policy
        if index is None:
            index = policy.best(prospect, self._rates, self._start)
        new, shared = policy.books.sizes(prospect, self._engines[index])
        wants = prospect.prompt - shared
        begun, short = self._standings[index], self._short.get(index)
        spare = self._rates[index].free
        if short is not None:
            begun, spare = short.begun, min(policy.rate(short.begun).free, short.left)
        may_begin = index in self._open and has_credit(begun, policy.weights, new, 0.0)
        sends = may_begin and (spare >= wants or not begun.requests)
        if sends:
            begun = begun.joined(prospect.prompt, new, wants, policy.lengths.mean)
        self._reckon(index, prospect.prompt, new, wants)
        if short is not None:
            short.begun, short.left = begun, short.left - wants * sends
        elif may_begin and not sends:
            may_begin = self._lets_pass(prospect, index, begun, wants)
        if not may_begin or begun.prefill >= policy.weights.window * begun.room.tokens_per_step:
            self._open.discard(index)
        return index if sends else None

    def _reckon(self, index: int, prompt: int, new: int, wants: int) -> None:
        """For the rest of this pass, the engine has this one too."""
        length = self._policy.lengths.mean
        after = self._standings[index] = self._standings[index].joined(prompt, new, wants, length)
        self._rates[index] = self._policy.rate(after)

    def _lets_pass(self, prospect: Prospect, index: int, begun: Standing, wants: int) -> bool:
        """Whether others may go first, where a request is held for want of KV.

        Not yet, as long as KV may be expected to come free: until the engine has made as many
        steps as an answer has tokens.
        """
        policy = self._policy
        length = policy.lengths.mean
        steps, passed = policy.books.passed(prospect, self._engines[index])
        if steps < length:
            return False
        cache = policy.weights.fill * begun.room.kv_tokens
        left = cache - wants - passed - 2 * policy.reserve.share * length
        self._short[index] = Shortage(begun=begun, left=left)
        return True


@define(eq=False, kw_only=True)
class Shortage:
    """An engine for which somebody is held that its KV cache has had no room for all this time."""

    begun: Standing
    """As it is without those that are held for it."""
    left: float
    """KV tokens that those may have who go before the one that is held: he has his room at the
    latest when all have ended that were there before him."""
