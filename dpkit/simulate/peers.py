"""The scores of other routers, as they publish them, to compare with; not those programs.

Ordinary policies with the same knowledge as dpkit's own: what this client sent where, and what
engines report. So a peer knows more here than in its home where that hears less, and is bound
early, as all of them are. Each says where its formula is from and what of it is left out.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from attrs import define, field

from dpkit.abc import Policy
from dpkit.balancer.books import Books, prospect_of
from dpkit.balancer.policies.lowest import scan_start
from dpkit.balancer.prefixes import BLOCK
from dpkit.balancer.ttft import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import End, EngineLoad, LoadView
    from dpkit.balancer.books import Prospect
    from dpkit.messages import EngineId, GenerateRequest


@define(eq=False)
class PeerStyle(Policy):
    """Picks the least of some costs; of equals the first from this client's start on."""

    books: Books = field(factory=Books)
    _last: Prospect | None = field(default=None, init=False)
    _costs: Sequence[float] = field(factory=list, init=False)

    @abc.abstractmethod
    def costs(self, prospect: Prospect, loads: Sequence[EngineLoad]) -> list[float]:
        """Of each engine; the least gets the request."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        """The engine of the least cost."""
        self._last = prospect_of(request)
        costs = self._costs = self.costs(self._last, view.loads)
        start, count = scan_start(view), len(costs)
        return min(range(count), key=lambda index: (costs[index], (index - start) % count))

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float | None:
        """The cost that `pick` compares."""
        if self._last is None or self._last.request is not request:
            self.pick(request, view)
        return self._costs[index]

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        """Its work and its blocks count where it goes."""
        prospect, self._last = self._last, None
        if prospect is None or prospect.request is not request:
            prospect = prospect_of(request)
        self.books.charge(prospect, view.load(index))

    def on_answered(self, request: GenerateRequest, view: LoadView) -> None:  # noqa: ARG002 - it is in the books
        """Its prompt is read."""
        self.books.answered(request)

    def on_end(self, request: GenerateRequest, end: End, view: LoadView) -> None:  # noqa: ARG002 - likewise
        """It holds nothing any more."""
        self.books.end(request, end)

    def on_report(self, index: int, view: LoadView) -> None:
        """Take the engine's word, and lose sight of what its cache must have lost."""
        load = view.load(index)
        if load.report is not None:
            self.books.of(load).hear(load.report)
            self._stand(load)

    def on_engines(self, view: LoadView) -> None:
        """Caches of lives that are over are gone."""
        self.books.keep(view)

    def _stand(self, load: EngineLoad) -> Standing:
        backlog = self.books.of(load)
        standing = Standing(backlog.room)
        backlog.stand(standing, load, 0.0, alone=True)
        self.books.trim(load.engine, standing.room.kv_tokens - standing.kv_tokens)
        return standing

    def _hit(self, prospect: Prospect, engine: EngineId) -> int:
        """Tokens of a prompt that an engine has cached."""
        return self.books.hits(prospect).get(engine, 0) * BLOCK


@define(eq=False)
class DynamoStyle(PeerStyle):
    """NVIDIA Dynamo's KV router, at temperature 0 and with its default weight of 1.

    ``overlap_weight * prefill_blocks + decode_blocks`` (docs/router: "KV cache routing"): blocks
    that the engine would have to prefill, those that it has before it among them, and blocks that
    its running requests hold, this one among them. Its blocks have 16 tokens by default.
    """

    overlap_weight: float = 1.0
    block_size: int = 16

    def costs(self, prospect: Prospect, loads: Sequence[EngineLoad]) -> list[float]:
        """In blocks."""
        return [self._cost(prospect, load) for load in loads]

    def _cost(self, prospect: Prospect, load: EngineLoad) -> float:
        standing = self._stand(load)
        new, shared = self.books.sizes(prospect, load.engine)
        decode = standing.kv_tokens + prospect.prompt - shared
        return (self.overlap_weight * (standing.prefill + new) + decode) / self.block_size


@define(eq=False)
class LlmDStyle(PeerStyle):
    """llm-d's scheduler with the weights of its "precise prefix" guide: queue 2, KV 2, prefix 3.

    Scorers give 0 to 1 each, the greatest weighted sum wins: the queue from the longest (0) to the
    shortest (1), the share of KV that is free, and the share of the prompt's blocks that is cached.
    """

    queue_weight: float = 2.0
    kv_weight: float = 2.0
    prefix_weight: float = 3.0

    def costs(self, prospect: Prospect, loads: Sequence[EngineLoad]) -> list[float]:
        """Negative sums: the least cost is the greatest score."""
        queues = [self._queue(load) for load in loads]
        longest, shortest = max(queues), min(queues)
        costs = []
        for load, queue in zip(loads, queues, strict=True):
            standing = self._stand(load)
            span = longest - shortest
            of_queue = (longest - queue) / span if span else 1.0
            of_kv = 1.0 - min(1.0, standing.kv_tokens / standing.room.kv_tokens)
            of_prefix = self._hit(prospect, load.engine) / max(1, prospect.prompt)
            costs.append(
                -self.queue_weight * of_queue
                - self.kv_weight * of_kv
                - self.prefix_weight * of_prefix
            )
        return costs

    def _queue(self, load: EngineLoad) -> int:
        """Requests that wait there, what it has not read yet among them."""
        report = load.report
        if report is None:
            return load.waiting
        return report.waiting + max(0, load.inflight - report.requests)


@define(eq=False)
class SglangStyle(PeerStyle):
    """SGLang's cache-aware router, with its defaults.

    While loads are uneven (the fullest engine has more than `most_apart` requests more than the
    emptiest, and more than `most_times` as many) the one with the fewest requests wins. Else the
    longest cached prefix, if it is more than `least_match` of the prompt; else the engine with the
    smallest cache, which is the one with the most room for a new one.
    """

    most_apart: int = 64
    most_times: float = 1.5
    least_match: float = 0.3

    def costs(self, prospect: Prospect, loads: Sequence[EngineLoad]) -> list[float]:
        """Requests, or missed tokens, or tokens known to be cached."""
        counts = [load.inflight + load.others for load in loads]
        if max(counts) - min(counts) > self.most_apart and (
            max(counts) > self.most_times * min(counts)
        ):
            return [float(count) for count in counts]
        hits = [self._hit(prospect, load.engine) for load in loads]
        if max(hits) > self.least_match * prospect.prompt:
            return [float(prospect.prompt - hit) for hit in hits]
        return [float(self.books.prefixes.size(load.engine)) for load in loads]


PEERS: dict[str, str] = {
    name: f"{__name__}:{style.__name__}"
    for name, style in {
        "dynamo_style": DynamoStyle,
        "llm_d_style": LlmDStyle,
        "sglang_style": SglangStyle,
    }.items()
}
"""Their names, and what `load_policy` takes for them."""
