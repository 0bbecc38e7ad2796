"""One request under way, and what is said of it when it ends otherwise than well.

Data and wording; what happens to a flight is decided in `dpkit.nursery.flights`.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, evolve, field, frozen

from dpkit.balancer.admission import Entry
from dpkit.engine.checks import size_problem
from dpkit.errors import (
    ClusterClosed,
    DeadlineExceeded,
    Draining,
    Overloaded,
    RequestRejected,
    plural,
)
from dpkit.logs import about
from dpkit.names import Cause, FinishReason
from dpkit.nursery.events import Event, EventKind, Figures

if TYPE_CHECKING:
    from dpkit.balancer.admission import Ticket
    from dpkit.balancer.dispatch import Placement, Why
    from dpkit.balancer.retries import RetryBudget
    from dpkit.engine.limits import EngineLimits
    from dpkit.errors import DpkitError, EngineLost
    from dpkit.messages import EngineId, EngineOutput, GenerateRequest
    from dpkit.nursery.events import EventLog
    from dpkit.nursery.meter import FirstTokens

_log = logging.getLogger(__name__)

_DRAIN_RETRY_S = 5.0
"""What a client of a draining cluster is told to wait: about the time a restarted pod needs."""


class Receiver(Protocol):
    """Where the outputs of one request go; `Flights` drives it, and nobody else.

    All calls come on Trio's thread, are synchronous and raise nothing. A receiver may call back:
    `Flights.end`, and `Flights.begin` for another request.
    """

    request: GenerateRequest
    delivered: list[int]
    """Its tokens so far. `Flights` adds those of an output before it hands it on."""
    scans: bool
    """Whether each output is to be shown to `scan` before it counts."""

    def scan(self, output: EngineOutput) -> EngineOutput:
        """Give it back as it is, or with a finish reason: then the request ends with it."""

    def on_placed(self, placement: Placement) -> None:
        """The request has its engine, perhaps not its first one."""

    def on_answered(self, output: EngineOutput) -> None:
        """The engine that has it now gives its first token, with this; `deliver` is yet to come."""

    def deliver(self, output: EngineOutput) -> None:
        """Take an output, which is not the last."""

    def finish(self, output: EngineOutput) -> None:
        """Take the last output, which has a finish reason; the books are closed by now."""

    def fail(self, reason: FinishReason, error: Exception) -> None:
        """Take what ended the request without a word of its engine; no more comes."""


@frozen(kw_only=True)
class Limits:
    """What one client admits. Times are seconds."""

    max_inflight: int | None = None
    """Requests on engines at once; None: as many as come."""
    max_queued: int = 1024
    queue_timeout: float = 60.0
    retries: int = 1
    """Placements after a loss; each needs that nothing was delivered, or `resume`."""
    retry_budget: float = 0.2
    """Share of all requests that may be such placements, when losses add up."""
    resume: bool = False
    moves: bool = True
    """Whether an answer that has begun may go on elsewhere because its engine has given it up."""
    largest: EngineLimits | None = None
    """Of the engine that holds the longest request; None: unknown, engines say what they take."""


@frozen(kw_only=True)
class RequestStatistics:
    """One request under way, at one moment."""

    request_id: str
    engine: EngineId | None
    """None: it waits for a place."""
    prompt_tokens: int
    output_tokens: int
    """Delivered so far, read or not."""
    age_s: float
    retries: int
    """Placements after a loss."""


@define(eq=False)
class Flight:
    """One request under way."""

    receiver: Receiver
    request: GenerateRequest  # as an engine gets it: it grows when it is resumed elsewhere
    retries_left: int
    times_out_at: float  # in the queue
    first_tokens: FirstTokens
    ticket: Ticket | None = None
    placement: Placement | None = None
    engine: EngineId | None = None
    """That of the placement, at hand for every token."""
    answered: bool = False
    """Whether the engine that has it now has given a token."""
    retries: int = 0
    prospect: object = None
    """What the policy wants to know of it while it waits, made when it is first wanted."""
    why: Why | None = None
    """What the arbiter of several clients chose its engine by."""
    admitted_at: float = field(factory=trio.current_time)
    placed_at: float | None = None
    """On its first engine."""
    first_token_at: float | None = None

    @property
    def delivered(self) -> list[int]:
        """Its tokens so far, read or not."""
        return self.receiver.delivered

    def place(self, placement: Placement, now: float) -> None:
        """Be on an engine, perhaps not the first one."""
        self.placement, self.engine, self.answered = placement, placement.engine, False
        if self.placed_at is None:
            self.placed_at = now
        _log_placement(self.request.request_id, placement)

    def answer(self, output: EngineOutput) -> None:
        """Take note that the engine that has it now has given its first token."""
        self.answered = True
        if self.first_token_at is None:
            self.first_token_at = now = trio.current_time()
            assert self.placement is not None  # noqa: S101 - who else gave it
            self.first_tokens.observe(self.placement.rank, now - self.admitted_at)
        self.receiver.on_answered(output)

    def ended(self, reason: FinishReason, cause: Cause) -> Event:
        """Its terminal event, as long as it still knows its engine."""
        asked, placement = self.receiver.request, self.placement
        return Event(
            at=trio.current_time(),
            kind=EventKind.REQUEST_ENDED,
            engine=self.engine,
            request_id=asked.request_id,
            reason=reason,
            cause=cause,
            figures=Figures(
                rank=None if placement is None else placement.rank,
                prompt_tokens=len(asked.prompt_token_ids),
                output_tokens=len(self.delivered),
                max_tokens=asked.sampling.max_tokens,
                admitted_at=self.admitted_at,
                placed_at=self.placed_at,
                first_token_at=self.first_token_at,
            ),
        )

    def statistics(self) -> RequestStatistics:
        """What is known of the request now."""
        return RequestStatistics(
            request_id=self.request.request_id,
            engine=self.engine,
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=len(self.delivered),
            age_s=trio.current_time() - self.admitted_at,
            retries=self.retries,
        )

    @property
    def alarm(self) -> float:
        """When time has something to say about it next; infinity: never."""
        deadline = math.inf if self.request.deadline is None else self.request.deadline
        return deadline if self.placement is not None else min(deadline, self.times_out_at)

    def entry(self, age: float = 0.0) -> Entry:
        """The request as the queue sees it."""
        request = self.request
        return Entry(
            request_id=request.request_id,
            priority=request.priority,
            tenant=request.tenant,
            tokens=len(request.prompt_token_ids) + request.sampling.max_tokens,
            age=age,
        )

    def may_go_elsewhere(self, *, resume: bool) -> bool:
        """Whether another engine may have it, now that its own was lost."""
        if not self.retries_left or self.request.engine is not None:
            return False
        return not self.delivered or resume or self.request.resume

    def retry(self) -> None:
        """Take note that it is placed after a loss."""
        self.retries_left -= 1
        self.retries += 1

    def go_elsewhere(self, times_out_at: float) -> None:
        """Be what another engine gets: what was delivered so far is its output already.

        The prompt was described with the first token, so that is not asked again.
        """
        self.times_out_at, self.why = times_out_at, None
        if not self.delivered:
            return
        asked, self.prospect = self.receiver.request, None
        self.request = evolve(
            asked,
            output_token_ids=asked.output_token_ids + tuple(self.delivered),
            is_checked=False,  # a model's own tokens are what it makes of them
            sampling=evolve(asked.sampling, prompt_logprobs=None),
        )


def cause_of(output: EngineOutput, seen: EngineOutput) -> Cause:
    """Why a request ended: by what its engine said, or what its receiver saw in that."""
    if seen is not output and output.error is None:
        return Cause.STOP if seen.finish_reason is FinishReason.STOP else Cause.REFUSED
    if output.finish_reason is FinishReason.ERROR:
        return Cause.REFUSED if isinstance(output.error, RequestRejected) else Cause.ENGINE_LOST
    return Cause.LENGTH if output.finish_reason is FinishReason.LENGTH else Cause.STOP


def refusal(kind: type[DpkitError] | None, request_id: str) -> DpkitError:
    """What a request hears that comes when the cluster is going away."""
    if kind is Draining:
        return Draining(
            f"request {request_id}: the cluster is draining and takes no new requests; "
            "try another one, or this one again when it is back",
            retry_after=_DRAIN_RETRY_S,
            request_id=request_id,
        )
    return ClusterClosed(
        f"request {request_id}: the cluster is closed; make requests inside its `async with` block",
        request_id=request_id,
    )


def cut_off(kind: type[DpkitError] | None, flight: Flight) -> DpkitError:
    """What a request hears that is still there when its time to finish is over."""
    request_id = flight.request.request_id
    cut = f"request {request_id}: it was cut off after {plural(len(flight.delivered), 'token')}"
    if kind is Draining:
        return Draining(
            f"{cut}, as the cluster drains and the time to finish was over; "
            "ask another cluster, or this one again when it is back",
            retry_after=_DRAIN_RETRY_S,
            request_id=request_id,
        )
    return ClusterClosed(
        f"{cut}, as the cluster was left; await what is under way inside its `async with` block",
        request_id=request_id,
    )


def too_long(request: GenerateRequest, limits: Limits) -> RequestRejected | None:
    """What a request hears, in its engine's own words, that fits no engine there can be."""
    problem = None if limits.largest is None else size_problem(request, limits.largest)
    if problem is None:
        return None
    return RequestRejected(f"cannot serve request: {problem}", request_id=request.request_id)


