"""Early binding: a request gets its engine the moment it comes, in one synchronous step.

Knows nothing of links or tasks: the caller submits, aborts, and gives every placement back. Pick
and charge have no checkpoint between them, so concurrent requests see each other's picks.
"""

from __future__ import annotations

import logging
from collections import Counter
from inspect import iscoroutine
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn

from attrs import define

from dpkit.abc import End, Policy
from dpkit.balancer.policies import policy_name
from dpkit.errors import DpkitError, NoEngineReady, PolicyFailed, RequestRejected, describe
from dpkit.names import Binding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.balancer.ledger import Charge, Ledger
    from dpkit.balancer.view import Load, LoadView
    from dpkit.messages import EngineId, GenerateRequest, Room, Snapshot, StepReport

    Known = tuple[str, float | None, int, int, int, float, float | None]
    Why = tuple[*Known, Sequence[EngineId], Sequence[float] | None]

_log = logging.getLogger(__name__)

PINNED = "pinned"
"""Rule of a request that names its engine."""

ANYWHERE = -1
"""In place of an engine's index: the policy is asked."""

HELD = "held"
"""Rule of a request whose id is in flight: it goes to the engine that has it."""


def expected_tokens(request: GenerateRequest) -> int:
    """Tokens that a request holds over its life, on average: its prompt and half of `max_tokens`.

    It may end anywhere before `max_tokens`, and what it has written grows from nothing, or from the
    output of an earlier life.
    """
    # What was said, and half of what may still be said.
    output = (request.sampling.max_tokens + len(request.output_token_ids)) // 2
    return len(request.prompt_token_ids) + output


def most_tokens(request: GenerateRequest) -> int:
    """Tokens whose KV a request may come to hold: of the last one it says none is ever computed."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens - 1


class Reason(NamedTuple):
    """Why a request went where it went: kept as numbers, put into words only when asked (`str`).

    The loads are what was known of the engine before this request was charged to it.
    """

    rule: str
    """The policy's name, or `PINNED`, or `HELD`."""

    score: float | None
    """What the policy compared; None where nothing was scored."""

    inflight: int
    waiting: int
    running: int
    kv_cache_usage: float
    age_s: float | None
    """Seconds since the engine or a snapshot last told of its load; None: neither has, and all that
    was known is what this client had sent there."""

    engines: Sequence[EngineId] = ()
    """All that could be picked."""

    scores: Sequence[float] | None = None
    """What the policy compared, of each of them; None where it does not say."""

    def __str__(self) -> str:
        score = "" if self.score is None else f" with score {self.score:g}"
        said = (
            f"{self.rule}{score}: {self.inflight} in flight, {self.waiting} waiting, "
            f"{self.running} running, {self.kv_cache_usage:.0%} of KV in use"
        )
        if self.age_s is not None:
            said += f", as told {self.age_s:.3g} s ago"
        if self.scores is None:
            return said
        each = zip(self.engines, self.scores, strict=True)
        return f"{said}; of " + ", ".join(f"{engine} {score:.3g}" for engine, score in each)


# Not frozen, as it is made for every request and frozen takes four times as long to make.
@define(eq=False)
class Placement:
    """A request with its engine, charged; give it back with `EarlyDispatch.release`."""

    request: GenerateRequest
    index: int  # where the engine was in the view; it may have moved since
    engine: EngineId
    charge: Charge
    why: Why
    rank: int

    @property
    def reason(self) -> Reason:
        """Why this engine."""
        return Reason(*self.why)


