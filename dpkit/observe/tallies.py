"""Counts of what ends: requests for tokens, by engine, and answers over HTTP.

Each is told once and costs a few microseconds; nothing here is touched for a token. Knows nothing
of Prometheus.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from dpkit.names import FinishReason
from dpkit.nursery.meter import INTER_TOKEN_S, Histogram
from dpkit.serve.face import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dpkit.names import Cause
    from dpkit.nursery.events import Event, Figures
    from dpkit.nursery.meter import Counted
    from dpkit.serve.site import Answered

LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's bounds for whole requests and their phases."""

TOKENS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
"""vLLM's for counts of tokens, up to a million, whatever the model's length."""

HTTP_S = (0.1, 0.5, 1.0)
"""As prometheus-fastapi-instrumentator has them."""

_WELL = {FinishReason.STOP, FinishReason.LENGTH}
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"}
_BY_REQUEST = {
    "vllm:e2e_request_latency_seconds": LATENCY_S,
    "vllm:request_queue_time_seconds": LATENCY_S,
    "vllm:request_prefill_time_seconds": LATENCY_S,
    "vllm:request_decode_time_seconds": LATENCY_S,
    "vllm:request_inference_time_seconds": LATENCY_S,
    "vllm:request_time_per_output_token_seconds": INTER_TOKEN_S,
    "vllm:request_prompt_tokens": TOKENS,
    "vllm:request_generation_tokens": TOKENS,
    "vllm:request_params_max_tokens": TOKENS,
}


@frozen(kw_only=True)
class RequestCounts:
    """Requests of one engine that have ended, at one moment."""

    reasons: Mapping[FinishReason, int]
    causes: Mapping[Cause, int]
    measured: Mapping[str, Counted]
    """Of those that finished well, by the family's name."""


class RequestTally:
    """Requests of one engine that have ended."""

    def __init__(self) -> None:
        self._reasons: Counter[FinishReason] = Counter()
        self._causes: Counter[Cause] = Counter()
        self._measured = {name: Histogram(bounds) for name, bounds in _BY_REQUEST.items()}

    def add(self, reason: FinishReason, cause: Cause, at: float, figures: Figures) -> None:
        """One more."""
        self._reasons[reason] += 1
        self._causes[cause] += 1
        placed_at, first_token_at = figures.placed_at, figures.first_token_at
        if reason not in _WELL or placed_at is None or first_token_at is None:
            return
        seconds = (
            at - figures.admitted_at,
            placed_at - figures.admitted_at,
            first_token_at - placed_at,
            at - first_token_at,
            at - placed_at,
        )
        tokens = (figures.prompt_tokens, figures.output_tokens, figures.max_tokens)
        mean = (at - first_token_at) / max(1, figures.output_tokens - 1)
        for histogram, value in zip(
            self._measured.values(), (*seconds, mean, *tokens), strict=True
        ):
            histogram.observe(value)

    def now(self) -> RequestCounts:
        """All so far."""
        return RequestCounts(
            reasons=dict(self._reasons),
            causes=dict(self._causes),
            measured={name: histogram.now() for name, histogram in self._measured.items()},
        )


class RequestTallies:
    """Requests that have ended, by the engine's rank as a label; empty: they never had one."""

    def __init__(self) -> None:
        self._by_rank: dict[str, RequestTally] = {}

    def on_event(self, event: Event) -> None:
        """Take an event; all but the ends of requests are ignored."""
        if event.figures is None or event.reason is None or event.cause is None:
            return
        rank = event.figures.rank
        tally = self._tally("" if rank is None else str(rank))
        tally.add(event.reason, event.cause, event.at, event.figures)

    def now(self, ranks: Iterable[str]) -> Mapping[str, RequestCounts]:
        """All so far, and nothing for these engines if it is so."""
        for rank in ranks:
            self._tally(rank)
        return {rank: tally.now() for rank, tally in self._by_rank.items()}

    def _tally(self, rank: str) -> RequestTally:
        if (tally := self._by_rank.get(rank)) is None:
            tally = self._by_rank[rank] = RequestTally()
        return tally


@frozen(kw_only=True)
class HttpCounts:
    """Answers that have ended, at one moment."""

    answers: Mapping[tuple[str, str, str], int]
    """By handler, status and ending."""
    requests: Mapping[tuple[str, str, str], int]
    """But of probes, by method, class of status, and handler."""
    seconds: Mapping[tuple[str, str], Counted]
    """Of those, by method and handler."""
    disconnects: int


@define(eq=False)
class HttpTally:
    """Answers that have ended.

    Args:
        name_of: The route of a path; None: there is none.
        probes: Routes that are asked all day long, and would hide what happens to others.
    """

    _name_of: Callable[[str], str | None]
    _probes: frozenset[str]
    _answers: Counter[tuple[str, str, str]] = field(factory=Counter, init=False)
    _requests: Counter[tuple[str, str, str]] = field(factory=Counter, init=False)
    _seconds: dict[tuple[str, str], Histogram] = field(factory=dict, init=False)
    _disconnects: int = field(default=0, init=False)

    def on_answered(self, answered: Answered) -> None:
        """One more."""
        request, status = answered.request, str(answered.status)
        handler = "none" if request is None else self._name_of(request.path) or "none"
        self._answers[handler, status, answered.ending] += 1
        self._disconnects += answered.ending is Ending.CLIENT_GONE
        if handler in self._probes:
            return
        method = "other" if request is None or request.method not in _METHODS else request.method
        self._requests[method, f"{status[0]}xx", handler] += 1
        if (seconds := self._seconds.get((method, handler))) is None:
            seconds = self._seconds[method, handler] = Histogram(HTTP_S)
        seconds.observe(answered.seconds)

    def now(self) -> HttpCounts:
        """All so far."""
        return HttpCounts(
            answers=dict(self._answers),
            requests=dict(self._requests),
            seconds={key: histogram.now() for key, histogram in self._seconds.items()},
            disconnects=self._disconnects,
        )