def _log_placement(request_id: str, placement: Placement) -> None:
    """Tell where a request goes, for who looks for errors."""
    if _log.isEnabledFor(logging.DEBUG):
        engine, of = placement.engine, about(request_id=request_id, engine=placement.engine)
        _log.debug("request %s goes to %s by %s", request_id, engine, placement.reason, extra=of)


def not_retried(error: EngineLost) -> str:
    """What a request hears that was lost with its engine, and could not be placed again."""
    return (
        f"{error}; it is not placed again, since too many requests are, after earlier losses "
        "(admission.retry_budget); try again later"
    )


def has_budget(
    flight: Flight,
    error: EngineLost,
    retries: RetryBudget,
    events: EventLog,
    limits: Limits,
    *,
    of: int,
) -> bool:
    """Whether a request of a lost engine may be placed anew: a share of so many may be."""
    engine = flight.engine
    assert engine is not None  # noqa: S101 - or it could not have been lost
    if retries.take(engine, trio.current_time(), share=limits.retry_budget, requests=of):
        return True
    error.args = (not_retried(error),)  # the error was made for this request alone
    events.emit(EventKind.RETRY_REFUSED, engine=engine, request_id=flight.request.request_id)
    return False


def lateness(
    flight: Flight, now: float, limits: Limits, retry_after: float
) -> tuple[Cause, DpkitError] | None:
    """Why a request ends for the time it has taken; None: it has time left."""
    request = flight.request
    if request.deadline is not None and now >= request.deadline:
        return Cause.DEADLINE, _too_late(flight)
    if flight.placement is None and now >= flight.times_out_at:
        return Cause.OVERLOADED, _waited_too_long(flight, limits, retry_after)
    return None


def _too_late(flight: Flight) -> DeadlineExceeded:
    """What a request hears whose deadline has passed."""
    request_id, made = flight.request.request_id, plural(len(flight.delivered), "token")
    return DeadlineExceeded(
        f"request {request_id}: its deadline passed after {made}; "
        "give it more time, or ask for fewer tokens",
        request_id=request_id,
    )


def _waited_too_long(flight: Flight, limits: Limits, retry_after: float) -> Overloaded:
    """What a request hears that found no place in time."""
    request_id = flight.request.request_id
    return Overloaded(
        f"request {request_id}: no engine had room for {limits.queue_timeout:g} s "
        "(admission.queue_timeout); try again later, or add engines",
        retry_after=retry_after,
        request_id=request_id,
    )