class EarlyDispatch:
    """One client's arbiter: asks the policy, charges the ledger, tells the policy."""

    binding: ClassVar[Binding] = Binding.EARLY

    def __init__(self, ledger: Ledger, view: LoadView, policy: Policy) -> None:
        self._ledger = ledger
        self._view = view
        self.picks: dict[str, Counter[int]] = {}
        """Requests placed so far, by rule and by rank."""
        self._policy = policy
        self._rule = policy_name(policy)
        # Reports come with every step: a policy that makes nothing of them has nothing to renew.
        self._hears_reports = type(policy).on_report is not Policy.on_report
        self._hears_answers = type(policy).on_answered is not Policy.on_answered
        self._hears_ends = type(policy).on_end is not Policy.on_end

    def __repr__(self) -> str:
        return f"<EarlyDispatch by {self._rule}: {self._ledger!r}>"

    def has_room(self, engine: str | None = None) -> bool:
        """Whether a request can be placed now: on any engine, or on the one that it is pinned to.

        True also for a pin to an engine that does not exist, which `place` refuses.
        """
        if engine is None:
            return bool(self._view.engines)
        return self._view.index_of(engine) is not None or engine not in self._view.names

    def place(
        self,
        request: GenerateRequest,
        chosen: int = ANYWHERE,
        *,
        now: float = 0.0,
        why: Why | None = None,
    ) -> Placement:
        """Choose an engine for a request and charge it there.

        An engine that the request names is taken without asking the policy; an id that is in
        flight goes to the engine that has it and shares its charge. Where engines differ in size,
        none is taken that could never hold the request, if another could.

        Args:
            request: What to place.
            chosen: Index of the engine that the policy has chosen for it already, just now.
            now: The time in seconds, from which `Reason.age_s` is reckoned; likewise below.
            why: What somebody else has chosen it by, whom this policy need not follow.

        Resource handling:
            The caller owns the placement and must `release` it, however the request ends.

        Error handling:
            NoEngineReady: no engine may be picked now, or not the one that the request names.
            RequestRejected: the request names an engine that does not exist, or its id is still
            in flight on a life that has left the view. PolicyFailed: the policy raised, or returned
            no valid index. In each case nothing is charged.
        """
        if (held := self._ledger.find(request.request_id)) is not None:
            return self._join(request, held, now)
        policy, view = self._policy, self._view
        loads = view.loads
        if request.engine is None:
            if not loads:
                raise _nobody(request, "no engine")
            index = self._pick(request) if chosen == ANYWHERE else chosen
            if type(index) is not int or not 0 <= index < len(loads):  # -1 would be the last one
                raise self._nowhere(request, index)
            room = loads[index].room
            if room is not None and room.kv_tokens < (needs := most_tokens(request)):
                index = self._where_it_fits(request, index, needs)
        else:
            index = self._pinned(request)
        load = loads[index]
        if why is None:
            why = self._why(request, index, load, now)
        engine = load.engine
        charge = self._ledger.charge(request.request_id, engine, expected_tokens(request))
        try:
            policy.on_charge(request, index, view)
        except BaseException as error:  # noqa: BLE001 - raised again: it must not leave a charge that nobody holds
            charge.release()
            self.blame("on_charge", error)
        return self._placement(request, index, charge, why, load.rank)

    def release(
        self, placement: Placement, output: Sequence[int] = (), *, finished: bool = False
    ) -> bool:
        """Stop counting a placed request. Idempotent: True the first time, False ever after.

        Args:
            placement: Of the request.
            output: Its tokens so far.
            finished: The model ended it.
        """
        if not placement.charge.release():
            return False
        # A release after its engine left must not reach what the policy counts for others.
        index = self._view.find(placement.charge.account, placement.index)
        if index is not None:
            self._tell("on_release", placement.request, index)
        if self._hears_ends:
            self._tell("on_end", placement.request, End(output=output, finished=finished))
        return True

    def on_answered(self, placement: Placement) -> None:
        """A placed request has its first token."""
        if self._hears_answers:
            self._tell("on_answered", placement.request)

    def expect(self, name: str) -> None:
        """An engine will come; see `LoadView.expect`."""
        self._view.expect(name)

    def forget(self, name: str) -> None:
        """An engine will not come back; see `LoadView.forget`."""
        self._view.forget(name)
        self._tell("on_engines")

    def add(self, engine: EngineId, rank: int, room: Room | None = None) -> None:
        """Let a life of an engine be picked; see `LoadView.add`."""
        self._view.add(engine, rank, room)
        self._tell("on_engines")

    def remove(self, engine: EngineId) -> bool:
        """Let a life be picked no more, whatever it still holds; False: it was not to be picked."""
        removed = self._view.remove(engine)
        if removed:
            self._tell("on_engines")
        return removed

    def take_over(self) -> None:
        """Go on where another dispatch of these books was: all of it is news to this policy."""
        self._view.changes.update(range(len(self._view.engines)))
        self._tell("on_engines")

    @property
    def books(self) -> tuple[Ledger, LoadView]:
        """What it writes and reads, for the dispatch that is to follow."""
        return self._ledger, self._view

    def on_snapshot(self, snapshot: Snapshot, *, now: float = 0.0) -> None:
        """Take the coordinator's newest word."""
        if self._view.apply(snapshot, now=now):
            self._tell("on_snapshot")

    def on_report(self, engine: EngineId, report: StepReport, *, now: float = 0.0) -> None:
        """Take a life's own newest word; of one that is not in the view it means nothing."""
        view = self._view
        if (index := view.find_life(engine)) is None:
            return
        view.load(index).hear_report(report, now)
        if self._hears_reports:
            view.changes.add(index)
            self._tell("on_report", index)

    def blame(self, hook: str, error: BaseException) -> NoReturn:
        """Say whose fault it is that a hook of the policy, which was asked by a request, raised.

        Raises:
            PolicyFailed: by an `Exception`; anything else, and what dpkit raises on purpose, is
            raised as it is.
        """
        if isinstance(error, DpkitError) or not isinstance(error, Exception):
            raise error
        _log.debug("policy %s failed in %s()", self._rule, hook, exc_info=error)
        raise PolicyFailed(
            f"policy {self._rule} raised {describe(error)}; that was its {hook}(), and "
            "log.level=debug logs its traceback"
        ) from error

    def _pick(self, request: GenerateRequest) -> int:
        try:
            return self._policy.pick(request, self._view)
        except Exception as error:  # noqa: BLE001 - whatever a policy raises
            self.blame("pick", error)

    def _tell(self, hook: str, *news: object) -> None:
        """Call a hook of the policy that only informs it.

        These calls are made on the way out of requests and lives: a policy's bug is told, and must
        not keep the books from being closed.
        """
        try:
            getattr(self._policy, hook)(*news, self._view)
        except Exception:  # noqa: BLE001 - whatever a policy raises
            _log.exception("policy %s failed in %s(); its picks may be off", self._rule, hook)

    def _placement(
        self, request: GenerateRequest, index: int, charge: Charge, why: Why, rank: int
    ) -> Placement:
        if (picks := self.picks.get(why[0])) is None:
            picks = self.picks[why[0]] = Counter()
        picks[rank] += 1
        return Placement(request, index, charge.engine, charge, why, rank)

    def _why(self, request: GenerateRequest, index: int, load: Load, now: float) -> Why:
        policy, view = self._policy, self._view
        rule, score, scores = PINNED, None, None
        if request.engine is None:
            rule = self._rule
            try:
                score, scores = policy.score(request, index, view), policy.scores(request, view)
            except Exception as error:  # noqa: BLE001 - whatever a policy raises
                self.blame("score", error)
        return (*_known(rule, score, load, now), view.engines, scores)

    def _where_it_fits(self, request: GenerateRequest, index: int, needs: int) -> int:
        """In place of an engine that can never hold a request: of those that can the best one."""
        policy, view = self._policy, self._view
        rooms = [load.room for load in view.loads]
        fit = [i for i, room in enumerate(rooms) if room is None or room.kv_tokens >= needs]
        # The engine says what is wrong with a request that is too long for all.
        return min(fit, key=lambda i: policy.score(request, i, view) or 0.0, default=index)

    def _nowhere(self, request: GenerateRequest, picked: object) -> PolicyFailed:
        words = f"engine {picked!r} of {len(self._view.engines)}; `pick` must"
        if iscoroutine(picked):
            picked.close()  # nobody will await it, and Python would warn of that
            words = "a coroutine; `pick` must not be async: it must"
        return PolicyFailed(
            f"cannot place request {request.request_id}: policy {self._rule} picked {words} return "
            "an index into `view.engines`",
            request_id=request.request_id,
        )

    def _pinned(self, request: GenerateRequest) -> int:
        name = str(request.engine)
        if (index := self._view.index_of(name)) is not None:
            return index
        if name in self._view.names:
            raise _nobody(request, f"no life of engine {name}")
        names = ", ".join(self._view.names) or "none yet"
        raise RequestRejected(
            f"cannot place request {request.request_id}: it is pinned to engine "
            f"{request.engine!r}, which does not exist; the engines are {names}",
            request_id=request.request_id,
        )

    def _join(self, request: GenerateRequest, held: Charge, now: float) -> Placement:
        if (index := self._view.find_life(held.engine)) is None:
            raise RequestRejected(
                f"cannot place request {request.request_id}: it is in flight on engine "
                f"{held.engine}, which takes no more; wait for it to end, or choose another "
                "request id",
                engine=held.engine,
                request_id=request.request_id,
            )
        load = self._view.load(index)
        why = (*_known(HELD, None, load, now), (), None)
        return self._placement(request, index, held, why, load.rank)


def _nobody(request: GenerateRequest, who: str) -> NoEngineReady:
    return NoEngineReady(
        f"cannot place request {request.request_id} now: {who} is ready; ask `has_room` before",
        request_id=request.request_id,
    )


def _known(rule: str, score: float | None, load: Load, now: float) -> Known:
    age_s = None if load.heard_at is None else now - load.heard_at
    return rule, score, load.inflight, load.waiting, load.running, load.kv_cache_usage, age_s
